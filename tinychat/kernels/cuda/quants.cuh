// Weights as the kernels read them: `planes` of one tensor, one after the other, each 16-byte aligned.
//   lo: per 32 weights 16 bytes of nibbles, or 32 bytes of int8
//   two, one: 8 bytes with 2 bits of each weight, 4 bytes with one: highest bits of a code, or all of it
//   s1: per 32 weights the scale (half), scale and minimum (two halves), or bytes: a scale, scale and minimum, two
//       scales of 16 weights each; Q2_K: two bytes of scale and minimum; MXFP4: the scale's exponent
//   s2: per 256 weights d, or d and dmin (halves), which multiply the bytes of s1
// A code is an integer, or the index of one in the type's table. Four weights in a row have their bits in bytes of a
// word, or those of indices in nibbles of half a word (`Places`). Floating-point types keep the file's layout; their
// block is 8 weights.

// Tables: a signed byte for each index; of 16, the last 8 are not negative (`add_products`). The IQ types' indices are
// one of a grid, and above it the sign.
#define INTEGERS 0
#define VALUES_FP4 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3, 4, 6, 8, 12
#define VALUES_IQ4 -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define VALUES_IQ3_XXS -4, -12, -20, -28, -36, -44, -52, -62, 4, 12, 20, 28, 36, 44, 52, 62
#define VALUES_IQ2 8, 25, 43, 0, -8, -25, -43, 0

// The types, one a row; quants.py reads the rows here. A new type is a row, and a case in gguf.cuh where a file has it
// in a new form. The columns: GGML's number; bytes of lo, two and one per block, and what their units count in a code;
// bytes of s1 per block and of s2 per 8 blocks; the offset, where weight = scale * (code - offset); whether weight =
// scale * code + minimum; whether 16 weights have a scale of their own; how often d is halved; weights that a lane
// reads at once; in a block of the file the first byte of the codes, of their highest bits, of the F16 scale and
// minimum (-1: none); the table.
#define QUANTS(X)                                                                       \
  X(F32, 0, 32, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1, INTEGERS)            \
  X(F16, 1, 16, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1, INTEGERS)            \
  X(BF16, 30, 16, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1, INTEGERS)          \
  X(Q4_0, 2, 16, 0, 0, 1, 0, 0, 2, 0, 8, 0, 0, 0, 32, 2, -1, 0, -1, INTEGERS)           \
  X(Q4_1, 3, 16, 0, 0, 1, 0, 0, 4, 0, 0, 1, 0, 0, 32, 4, -1, 0, 2, INTEGERS)            \
  X(Q5_0, 6, 16, 0, 4, 1, 0, 16, 2, 0, 16, 0, 0, 0, 32, 6, 2, 0, -1, INTEGERS)          \
  X(Q5_1, 7, 16, 0, 4, 1, 0, 16, 4, 0, 0, 1, 0, 0, 32, 8, 4, 0, 2, INTEGERS)            \
  X(Q8_0, 8, 32, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 32, 2, -1, 0, -1, INTEGERS)           \
  X(Q2_K, 10, 0, 8, 0, 0, 1, 0, 2, 4, 0, 1, 1, 0, 32, 16, -1, 80, 82, INTEGERS)         \
  X(Q3_K, 11, 0, 8, 4, 0, 1, 4, 2, 2, 4, 0, 1, 0, 32, 32, 0, 108, -1, INTEGERS)         \
  X(Q4_K, 12, 16, 0, 0, 1, 0, 0, 2, 4, 0, 1, 0, 0, 32, 16, -1, 0, 2, INTEGERS)          \
  X(Q5_K, 13, 16, 0, 4, 1, 0, 16, 2, 4, 0, 1, 0, 0, 32, 48, 16, 0, 2, INTEGERS)         \
  X(Q6_K, 14, 16, 8, 0, 1, 16, 0, 2, 2, 32, 0, 1, 0, 32, 0, 128, 208, -1, INTEGERS)     \
  X(IQ1_S, 19, 0, 8, 4, 0, 8, 2, 1, 2, 9, 0, 0, 3, 32, 2, -1, 0, -1, INTEGERS)          \
  X(IQ1_M, 29, 0, 8, 4, 0, 8, 2, 2, 2, 9, 0, 1, 3, 32, 0, -1, -1, -1, INTEGERS)         \
  X(IQ2_XXS, 16, 0, 8, 4, 0, 1, 4, 1, 2, 0, 0, 0, 3, 32, 2, -1, 0, -1, VALUES_IQ2)      \
  X(IQ2_XS, 17, 0, 8, 4, 0, 1, 4, 2, 2, 0, 0, 1, 3, 32, 2, -1, 0, -1, VALUES_IQ2)       \
  X(IQ2_S, 22, 0, 8, 4, 0, 1, 4, 2, 2, 0, 0, 1, 3, 32, 2, -1, 0, -1, VALUES_IQ2)        \
  X(IQ3_XXS, 18, 16, 0, 0, 1, 0, 0, 1, 2, 0, 0, 0, 2, 32, 2, -1, 0, -1, VALUES_IQ3_XXS) \
  X(IQ3_S, 21, 16, 0, 0, 2, 0, 0, 1, 2, 15, 0, 0, 0, 32, 2, -1, 0, -1, INTEGERS)        \
  X(IQ4_NL, 20, 16, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 32, 2, -1, 0, -1, VALUES_IQ4)      \
  X(IQ4_XS, 23, 16, 0, 0, 1, 0, 0, 1, 2, 0, 0, 0, 0, 32, 8, -1, 0, -1, VALUES_IQ4)      \
  X(TQ1_0, 34, 0, 8, 0, 0, 1, 0, 0, 2, 1, 0, 0, 0, 32, 0, -1, 52, -1, INTEGERS)         \
  X(TQ2_0, 35, 0, 8, 0, 0, 1, 0, 0, 2, 1, 0, 0, 0, 32, 0, -1, 64, -1, INTEGERS)         \
  X(MXFP4, 39, 16, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 32, 1, -1, -1, -1, VALUES_FP4)

