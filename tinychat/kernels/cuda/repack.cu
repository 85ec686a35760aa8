// At load: GGUF blocks to planes (quants.cuh), one thread per 32 weights. Constants: TYPE, FILE_BYTES.
#include "gguf.cuh"

struct Args {
  u8 *out = nullptr;
  const u8 *in = nullptr;  // blocks of the file, FILE_BYTES each
  // blocks (of 32 weights) of the tensor, the first of these, their number; behind them the type's grid (u16)
  const u64 *params = nullptr;
};

// Adds `bits` bits of the codes of weights 4w..4w+3 as field j of a word.
template <int BITS> DEVICE void put_field(u32 &word, const u32 (&code)[4], int from, int j) {
#pragma unroll
  for (int c = 0; c < 4; c++)
    word |= (code[c] >> from & ((1 << BITS) - 1)) << (Places<TYPE>::first(BITS, j) + Places<TYPE>::STEP * c);
}

DEVICE void run(const Args &a) {
  constexpr Planes P = planes(TYPE);
  const int j = blockIdx.x * 256 + threadIdx.x;
  const u64 blocks = a.params[0], first = a.params[1];
  if (j >= (int)a.params[2]) return;
  constexpr int PER = P.s2 ? 8 : 1;
  const u64 i = first + j;
  const int g = j % PER;
  const u8 *b = a.in + (u64)(j / PER) * FILE_BYTES;
  u32 lo[8] = {}, two[2] = {}, one = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) {
    u32 code[4];
#pragma unroll
    for (int c = 0; c < 4; c++) code[c] = file_code<TYPE>(b, (const u16 *)(a.params + 3), g, 4 * w + c);
    if (P.lo == 32) put_field<8>(lo[w], code, 0, 0);
    if (P.lo == 16) put_field<4>(lo[w % 4], code, 0, w / 4);
    if (P.two) put_field<2>(two[w / 4], code, P.lo ? 4 : 0, w % 4);
    if (P.one) put_field<1>(one, code, P.lo ? 4 : 2, w);
  }
  for (int w = 0; w < P.lo / 4; w++) ((u32 *)(a.out + i * P.lo))[w] = lo[w];
  for (int w = 0; w < P.two / 4; w++) ((u32 *)(a.out + two_at(TYPE, blocks) + i * 8))[w] = two[w];
  if (P.one) *(u32 *)(a.out + one_at(TYPE, blocks) + i * 4) = one;
  file_scales<TYPE>(a.out + s1_at(TYPE, blocks) + i * P.s1, a.out + s2_at(TYPE, blocks) + i / 8 * P.s2, b, g);
}
