// Weights as the kernels read them: `planes` of one tensor, one after the other, each 16-byte aligned.
//   lo: per 32 weights 16 bytes of nibbles (byte i holds weight i low, i + 16 high), Q8_0: 32 bytes of int8; MXFP4's
//   nibbles are indices of its table
//   hi: the 5th bits (one word; bit 8 * b + w is that of weight 4 * w + b) or the 5th and 6th (two words, 2 bits each)
//   s1: per 32 weights the scale (half), scale and minimum (two halves), K-quants: two bytes (scale and minimum, Q6_K:
//   2 scales), MXFP4: a byte, the scale's exponent; s2: per 256 weights d and dmin (two halves), Q6_K: d (half)
// Floating-point types keep the file's layout; their block is 8 weights.

// The types, one a row; quants.py reads the rows here. A new type is a row, and a case wherever a function of this file
// asks for types by name. The columns: GGML's number; bytes of lo, hi and s1 per block and of s2 per 8 blocks; the offset,
// where weight = scale * (code - offset); whether weight = scale * code + minimum; weights that a lane reads at once; in a
// block of the file the first byte of the codes, of their fifth bits, of the F16 scale and minimum (-1: none).
#define QUANTS(X)                                      \
  X(F32, 0, 32, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1)       \
  X(F16, 1, 16, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1)       \
  X(BF16, 30, 16, 0, 0, 0, 0, 0, 8, 0, -1, -1, -1)     \
  X(Q4_0, 2, 16, 0, 2, 0, 8, 0, 32, 2, -1, 0, -1)      \
  X(Q4_1, 3, 16, 0, 4, 0, 0, 1, 32, 4, -1, 0, 2)       \
  X(Q5_0, 6, 16, 4, 2, 0, 16, 0, 32, 6, 2, 0, -1)      \
  X(Q5_1, 7, 16, 4, 4, 0, 0, 1, 32, 8, 4, 0, 2)        \
  X(Q8_0, 8, 32, 0, 2, 0, 0, 0, 32, 2, -1, 0, -1)      \
  X(Q4_K, 12, 16, 0, 2, 4, 0, 1, 32, 16, -1, 0, 2)     \
  X(Q5_K, 13, 16, 4, 2, 4, 0, 1, 32, 48, 16, 0, 2)     \
  X(Q6_K, 14, 16, 8, 2, 2, 32, 0, 32, 0, 128, 208, -1) \
  X(MXFP4, 39, 16, 0, 1, 0, 0, 0, 32, 1, -1, -1, -1)

struct Planes {
  int lo, hi, s1, s2, offset, min, block, codes, bits, scale, minimum;
};
#define NUMBER(name, id, ...) name = id,
enum { QUANTS(NUMBER) };
#define PLANES_OF(name, id, ...) \
  case id: return Planes{__VA_ARGS__};
DEVICE constexpr Planes planes(int t) {
  switch (t) { QUANTS(PLANES_OF) }
  return Planes{};
}
DEVICE constexpr int lo_bytes(int t) { return planes(t).lo; }
DEVICE constexpr int hi_bytes(int t) { return planes(t).hi; }
DEVICE constexpr int s1_bytes(int t) { return planes(t).s1; }
DEVICE constexpr int s2_bytes(int t) { return planes(t).s2; }
DEVICE constexpr int offset_of(int t) { return planes(t).offset; }
DEVICE constexpr bool has_min(int t) { return planes(t).min; }
DEVICE constexpr int block_of(int t) { return planes(t).block; }
DEVICE constexpr bool is_float(int t) { return block_of(t) == 8; }
DEVICE constexpr u64 align16(u64 n) { return (n + 15) / 16 * 16; }
DEVICE constexpr u64 hi_at(int t, u64 blocks) { return align16(blocks * lo_bytes(t)); }
DEVICE constexpr u64 s1_at(int t, u64 blocks) { return hi_at(t, blocks) + align16(blocks * hi_bytes(t)); }
DEVICE constexpr u64 s2_at(int t, u64 blocks) { return s1_at(t, blocks) + align16(blocks * s1_bytes(t)); }

template <int T> struct Block {
  V4 a, b;
  u32 h0, h1, s1, s2;
};  // one block in registers; unused members cost nothing