struct Planes {
  int lo, two, one, lo_unit, two_unit, one_unit, s1, s2, offset, min, split, shift, block, codes, bits, scale, minimum;
  signed char table[16];
};
#define NUMBER(name, id, ...) name = id,
enum { QUANTS(NUMBER) };
#define PLANES_OF(name, id, ...) \
  case id:                       \
    return Planes{__VA_ARGS__};
DEVICE constexpr Planes planes(int t) {
  switch (t) { QUANTS(PLANES_OF) }
  return Planes{};
}
DEVICE constexpr int lo_bytes(int t) { return planes(t).lo; }
DEVICE constexpr int two_bytes(int t) { return planes(t).two; }
DEVICE constexpr int one_bytes(int t) { return planes(t).one; }
DEVICE constexpr int s1_bytes(int t) { return planes(t).s1; }
DEVICE constexpr int s2_bytes(int t) { return planes(t).s2; }
DEVICE constexpr int offset_of(int t) { return planes(t).offset; }
DEVICE constexpr bool has_min(int t) { return planes(t).min; }
DEVICE constexpr bool has_table(int t) { return planes(t).table[2]; }
DEVICE constexpr int block_of(int t) { return planes(t).block; }
DEVICE constexpr bool is_float(int t) { return block_of(t) == 8; }
DEVICE constexpr bool signed_codes(int t) { return t == Q8_0 || has_table(t); }
DEVICE constexpr u64 align16(u64 n) { return (n + 15) / 16 * 16; }
DEVICE constexpr u64 two_at(int t, u64 blocks) { return align16(blocks * lo_bytes(t)); }
DEVICE constexpr u64 one_at(int t, u64 blocks) { return two_at(t, blocks) + align16(blocks * two_bytes(t)); }
DEVICE constexpr u64 s1_at(int t, u64 blocks) { return one_at(t, blocks) + align16(blocks * one_bytes(t)); }
DEVICE constexpr u64 s2_at(int t, u64 blocks) { return s1_at(t, blocks) + align16(blocks * s1_bytes(t)); }

template <int T> struct Block {
  V4 a, b;
  V2 two;
  u32 one, s1, s2;
};  // one block in registers; unused members cost nothing

// Where weights are read from.
struct InGlobal {
  static DEVICE V4 get16(const u8 *p) { return ldc16(p); }
  static DEVICE V2 get8(const u8 *p) { return ldc8(p); }
  static DEVICE u32 get4(const u8 *p) { return ldc4(p); }
  static DEVICE u32 get2(const u8 *p) { return ldc2(p); }
  static DEVICE u32 get1(const u8 *p) { return ldc1(p); }
};
struct InShared {
  static DEVICE V4 get16(const u8 *p) { return *(const V4 *)p; }
  static DEVICE V2 get8(const u8 *p) { return *(const V2 *)p; }
  static DEVICE u32 get4(const u8 *p) { return *(const u32 *)p; }
  static DEVICE u32 get2(const u8 *p) { return *(const u16 *)p; }
  static DEVICE u32 get1(const u8 *p) { return *p; }
};

