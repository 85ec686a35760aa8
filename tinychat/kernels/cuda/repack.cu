// GGUF blocks to planes (quants.cuh), one thread per 32 weights; and a legacy kv_b's K part, transposed, as halves.

DEVICE u32 byte_at(const u8 *p) { return *p; }
DEVICE u32 u16_at(const u8 *p) { return p[0] | p[1] << 8; }

// Code of weight i (0..31) of 32-block g of a super-block (g is 0 where blocks have 32 weights).
template <int T> DEVICE u32 file_code(const u8 *b, int g, int i) {
  if (T == Q8_0) return b[2 + i];
  if (T == Q4_0 || T == Q4_1 || T == Q5_0 || T == Q5_1) {
    const u8 *h = b + (T == Q5_1 ? 4 : 2), *q = b + (T == Q4_0 ? 2 : T == Q4_1 ? 4 : T == Q5_0 ? 6 : 8);
    const u32 v = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
    return T == Q5_0 || T == Q5_1 ? v | (u32)(h[i / 8] >> i % 8 & 1) << 4 : v;
  }
  if (T == Q4_K || T == Q5_K) {
    const u8 *q = b + (T == Q4_K ? 16 : 48) + g / 2 * 32;
    const u32 v = g % 2 ? q[i] >> 4 : q[i] & 15;
    return T == Q5_K ? v | (u32)(b[16 + i] >> g & 1) << 4 : v;
  }
  const int half = g / 4, part = g % 4;  // Q6_K
  const u8 q = b[64 * half + 32 * (part & 1) + i], h = b[128 + 32 * half + i];
  return (part < 2 ? q & 15 : q >> 4) | (u32)(h >> 2 * part & 3) << 4;
}

template <int T, int SIZE> DEVICE void repack(u8 *out, const u8 *in, u64 blocks, u64 first, int count) {
  const int j = blockIdx.x * 256 + threadIdx.x;
  if (j >= count) return;
  constexpr int PER = s2_bytes(T) ? 8 : 1;
  const u64 i = first + j;
  const int g = j % PER;
  const u8 *b = in + (u64)(j / PER) * SIZE;
  u32 lo[8] = {}, h0 = 0, h1 = 0;
#pragma unroll
  for (int e = 0; e < 32; e++) {
    const u32 q = file_code<T>(b, g, e);
    const int w = e / 4, c = e % 4;
    if (T == Q8_0) lo[w] |= q << 8 * c;
    else lo[w & 3] |= (q & 15) << (8 * c + (w < 4 ? 0 : 4));
    if (hi_bytes(T) == 4) h0 |= (q >> 4 & 1) << (8 * c + w);
    if (hi_bytes(T) == 8) {
      if (w < 4) h0 |= (q >> 4 & 3) << (8 * c + 2 * w);
      else h1 |= (q >> 4 & 3) << (8 * c + 2 * (w & 3));
    }
  }
  for (int w = 0; w < lo_bytes(T) / 4; w++) ((u32 *)(out + i * lo_bytes(T)))[w] = lo[w];
  u8 *hi = out + hi_at(T, blocks) + i * hi_bytes(T), *s1 = out + s1_at(T, blocks) + i * s1_bytes(T),
     *s2 = out + s2_at(T, blocks) + i / 8 * s2_bytes(T);
  if (hi_bytes(T)) ((u32 *)hi)[0] = h0;
  if (hi_bytes(T) == 8) ((u32 *)hi)[1] = h1;
  if (T == Q4_K || T == Q5_K) {
    const u8 *s = b + 4;
    s1[0] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    s1[1] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
    if (g == 0)
      for (int c = 0; c < 4; c++) s2[c] = b[c];
  } else if (T == Q6_K) {
    s1[0] = b[192 + 2 * g];
    s1[1] = b[192 + 2 * g + 1];
    if (g == 0) {
      s2[0] = b[208];
      s2[1] = b[209];
    }
  } else
    for (int c = 0; c < s1_bytes(T); c++) s1[c] = b[c];
}

// dst[g][r][c] (ROWS, COLS) = row start + c, column r of group g: columns become rows.
template <int T, int ROWS, int COLS>
DEVICE void transpose(u16 *dst, const u8 *w, u64 blocks, int start, int stride, int total) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= total) return;
  const int c = i % COLS, r = i / COLS % ROWS, g = i / COLS / ROWS;
  dst[i] = float_to_half(weight_at<T>(w, blocks, ((u64)g * stride + start + c) * ROWS + r));
}