// Where weights are read from.
struct InGlobal {
  static DEVICE V4 get16(const u8 *p) { return ldc16(p); }
  static DEVICE V2 get8(const u8 *p) { return ldc8(p); }
  static DEVICE u32 get4(const u8 *p) { return ldc4(p); }
  static DEVICE u32 get2(const u8 *p) { return ldc2(p); }
};
struct InShared {
  static DEVICE V4 get16(const u8 *p) { return *(const V4 *)p; }
  static DEVICE V2 get8(const u8 *p) { return *(const V2 *)p; }
  static DEVICE u32 get4(const u8 *p) { return *(const u32 *)p; }
  static DEVICE u32 get2(const u8 *p) { return *(const u16 *)p; }
};

// Block number `i` of a tensor of `blocks` blocks.
template <int T, class Memory = InGlobal> DEVICE void fetch(Block<T> &f, const u8 *w, u64 blocks, u64 i) {
  f.a = Memory::get16(w + i * lo_bytes(T));
  if (lo_bytes(T) == 32) f.b = Memory::get16(w + i * 32 + 16);
  if (hi_bytes(T) == 4) f.h0 = Memory::get4(w + hi_at(T, blocks) + i * 4);
  if (hi_bytes(T) == 8) {
    V2 h = Memory::get8(w + hi_at(T, blocks) + i * 8);
    f.h0 = h.x;
    f.h1 = h.y;
  }
  if (s1_bytes(T) == 1) f.s1 = w[s1_at(T, blocks) + i];
  if (s1_bytes(T) == 2) f.s1 = Memory::get2(w + s1_at(T, blocks) + i * 2);
  if (s1_bytes(T) == 4) f.s1 = Memory::get4(w + s1_at(T, blocks) + i * 4);
  if (s2_bytes(T) == 2) f.s2 = Memory::get2(w + s2_at(T, blocks) + i / 8 * 2);
  if (s2_bytes(T) == 4) f.s2 = Memory::get4(w + s2_at(T, blocks) + i / 8 * 4);
}

DEVICE constexpr bool signed_codes(int t) { return t == Q8_0 || t == MXFP4; }
// Four nibbles (a byte each) of MXFP4 as the signed bytes that they stand for: twice the values of E2M1.
DEVICE u32 table_mxfp4(u32 q) {
  const u32 low = q & 0x07070707, two = low | low >> 4, selector = (two & 0xFF) | (two >> 8 & 0xFF00),
            negative = (q >> 3 & 0x01010101) * 0xFF;
  return (permute_bytes(0x03020100u, 0x0C080604u, selector) & ~negative) |
      (permute_bytes(0xFDFEFF00u, 0xF4F8FAFCu, selector) & negative);
}

// Codes of weights 4w..4w+3 as bytes (signed as `signed_codes` says), for w in 0..7.
template <int T> DEVICE u32 codes(u32 lo, u32 h0, u32 h1, int w) {
  u32 q = T == Q8_0 ? lo : (w < 4 ? lo : lo >> 4) & 0x0F0F0F0F;
  if (T == MXFP4) q = table_mxfp4(q);
  if (hi_bytes(T) == 4) q |= ((h0 >> w) & 0x01010101) << 4;
  if (hi_bytes(T) == 8) q |= (((w < 4 ? h0 : h1) >> 2 * (w & 3)) & 0x03030303) << 4;
  return q;
}
// Scale and additive term of a block: weight = scale * code + shift. `half` chooses between Q6_K's two scales.
template <int T> DEVICE float scale_of(u32 s1, u32 s2, int half = 0) {
  if (T == Q4_K || T == Q5_K) return half_to_float(s2) * (float)(s1 & 0xFF);
  if (T == Q6_K) return half_to_float(s2) * (float)(signed char)(s1 >> 8 * half);
  if (T == MXFP4) return unbits(s1 < 2 ? 0x00200000u << s1 : (s1 - 1) << 23);  // 2^(s1 - 128): the codes are doubled
  return half_to_float(s1);
}
template <int T> DEVICE float shift_of(u32 s1, u32 s2, int half = 0) {
  if (T == Q4_K || T == Q5_K) return -half_to_float(s2 >> 16) * (float)(s1 >> 8 & 0xFF);
  if (T == Q4_1 || T == Q5_1) return half_to_float(s1 >> 16);
  return -(float)offset_of(T) * scale_of<T>(s1, s2, half);
}