// Block number `i` of a tensor of `blocks` blocks: its codes, or all of it.
template <int T, class Memory = InGlobal> DEVICE void fetch_codes(Block<T> &f, const u8 *w, u64 blocks, u64 i) {
  if (lo_bytes(T)) f.a = Memory::get16(w + i * lo_bytes(T));
  if (lo_bytes(T) == 32) f.b = Memory::get16(w + i * 32 + 16);
  if (two_bytes(T)) f.two = Memory::get8(w + two_at(T, blocks) + i * 8);
  if (one_bytes(T)) f.one = Memory::get4(w + one_at(T, blocks) + i * 4);
}
template <int T, class Memory> DEVICE void fetch_scales(Block<T> &f, const u8 *s1, const u8 *s2) {
  if (s1_bytes(T) == 1) f.s1 = Memory::get1(s1);
  if (s1_bytes(T) == 2) f.s1 = Memory::get2(s1);
  if (s1_bytes(T) == 4) f.s1 = Memory::get4(s1);
  if (s2_bytes(T) == 2) f.s2 = Memory::get2(s2);
  if (s2_bytes(T) == 4) f.s2 = Memory::get4(s2);
}
template <int T, class Memory = InGlobal> DEVICE void fetch(Block<T> &f, const u8 *w, u64 blocks, u64 i) {
  fetch_codes<T, Memory>(f, w, blocks, i);
  fetch_scales<T, Memory>(f, w + s1_at(T, blocks) + i * s1_bytes(T), w + s2_at(T, blocks) + i / 8 * s2_bytes(T));
}

// Where a field, the bits that a plane has of four weights, lies in a word: those of a weight STEP bits above those of
// the one before, so that there is room for STEP / `bits` fields in their gaps. Field number j begins at bit
// first(bits, j).
template <int T> struct Places {
  static constexpr int STEP = has_table(T) ? 4 : 8;
  static constexpr u32 ONES = has_table(T) ? 0x1111 : 0x01010101;
  static DEVICE constexpr int first(int bits, int j) { return bits * j / STEP * 16 + bits * j % STEP; }
};
// Values 4i..4i+3 of a table. `summed`: of the upper half, what makes them up where the lower half gives its signs.
DEVICE constexpr u32 table_word(const signed char *t, int i, bool summed = false) {
  u32 word = 0;
  for (int c = 0, at = 4 * i; c < 4; c++, at++) word |= (u32)(u8)(t[at] + (summed && t[at - 8] < 0)) << 8 * c;
  return word;
}
// The bytes that four indices stand for: nibbles, of 3 bits where no nibbles are stored; above them may be anything.
template <int T> DEVICE u32 values_of(u32 q) {
  constexpr Planes P = planes(T);
  constexpr u32 a = table_word(P.table, 0), b = table_word(P.table, 1), c = table_word(P.table, 2),
                d = table_word(P.table, 3);
  if (!P.lo) return permute_bytes(a, b, q);
  const u32 low = permute_bytes(a, b, q & 0x7777), high = permute_bytes(c, d, q & 0x7777);
  return permute_bytes(low, high, 0x3210 | (q & 0x8888) >> 1);
}
// Codes of weights 4w..4w+3 as bytes, or indices, for w in 0..7.
template <int T> DEVICE u32 fields(const Block<T> &f, int w) {
  constexpr Planes P = planes(T);
  using At = Places<T>;
  const V4 &v = P.lo == 32 && w >= 4 ? f.b : f.a;
  const u32 lo = w % 4 == 0 ? v.x : w % 4 == 1 ? v.y : w % 4 == 2 ? v.z : v.w, two = w < 4 ? f.two.x : f.two.y;
  if (P.lo == 32) return lo;
  if (P.lo && has_table(T)) return lo >> At::first(4, w / 4);
  u32 q = P.lo ? (lo >> At::first(4, w / 4) & 15 * At::ONES) * P.lo_unit : 0;
  if (P.two) q |= (two >> At::first(2, w % 4) & 3 * At::ONES) * P.two_unit;
  if (P.one) q |= (f.one >> At::first(1, w) & At::ONES) * P.one_unit;
  return q;
}
// Codes of weights 4w..4w+3 as bytes (signed as `signed_codes` says).
template <int T> DEVICE u32 codes(const Block<T> &f, int w) {
  return has_table(T) ? values_of<T>(fields<T>(f, w)) : fields<T>(f, w);
}
// sum + their products with x. Of a table of 16 each half is looked up by itself, without a third permutation: where an
// index is of the other half, the byte is the sign of a value, -1 or 0, for which the upper half makes up.
template <int T> DEVICE int add_products(int sum, const Block<T> &f, int w, u32 x) {
  constexpr Planes P = planes(T);
  if constexpr (has_table(T) && P.lo) {
    constexpr u32 a = table_word(P.table, 0), b = table_word(P.table, 1), c = table_word(P.table, 2, true),
                  d = table_word(P.table, 3, true);
    const u32 q = fields<T>(f, w);
    sum = dp4a(permute_bytes(a, b, q), x, sum);
    return dp4a(permute_bytes(c, d, q ^ 0x8888), x, sum);
  }
  return dp4a(codes<T>(f, w), x, sum);
}
// Scale and additive term of a block: weight = scale * code + shift. `half`: of which 16 weights, in types with split
// scales.
template <int T> DEVICE float scale_of(u32 s1, u32 s2, int half = 0) {
  constexpr Planes P = planes(T);
  if (T == MXFP4) return unbits(s1 < 2 ? 0x00200000u << s1 : (s1 - 1) << 23);  // 2^(s1 - 128): the codes are doubled
  if (!P.s2) return half_to_float(s1);
  const float d = half_to_float(s2) * (1.f / (1 << P.shift));
  if (!P.s1) return d;
  const u32 scale = P.split ? s1 >> 8 * half : s1;
  return d * (float)(P.split && P.min ? (int)(scale & 15) : (int)(signed char)scale);
}
template <int T> DEVICE float shift_of(u32 s1, u32 s2, int half = 0) {
  constexpr Planes P = planes(T);
  if (!P.min) return -(float)P.offset * scale_of<T>(s1, s2, half);
  if (!P.s2) return half_to_float(s1 >> 16);
  return -half_to_float(s2 >> 16) * (float)(P.split ? s1 >> (8 * half + 4) & 15 : s1 >> 8 & 0xFF);
}

