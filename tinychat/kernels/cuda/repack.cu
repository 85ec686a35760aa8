// At load: GGUF blocks to planes (quants.cuh), one thread per 32 weights. Constants: TYPE, FILE_BYTES.

// Code of weight i (0..31) of 32-block g of a super-block (g is 0 where blocks have 32 weights).
template <int T> DEVICE u32 file_code(const u8 *b, int g, int i) {
  if (T == Q8_0) return b[2 + i];
  if (T == Q4_0 || T == Q4_1 || T == Q5_0 || T == Q5_1 || T == MXFP4) {
    const u8 *h = b + (T == Q5_1 ? 4 : 2), *q = b + (T == MXFP4 ? 1 : T == Q4_0 ? 2 : T == Q4_1 ? 4 : T == Q5_0 ? 6 : 8);
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

struct Args {
  u8 *out = nullptr;
  const u8 *in = nullptr;       // blocks of the file, FILE_BYTES each
  const u64 *params = nullptr;  // blocks (of 32 weights) of the tensor, the first of these, their number
};

DEVICE void run(const Args &a) {
  const int j = blockIdx.x * 256 + threadIdx.x;
  const u64 blocks = a.params[0], first = a.params[1];
  if (j >= (int)a.params[2]) return;
  constexpr int PER = s2_bytes(TYPE) ? 8 : 1;
  const u64 i = first + j;
  const int g = j % PER;
  const u8 *b = a.in + (u64)(j / PER) * FILE_BYTES;
  u32 lo[8] = {}, h0 = 0, h1 = 0;
#pragma unroll
  for (int e = 0; e < 32; e++) {
    const u32 q = file_code<TYPE>(b, g, e);
    const int w = e / 4, c = e % 4;
    if (TYPE == Q8_0) lo[w] |= q << 8 * c;
    else lo[w & 3] |= (q & 15) << (8 * c + (w < 4 ? 0 : 4));
    if (hi_bytes(TYPE) == 4) h0 |= (q >> 4 & 1) << (8 * c + w);
    if (hi_bytes(TYPE) == 8) {
      if (w < 4) h0 |= (q >> 4 & 3) << (8 * c + 2 * w);
      else h1 |= (q >> 4 & 3) << (8 * c + 2 * (w & 3));
    }
  }
  for (int w = 0; w < lo_bytes(TYPE) / 4; w++) ((u32 *)(a.out + i * lo_bytes(TYPE)))[w] = lo[w];
  u8 *hi = a.out + hi_at(TYPE, blocks) + i * hi_bytes(TYPE), *s1 = a.out + s1_at(TYPE, blocks) + i * s1_bytes(TYPE),
     *s2 = a.out + s2_at(TYPE, blocks) + i / 8 * s2_bytes(TYPE);
  if (hi_bytes(TYPE)) ((u32 *)hi)[0] = h0;
  if (hi_bytes(TYPE) == 8) ((u32 *)hi)[1] = h1;
  if (TYPE == Q4_K || TYPE == Q5_K) {
    const u8 *s = b + 4;
    s1[0] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    s1[1] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
    if (g == 0)
      for (int c = 0; c < 4; c++) s2[c] = b[c];
  } else if (TYPE == Q6_K) {
    s1[0] = b[192 + 2 * g];
    s1[1] = b[192 + 2 * g + 1];
    if (g == 0) {
      s2[0] = b[208];
      s2[1] = b[209];
    }
  } else
    for (int c = 0; c < s1_bytes(TYPE); c++) s1[c] = b[c];
}