// The same in a block `b` of the file, for repack.cu: the code of weight i (0..31) of its 32-weight part g (0 where blocks
// have 32 weights).
template <int T> DEVICE u32 file_code(const u8 *b, int g, int i) {
  constexpr Planes P = planes(T);
  if (T == Q6_K) {
    const int half = g / 4, part = g % 4;
    const u8 q = b[P.codes + 64 * half + 32 * (part & 1) + i], h = b[P.bits + 32 * half + i];
    return (part < 2 ? q & 15 : q >> 4) | (u32)(h >> 2 * part & 3) << 4;
  }
  if (T == Q4_K || T == Q5_K) {
    const u8 q = b[P.codes + g / 2 * 32 + i];
    const u32 v = g % 2 ? q >> 4 : q & 15;
    return P.hi ? v | (u32)(b[P.bits + i] >> g & 1) << 4 : v;
  }
  if (P.lo == 32) return b[P.codes + i];
  const u32 v = i < 16 ? b[P.codes + i] & 15 : b[P.codes + i - 16] >> 4;
  return P.hi ? v | (u32)(b[P.bits + i / 8] >> i % 8 & 1) << 4 : v;
}
// Writes the scales of part g to `s1`, and those of the whole block, where it has some, to `s2`.
template <int T> DEVICE void file_scales(u8 *s1, u8 *s2, const u8 *b, int g) {
  constexpr Planes P = planes(T);
  if (T == Q4_K || T == Q5_K) {
    const u8 *s = b + 4;
    s1[0] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    s1[1] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
  } else if (T == Q6_K) {
    s1[0] = b[192 + 2 * g];
    s1[1] = b[192 + 2 * g + 1];
  } else
    for (int c = 0; c < P.s1; c++) s1[c] = b[c];
  if (g == 0)
    for (int c = 0; c < P.s2; c++) s2[c] = b[P.scale + c];
}

// An activation block of 32: int8 codes, their scale, and the sums of the first and second 16 codes (low and high half
// of `sums`).
struct Scale {
  float d;
  int sums;
};
DEVICE int sum_lo(int s) { return (short)s; }
DEVICE int sum_hi(int s) { return s >> 16; }

template <int T> DEVICE float dot(const Block<T> &f, const V4 &x0, const V4 &x1, const Scale &s) {
  const u32 lo[8] = {f.a.x, f.a.y, f.a.z, f.a.w, T == Q8_0 ? f.b.x : f.a.x, T == Q8_0 ? f.b.y : f.a.y,
      T == Q8_0 ? f.b.z : f.a.z, T == Q8_0 ? f.b.w : f.a.w};
  const u32 x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
  int i0 = 0, i1 = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    i0 = dp4a(codes<T>(lo[w], f.h0, f.h1, w), x[w], i0);
    i1 = dp4a(codes<T>(lo[w + 4], f.h0, f.h1, w + 4), x[w + 4], i1);
  }
  if (T == Q6_K)
    return s.d *
        (scale_of<T>(f.s1, f.s2, 0) * (float)(i0 - 32 * sum_lo(s.sums)) +
            scale_of<T>(f.s1, f.s2, 1) * (float)(i1 - 32 * sum_hi(s.sums)));
  const int sum = sum_lo(s.sums) + sum_hi(s.sums);
  if (has_min(T)) return s.d * (scale_of<T>(f.s1, f.s2) * (float)(i0 + i1) + shift_of<T>(f.s1, f.s2) * (float)sum);
  return s.d * scale_of<T>(f.s1, f.s2) * (float)(i0 + i1 - offset_of(T) * sum);
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
  Block<T> f;
  f.b = V4{0, 0, 0, 0};
  f.h0 = f.h1 = f.s1 = f.s2 = 0;
  fetch<T>(f, w, blocks, k / block_of(T));
  const int j = k % block_of(T);
  if (is_float(T)) {
    float v[8], out = 0;
    floats<T>(f, v);
#pragma unroll
    for (int i = 0; i < 8; i++) out = i == j ? v[i] : out;
    return out;
  }
  const u32 lo[8] = {f.a.x, f.a.y, f.a.z, f.a.w, T == Q8_0 ? f.b.x : f.a.x, T == Q8_0 ? f.b.y : f.a.y,
      T == Q8_0 ? f.b.z : f.a.z, T == Q8_0 ? f.b.w : f.a.w};
  u32 q = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) q = i == j / 4 ? codes<T>(lo[i], f.h0, f.h1, i) : q;
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
DEVICE float warp_max(float v) {
  for (int m = 16; m; m >>= 1) v = fmaxf(v, shfl_xor(v, m));
  return v;
}

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