// An activation block of 32: int8 codes, their scale, and the sums of the first and second 16 codes (low and high half
// of `sums`).
struct Scale {
  float d;
  int sums;
};
DEVICE int sum_lo(int s) { return (short)s; }
DEVICE int sum_hi(int s) { return s >> 16; }

// The scales and additive terms of a block: one, or two where scales are split.
template <int T> struct Scales {
  float scale[2] = {}, shift[2] = {};
  DEVICE Scales(u32 s1, u32 s2) {
#pragma unroll
    for (int half = 0; half <= planes(T).split; half++) {
      scale[half] = scale_of<T>(s1, s2, half);
      if (has_min(T)) shift[half] = shift_of<T>(s1, s2, half);
    }
  }
};
// What a block adds to a row's sum, as two factors. `d`: the activations' scale; `product`: of the block's codes less
// the offset, of 16 each where scales are split; `sum`: of the activations' codes there.
template <int T> DEVICE F2 term(float d, const Scales<T> &s, const float (&product)[2], const float (&sum)[2]) {
  if (!planes(T).split && !has_min(T)) return F2{mul_rn(d, s.scale[0]), product[0]};
  if (!planes(T).split) return F2{d, fma_rn(s.scale[0], product[0], mul_rn(s.shift[0], sum[0]))};
  if (!has_min(T)) return F2{d, fma_rn(s.scale[0], product[0], mul_rn(s.scale[1], product[1]))};
  return F2{d,
      add_rn(fma_rn(s.scale[0], product[0], mul_rn(s.shift[0], sum[0])),
          fma_rn(s.scale[1], product[1], mul_rn(s.shift[1], sum[1])))};
}
template <int T> DEVICE F2 factors(const Block<T> &f, const V4 &x0, const V4 &x1, const Scale &s) {
  const u32 x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
  int i0 = 0, i1 = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    i0 = add_products<T>(i0, f, w, x[w]);
    i1 = add_products<T>(i1, f, w + 4, x[w + 4]);
  }
  int product[2] = {i0, i1}, sum[2] = {sum_lo(s.sums), sum_hi(s.sums)};
  if (!planes(T).split) {
    product[0] += product[1];
    sum[0] += sum[1];
  }
  const float products[2] = {(float)(product[0] - offset_of(T) * sum[0]), (float)(product[1] - offset_of(T) * sum[1])};
  const float sums[2] = {(float)sum[0], (float)sum[1]};
  return term<T>(s.d, Scales<T>(f.s1, f.s2), products, sums);
}
template <int T> DEVICE float dot(const Block<T> &f, const V4 &x0, const V4 &x1, const Scale &s) {
  const F2 t = factors<T>(f, x0, x1, s);
  return mul_rn(t.x, t.y);
}
// sum + dot, rounded once.
template <int T> DEVICE float added(float sum, const Block<T> &f, const V4 &x0, const V4 &x1, const Scale &s) {
  const F2 t = factors<T>(f, x0, x1, s);
  return fma_rn(t.x, t.y, sum);
}

