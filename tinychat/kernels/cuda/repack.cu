// At load: GGUF blocks to planes (quants.cuh), one thread per 32 weights. Constants: TYPE, FILE_BYTES.

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
  file_scales<TYPE>(s1, s2, b, g);
}