DEVICE float bf16_lo(u32 v) { return unbits(v << 16); }
DEVICE float bf16_hi(u32 v) { return unbits(v & 0xFFFF0000); }
template <int T> DEVICE void floats(const Block<T> &f, float (&v)[8]) {
  const u32 u[8] = {f.a.x, f.a.y, f.a.z, f.a.w, f.b.x, f.b.y, f.b.z, f.b.w};
#pragma unroll
  for (int i = 0; i < 8; i++)
    v[i] = T == F32 ? unbits(u[i])
        : T == F16  ? half_to_float(u[i / 2] >> 16 * (i & 1))
        : i & 1     ? bf16_hi(u[i / 2])
                    : bf16_lo(u[i / 2]);
}
template <int T> DEVICE float dot(const Block<T> &f, const float *x) {
  float v[8], acc = 0;
  floats<T>(f, v);
  const F4 p = *(const F4 *)x, q = *(const F4 *)(x + 4);
  acc += v[0] * p.x + v[1] * p.y + v[2] * p.z + v[3] * p.w;
  return acc + v[4] * q.x + v[5] * q.y + v[6] * q.z + v[7] * q.w;
}

// Weight k of a tensor, for table look-ups.
template <int T> DEVICE float weight_at(const u8 *w, u64 blocks, u64 k) {
  Block<T> f{};
  fetch<T>(f, w, blocks, k / block_of(T));
  const int j = k % block_of(T);
  if (is_float(T)) {
    float v[8], out = 0;
    floats<T>(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) out = i == j ? v[i] : out;
    return out;
  }
  u32 q = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) q = i == j / 4 ? codes<T>(f, i) : q;
  q = q >> 8 * (j & 3) & 0xFF;
  const float code = signed_codes(T) ? (float)(signed char)q : (float)q;
  return scale_of<T>(f.s1, f.s2, j / 16) * code + shift_of<T>(f.s1, f.s2, j / 16);
}

// Row r of matrix g of a weight (constants.py, Matrix) in its packed tensor.
template <class M> DEVICE u64 packed_row(int g, int r) {
  constexpr int RUN = M::RUN ? M::RUN : 1;
  if (M::RUN) return M::START + (u64)(r / RUN) * M::STRIDE + r % RUN;
  return M::START + (u64)g * M::STRIDE + r;
}

// --- reductions, and the state of a step

DEVICE float warp_sum(float v) {
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  return v;
}
// Over the block, for all threads of it, warp after warp. `red`: a float per warp, which nobody else uses meanwhile.
DEVICE float warps_sum(float v, float *red) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) v += red[i];
  return v;
}
DEVICE float warp_max(float v) {
  for (int m = 16; m; m >>= 1) v = fmaxf(v, shfl_xor(v, m));
  return v;
}

DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// A float's bits, made to sort as unsigned.
DEVICE u32 key_of(float v) {
  const u32 u = bits(v);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
// Keys per split: the cache's `keys` rows in at most SPLITS parts, whole chunks each.
DEVICE int keys_per_split(int keys, int splits, int chunk) {
  return ((keys + splits - 1) / splits + chunk - 1) / chunk * chunk;
}

// One warp: the weights of a head's `active` attention splits, from each split's maximum (log2) and sum.
// `sink`: one more score (log2).
template <int SPLITS>
DEVICE void combine_weights(float *weight, const F2 *ml, int stride, int active, int lane, float sink = -INFINITY) {
  constexpr int N = (SPLITS + 31) / 32;
  float m = -1e30f, l = 0, e[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int s = lane + 32 * i;
    e[i] = s < active ? ml[s * stride].x : -1e30f;
    m = fmaxf(m, e[i]);
  }
  m = warp_max(m);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int s = lane + 32 * i;
    e[i] = s < active ? exp2_fast(e[i] - m) * ml[s * stride].y : 0;
    l += e[i];
  }
  l = warp_sum(l) + exp2_fast(sink - m);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (lane + 32 * i < active) weight[lane + 32 * i] = e[i] / l;
}
