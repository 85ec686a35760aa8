// Packed weights: the layout of every quant type, its codec, and the dot products of 16 rows with 1, 4, 8 or 16 columns.
//
// A matrix is stored as groups of 16 rows, a group as one stream of blocks. A field of the file's block is interleaved over the
// 16 rows in granules: codes by 4 bytes, so that lane r of a vector is row r and holds consecutive elements; scales by 1 or 2.
// First come the half-precision scales (part B), then the fields whose 16-row slices fill whole 64-byte vectors (part A). Where
// B is no multiple of 64, a chunk of 2 or 4 blocks is stored as their Bs, then their As, so that vectors stay aligned.
// Fields lie in the order in which a matrix-vector product touches them: hardware prefetchers lose two thirds of the
// bandwidth on anything but one forward stream. The packed size is that of the file, except that rows are padded to a multiple
// of 16 and chunks to 64 bytes.
#pragma once
#include "words.h"

// The types of the kernels. A new one is a row of the first table and its decode_... below; library.py reads the names here.
// A row has GGML's number; elements and bytes of a block in the file; blocks per chunk; bytes of part B; the offset of the
// codes, whether there is a minimum, a scale per 16 elements, codes of 8 bits with sign; the fields of parts B and A in the
// file's block.
#define COMMON(X, ...)                                                                                                         \
  X(Q4_0, 2, 32, 18, 2, 2, 8, 0, 0, 0, AT(0, 2, 2), AT(2, 16, 4), __VA_ARGS__)                                                 \
  X(Q4_1, 3, 32, 20, 1, 4, 0, 1, 0, 0, AT(0, 2, 2) AT(2, 2, 2), AT(4, 16, 4), __VA_ARGS__)                                     \
  X(Q5_0, 6, 32, 22, 2, 2, 16, 0, 0, 0, AT(0, 2, 2), AT(2, 4, 4) AT(6, 16, 4), __VA_ARGS__)                                    \
  X(Q5_1, 7, 32, 24, 1, 4, 0, 1, 0, 0, AT(0, 2, 2) AT(2, 2, 2), AT(4, 4, 4) AT(8, 16, 4), __VA_ARGS__)                         \
  X(Q8_0, 8, 32, 34, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2), AT(2, 32, 4), __VA_ARGS__)                                         \
  X(Q2_K, 10, 256, 84, 1, 4, 0, 1, 1, 0, AT(80, 2, 2) AT(82, 2, 2), AT(0, 16, 1) AT(16, 64, 4), __VA_ARGS__)                   \
  X(Q3_K, 11, 256, 110, 2, 2, 4, 0, 1, 0, AT(108, 2, 2), AT(96, 12, 1) AT(0, 32, 4) AT(32, 64, 4), __VA_ARGS__)                \
  X(Q4_K, 12, 256, 144, 1, 4, 0, 1, 0, 0, AT(0, 2, 2) AT(2, 2, 2), AT(4, 12, 1) AT(16, 128, 4), __VA_ARGS__)                   \
  X(Q5_K, 13, 256, 176, 1, 4, 0, 1, 0, 0, AT(0, 2, 2) AT(2, 2, 2), AT(4, 12, 1) AT(16, 32, 4) AT(48, 128, 4), __VA_ARGS__)     \
  X(Q6_K, 14, 256, 210, 2, 2, 32, 0, 1, 0, AT(208, 2, 2),                                                                      \
    AT(192, 16, 1) AT(128, 32, 4) AT(0, 64, 4) AT(160, 32, 4) AT(64, 64, 4), __VA_ARGS__)                                      \
  X(IQ4_NL, 20, 32, 18, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2), AT(2, 16, 4), __VA_ARGS__)                                      \
  X(IQ4_XS, 23, 256, 136, 1, 4, S8_OFFSET, 0, 0, 1, AT(0, 2, 2) AT(2, 2, 2), AT(4, 4, 1) AT(8, 128, 4), __VA_ARGS__)           \
  X(MXFP4, 39, 32, 17, 4, 1, S8_OFFSET, 0, 0, 1, AT(0, 1, 1), AT(1, 16, 4), __VA_ARGS__)
// Blocks of 256 with signs and no minimum. Products with one column are compiled for each of them, others for all together:
// compiling the library would take nearly twice as long.
#define RARE(X, ...)                                                                                                           \
  X(IQ2_XXS, 16, 256, 66, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2), AT(2, 64, 4), __VA_ARGS__)                                    \
  X(IQ2_XS, 17, 256, 74, 2, 2, S8_OFFSET, 0, 1, 1, AT(0, 2, 2), AT(66, 8, 1) AT(2, 64, 4), __VA_ARGS__)                        \
  X(IQ2_S, 22, 256, 82, 2, 2, S8_OFFSET, 0, 1, 1, AT(0, 2, 2),                                                                 \
    AT(66, 8, 1) AT(74, 8, 1) AT(2, 32, 4) AT(34, 32, 4), __VA_ARGS__)                                                         \
  X(IQ3_XXS, 18, 256, 98, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2), AT(66, 32, 4) AT(2, 64, 4), __VA_ARGS__)                      \
  X(IQ3_S, 21, 256, 110, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2),                                                                \
    AT(106, 4, 1) AT(66, 8, 1) AT(74, 32, 4) AT(2, 64, 4), __VA_ARGS__)                                                        \
  X(IQ1_S, 19, 256, 50, 2, 2, S8_OFFSET, 0, 0, 1, AT(0, 2, 2), AT(34, 16, 4) AT(2, 32, 4), __VA_ARGS__)                        \
  X(IQ1_M, 29, 256, 56, 1, 0, S8_OFFSET, 0, 1, 1, , AT(48, 8, 4) AT(32, 16, 1) AT(0, 32, 4), __VA_ARGS__)                      \
  X(TQ1_0, 34, 256, 54, 2, 2, S8_OFFSET, 0, 0, 1, AT(52, 2, 2), AT(0, 52, 4), __VA_ARGS__)                                     \
  X(TQ2_0, 35, 256, 66, 2, 2, S8_OFFSET, 0, 0, 1, AT(64, 2, 2), AT(0, 64, 4), __VA_ARGS__)
#define QUANTISED(X, ...) COMMON(X, __VA_ARGS__) RARE(X, __VA_ARGS__)
// GGML's number, bytes of a value, and what loads 16 of them.
#define FLOATING(X, ...)                                                                                                       \
  X(F32, 0, 4, load_F32, __VA_ARGS__) X(F16, 1, 2, half, __VA_ARGS__) X(BF16, 30, 2, load_BF16, __VA_ARGS__)

// Grids of the IQ types, and their entries: 8 codes of 2 bits, or 4 of 4 bits, that stand for consecutive elements. Even
// elements lie in the low byte, odd ones in the high byte. library.py fills them (tc_grids) from gguf's tables.
#define GRIDS(X) X(IQ2_XXS, 256) X(IQ2_XS, 512) X(IQ2_S, 1024) X(IQ3_XXS, 256) X(IQ3_S, 512) X(IQ1_S, 2048)
#define GRID_OF(T, N) uint16_t T##_[N];
static struct { GRIDS(GRID_OF) } grids __attribute__((aligned(64)));
#define SET_GRID(T, N) set_table(grids.T##_, from, N), from += N;
INLINE void set_grids(const uint16_t *from) { GRIDS(SET_GRID) }

#define NUMBER(T, ID, ...) T = ID,
enum { QUANTISED(NUMBER) FLOATING(NUMBER) TYPES = 40 };

typedef struct { uint8_t offset, length, granule; } Field;  // in the file's block
typedef struct {
  int block, bytes;  // elements and bytes of a block in the file
  int chunk;
  Field b[2], a[5];
} QuantLayout;

#define AT(OFFSET, LENGTH, GRANULE) {OFFSET, LENGTH, GRANULE},
#define QUANTISED_LAYOUT(T, ID, BLOCK, BYTES, CHUNK, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, ...) \
  [T] = {BLOCK, BYTES, CHUNK, {B}, {A}},
#define FLOATING_LAYOUT(T, ID, BYTES, ...) [T] = {1, BYTES, 1, {}, {AT(0, BYTES, BYTES)}},
static const QuantLayout layouts[TYPES] = {QUANTISED(QUANTISED_LAYOUT) FLOATING(FLOATING_LAYOUT)};

// Bytes of 16 packed rows of `cols` elements.
INLINE size_t group_bytes(int type, int cols) {
  const QuantLayout *l = &layouts[type];
  return ((size_t)(cols / l->block) * l->bytes * 16 + 63) / 64 * 64;  // only the last chunk may need filling up
}

// The signs of 32 elements in the order of Q5_0's fifth bits: byte e % 4, bit e / 4 for element e.
INLINE uint32_t bits_by_byte(uint32_t h) {
  uint32_t t = 0;
  for (int e = 0; e < 32; e++) t |= (h >> e & 1) << (8 * (e % 4) + e / 4);
  return t;
}
// The same of four times 7 signs; the eighth of each 8, whose place is in ODD, makes their number even.
#define ODD 0xaa000000u
INLINE uint32_t sevens_by_byte(uint32_t h) {
  uint32_t t = 0;
  for (int i = 0; i < 4; i++) t |= (h >> 7 * i & 127) << 8 * i;
  return bits_by_byte(t);
}
// Puts the words of a field of 16 rows into an order that suits the kernels; word i of row r is number 16 * i + r.
static void rearrange(uint8_t *start, int type, Field f) {
  typedef uint32_t __attribute__((may_alias)) Word;
  Word *word = (Word *)start;
  int words = 4 * f.length, at = f.offset;
  if (((type == Q5_0 || type == Q5_1) && words == 16) || (type == IQ2_S && at == 34) || (type == IQ3_S && at == 74))
    for (int i = 0; i < words; i++) word[i] = bits_by_byte(word[i]);
  if (type == IQ2_XXS || (type == IQ3_XXS && at == 66))  // the scale's bit i goes to bit 25 + 2 * i
    for (int i = 0; i < words; i++) {
      if (type == IQ2_XXS && i / 16 % 2 == 0) continue;  // indices
      uint32_t t = sevens_by_byte(word[i]), scale = word[i] >> 28;
      for (int j = 0; j < 4; j++) t |= (scale >> j & 1) << (25 + 2 * j);
      word[i] = t;
    }
  if (type == IQ2_XS)  // four times 9 bits of index below 7 signs: the ninth bits go to bits 25, 27, 29 and 31
    for (int i = 0; i < words; i++) {
      if (i / 16 % 2) continue;  // the second word of two
      uint32_t index = 0, signs = 0, ninth = 0;
      for (int j = 0; j < 4; j++) {
        uint32_t q = word[i + j / 2 * 16] >> 16 * (j % 2) & 0xffff;
        index |= (q & 255) << 8 * j, ninth |= (q >> 8 & 1) << (25 + 2 * j), signs |= q >> 9 << 7 * j;
      }
      word[i] = index;
      word[i + 16] = sevens_by_byte(signs) | ninth;
    }
  if (type == Q8_0 && S8_OFFSET != 0)
    for (int i = 0; i < words; i++) word[i] ^= 0x80808080;
}

// Interleaves one field of 16 blocks; a missing row (src NULL) is zeros.
static uint8_t *pack_field(uint8_t *dst, const uint8_t *const src[16], size_t at, Field f, int type) {
  static const uint8_t zeros[256];
  const uint8_t *from[16];
  uint8_t *start = dst;
  for (int r = 0; r < 16; r++) from[r] = src[r] ? src[r] + at + f.offset : zeros;
  if (f.granule == 4) {
    int i = 0;
    for (; i + 16 <= f.length; i += 16, dst += 256)
      for (int r = 0; r < 16; r += 4) interleave_words(dst + 4 * r, from + r, i);
    for (; i < f.length; i += 4)
      for (int r = 0; r < 16; r++, dst += 4) memcpy(dst, from[r] + i, 4);
    rearrange(start, type, f);
  } else if (f.granule == 2) {
    for (int r = 0; r < 16; r++, dst += 2) memcpy(dst, from[r], 2);
  } else if (f.length > 8 && f.offset + 16 <= layouts[type].bytes) {  // 16 bytes of a row are read
    interleave_bytes(dst, from, f.length);
    dst += 16 * f.length;
  } else {
    for (int i = 0; i < f.length; i++)
      for (int r = 0; r < 16; r++) *dst++ = from[r][i];
  }
  return dst;
}

// Packs 16 rows of `cols` elements from the file's form.
static void pack_group(uint8_t *dst, const uint8_t *const src[16], int type, int cols) {
  const QuantLayout *l = &layouts[type];
  for (int first = 0, blocks = cols / l->block; first < blocks; first += l->chunk) {
    int last = first + l->chunk < blocks ? first + l->chunk : blocks;
    for (int k = first; k < last; k++)
      for (int f = 0; f < 2 && l->b[f].length; f++) dst = pack_field(dst, src, (size_t)k * l->bytes, l->b[f], type);
    dst += -(uintptr_t)dst & (l->block > 1 ? 63 : 0);
    for (int k = first; k < last; k++)
      for (int f = 0; f < 5 && l->a[f].length; f++) dst = pack_field(dst, src, (size_t)k * l->bytes, l->a[f], type);
  }
}

// 32 consecutive elements of 16 rows: codes w (vector t = elements 4t..4t+3), value = d * (w - OFFSET) + m. Types with a
// scale per 16 elements have a second d (and m) for the last 16.
typedef struct {
  u32v w[8];
  f32v d, d2, m, m2;
} Sub;

#define LO4 0x0f0f0f0f
INLINE f32v half(const uint8_t *p) { return from_f16(ld16(p)); }

INLINE void nibbles(u32v w[8], const uint8_t *p) {
  for (int j = 0; j < 4; j++) {
    u32v v = ld(p + 64 * j);
    w[j] = v & LO4;
    w[4 + j] = v >> 4 & LO4;
  }
}
INLINE void fifth_bits(u32v w[8], const uint8_t *p) {
  u32v h = ld(p);
  for (int j = 0; j < 5; j++) w[j] |= h << (4 - j) & 0x10101010;
  for (int j = 5; j < 8; j++) w[j] |= h >> (j - 4) & 0x10101010;
}
// 6-bit scale and minimum j of 8 (Q4_K, Q5_K) of 16 rows.
INLINE void scale_min(const uint8_t *p, int j, f32v *scale, f32v *min) {
  if (j < 4) {
    *scale = from_bytes(ld8(p + 16 * j) & 63);
    *min = from_bytes(ld8(p + 16 * (j + 4)) & 63);
  } else {
    u8x16 v = ld8(p + 16 * (j + 4));
    *scale = from_bytes((v & 15) | (ld8(p + 16 * (j - 4)) >> 6 << 4));
    *min = from_bytes((v >> 4) | (ld8(p + 16 * j) >> 6 << 4));
  }
}

static const uint8_t iq4_codes[16] = {
#define C(x) (uint8_t)((x) + S8_OFFSET)
    C(-127), C(-104), C(-83), C(-65), C(-49), C(-35), C(-22), C(-10), C(1), C(13), C(25), C(38), C(53), C(69), C(89), C(113)};
static const uint8_t fp4_codes[16] = {C(0), C(1), C(2), C(3), C(4), C(6), C(8), C(12),
                                      C(0), C(-1), C(-2), C(-3), C(-4), C(-6), C(-8), C(-12)};
// Codes of the grids: index 4 + i (8 + i in IQ3) where the sign is set; IQ1's values are eight times a value of the grid plus 1 or -1.
static const uint8_t iq2_codes[16] = {C(8), C(25), C(43), 0, C(-8), C(-25), C(-43)};
static const uint8_t iq3_xxs_codes[16] = {C(4), C(12), C(20), C(28), C(36), C(44), C(52), C(62),
                                          C(-4), C(-12), C(-20), C(-28), C(-36), C(-44), C(-52), C(-62)};
static const uint8_t iq3_s_codes[16] = {C(1), C(3), C(5), C(7), C(9), C(11), C(13), C(15),
                                        C(-1), C(-3), C(-5), C(-7), C(-9), C(-11), C(-13), C(-15)};
static const uint8_t iq1_codes[16] = {C(-7), C(1), C(9), 0, C(-9), C(-1), C(7)};
#undef C

// The entry in half `half` of the lanes of g with codes of `bits` bits: elements 0 to 3 in the lowest bits of the bytes, 4 to 7
// above bit 4.
INLINE u32v entry(u32v g, int half, int bits) {
  u32v low = half ? g >> 16 : g, high = half ? g >> bits : g << (16 - bits);
  return (low & 0xffff) | (high & 0xffff0000);
}
// Bit `from` of the bytes as their bit `to`.
INLINE u32v bit(u32v v, int from, int to) { return (from < to ? v << (to - from) : v >> (from - to)) & (0x01010101u << to); }

// The elements of four indices (bytes of `low`, and what is above bit 7 in bytes of `high`), with 32 signs.
INLINE void grid8(u32v w[8], u32v low, u32v high, const uint16_t *grid, int entries, u32v signs, const uint8_t *codes) {
  u32v even, odd;
  lookup16(low, high, grid, entries, &even, &odd);
  for (int i = 0; i < 4; i++) {
    u32v e = entry(i % 2 ? odd : even, i / 2, 2);
    w[2 * i] = lookup((e & 0x03030303) | bit(signs, 2 * i, 2), codes);
    w[2 * i + 1] = lookup((e >> 4 & 0x03030303) | bit(signs, 2 * i + 1, 2), codes);
  }
}
// The same of entries of 4 elements: w[0] to w[3], with the signs of bits `sign` to `sign` + 3.
INLINE void grid4(u32v w[4], u32v low, u32v high, const uint16_t *grid, int entries, u32v signs, int sign, const uint8_t *codes) {
  u32v even, odd;
  lookup16(low, high, grid, entries, &even, &odd);
  for (int i = 0; i < 4; i++)
    w[i] = lookup((entry(i % 2 ? odd : even, i / 2, 4) & 0x07070707) | bit(signs, sign + i, 3), codes);
}
// The four fields of v that are `step` bits apart, each in a byte of its own; `mask`: of the first one.
INLINE u32v by_byte(u32v v, int step, uint32_t mask) {
  return (v & mask) | (v << (8 - step) & mask << 8) | (v << (16 - 2 * step) & mask << 16) | (v << (24 - 3 * step) & mask << 24);
}
// Signs whose number is even in each 8; bits of ODD are 0.
INLINE u32v even_signs(u32v s) {
  u32v p = s ^ s >> 1;
  p ^= p >> 16;
  return s | ((p ^ p >> 8) << 25 & ODD);
}
// The scale in bits 25, 27, 29 and 31.
INLINE f32v odd_scale(u32v s) {
  s = s >> 25 & 0x55;
  s = (s | s >> 1) & 0x33;
  return from_int((i32v)((s | s >> 2) & 15));
}
INLINE u32v words(const uint8_t *p) { return __builtin_convertvector(ld8(p), u32v); }

INLINE Sub decode_IQ2_XXS(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v i = ld(a + 128 * s), signs = ld(a + 128 * s + 64);
  grid8(u.w, i, splatu(0), grids.IQ2_XXS_, 256, even_signs(signs & ~ODD), iq2_codes);
  u.d = half(b) * (odd_scale(signs) * 0.25f + 0.125f);
  return u;
}
// The scales of two times 16 elements in a byte's nibbles, as of IQ2_XS and IQ2_S.
INLINE void iq2_scales(Sub *u, f32v d, u8x16 x) {
  u->d = d * (from_bytes(x & 15) * 0.25f + 0.125f);
  u->d2 = d * (from_bytes(x >> 4) * 0.25f + 0.125f);
}
INLINE Sub decode_IQ2_XS(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v i = ld(a + 128 + 128 * s), signs = ld(a + 192 + 128 * s);
  grid8(u.w, i, by_byte(signs >> 25, 2, 1), grids.IQ2_XS_, 512, even_signs(signs & ~ODD), iq2_codes);
  iq2_scales(&u, half(b), ld8(a + 16 * s));
  return u;
}
INLINE Sub decode_IQ2_S(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v i = ld(a + 256 + 64 * s), h = words(a + 16 * s);
  grid8(u.w, i, by_byte(h, 2, 3), grids.IQ2_S_, 1024, ld(a + 768 + 64 * s), iq2_codes);
  iq2_scales(&u, half(b), ld8(a + 128 + 16 * s));
  return u;
}
INLINE Sub decode_IQ3_XXS(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v word = ld(a + 64 * s), signs = even_signs(word & ~ODD);
  for (int j = 0; j < 2; j++) {
    u32v i = ld(a + 512 + 128 * s + 64 * j);
    grid4(u.w + 4 * j, i, splatu(0), grids.IQ3_XXS_, 256, signs, 4 * j, iq3_xxs_codes);
  }
  u.d = half(b) * (odd_scale(word) * 0.5f + 0.25f);
  return u;
}
INLINE Sub decode_IQ3_S(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v signs = ld(a + 192 + 64 * s), h = words(a + 64 + 16 * s);
  for (int j = 0; j < 2; j++, h >>= 4) {
    u32v i = ld(a + 704 + 128 * s + 64 * j);
    grid4(u.w + 4 * j, i, by_byte(h, 1, 1), grids.IQ3_S_, 512, signs, 4 * j, iq3_s_codes);
  }
  u8x16 scale = ld8(a + 16 * (s / 2));
  u.d = half(b) * (from_bytes(s % 2 ? scale >> 4 : scale & 15) * 2.0f + 1.0f);
  return u;
}
INLINE Sub decode_IQ1_S(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v i = ld(a + 256 + 64 * s), h = ld(a + 64 * (s / 2)) >> (16 * (s % 2));
  grid8(u.w, i, by_byte(h, 3, 7), grids.IQ1_S_, 2048, (u32v)((i32v)(h << 16) >> 31), iq1_codes);
  u.d = half(b) * (from_int((i32v)(h >> 12 & 7)) * 0.25f + 0.125f);
  return u;
}
INLINE Sub decode_IQ1_M(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  u32v i = ld(a + 384 + 64 * s), h = words(a + 128 + 32 * s) | words(a + 144 + 32 * s) << 8;  // four nibbles
  u32v minus = (h >> 3 & 1) | (h >> 5 & 4) | (h >> 7 & 16) | (h >> 9 & 64);  // number i in bit 2 * i
  grid8(u.w, i, by_byte(h, 4, 7), grids.IQ1_S_, 2048, (minus * 3) * 0x01010101, iq1_codes);
  u32v w0 = ld(a), w1 = ld(a + 64), w = (s < 4 ? w0 : w1) >> (16 * (s / 2 % 2) + 6 * (s % 2));
  u32v bits = (w0 >> 12 & 15) | (w0 >> 24 & 0xf0) | (w1 >> 4 & 0xf00) | (w1 >> 16 & 0xf000);
  f32v d = from_f16(__builtin_convertvector(bits, u16x16));
  u.d = d * (from_int((i32v)(w & 7)) * 0.25f + 0.125f), u.d2 = d * (from_int((i32v)(w >> 3 & 7)) * 0.25f + 0.125f);
  return u;
}
// Codes of 0 to 2 as -1 to 1.
INLINE u32v minus_one(u32v w) { return (u32v)((u8v)w + (uint8_t)(S8_OFFSET - 1)); }
// Digit n (0: the first) of bytes with 5 digits of base 3, each byte a fraction in 256ths.
INLINE u32v digit(u32v v, int n) {
  static const uint8_t power[5] = {1, 3, 9, 27, 81};
  u8v x = (u8v)v * power[n];
  return minus_one((u32v) - ((u8v)(x > 85) + (u8v)(x > 170)));
}
INLINE Sub decode_TQ1_0(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++) {
    int e = 4 * t + 32 * (s - 5);  // of what follows the 32 bytes of 5 digits: 16 bytes of 5, 4 of 4
    u.w[t] = s < 5 ? digit(ld(a + 64 * t), s) : e < 80 ? digit(ld(a + 512 + 16 * (e % 16)), e / 16) : digit(ld(a + 768), e / 4 - 20);
  }
  u.d = half(b);
  return u;
}
INLINE Sub decode_TQ2_0(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++) u.w[t] = minus_one(ld(a + 64 * (s / 4 * 8 + t)) >> (s % 4 * 2) & 0x03030303);
  u.d = half(b);
  return u;
}

INLINE Sub decode_Q4_0(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a);
  u.d = half(b);
  return u;
}
INLINE Sub decode_Q4_1(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a);
  u.d = half(b);
  u.m = half(b + 32);
  return u;
}
INLINE Sub decode_Q5_0(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a + 64);
  fifth_bits(u.w, a);
  u.d = half(b);
  return u;
}
INLINE Sub decode_Q5_1(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a + 64);
  fifth_bits(u.w, a);
  u.d = half(b);
  u.m = half(b + 32);
  return u;
}
INLINE Sub decode_Q8_0(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++) u.w[t] = ld(a + 64 * t);
  u.d = half(b);
  return u;
}
INLINE Sub decode_Q2_K(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++) u.w[t] = ld(a + 256 + 64 * (s / 4 * 8 + t)) >> (s % 4 * 2) & 0x03030303;
  u8x16 x = ld8(a + 32 * s), y = ld8(a + 32 * s + 16);
  f32v d = half(b), m = -half(b + 32);
  u.d = d * from_bytes(x & 15), u.d2 = d * from_bytes(y & 15);
  u.m = m * from_bytes(x >> 4), u.m2 = m * from_bytes(y >> 4);
  return u;
}
INLINE f32v scale_q3(const uint8_t *p, int i) {
  u8x16 low = ld8(p + 16 * (i % 8)), high = ld8(p + 16 * (8 + i % 4));
  low = i < 8 ? low & 15 : low >> 4;
  high = (i / 4 == 0 ? high : i / 4 == 1 ? high >> 2 : i / 4 == 2 ? high >> 4 : high >> 6) & 3;
  return from_bytes(low | high << 4) - 32.0f;
}
INLINE Sub decode_Q3_K(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++)
    u.w[t] = (ld(a + 704 + 64 * (s / 4 * 8 + t)) >> (s % 4 * 2) & 0x03030303) | (ld(a + 192 + 64 * t) >> s & 0x01010101) << 2;
  f32v d = half(b);
  u.d = d * scale_q3(a, 2 * s), u.d2 = d * scale_q3(a, 2 * s + 1);
  return u;
}
INLINE Sub decode_Q4_K(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++) u.w[t] = ld(a + 192 + 64 * (s / 2 * 8 + t)) >> (s % 2 * 4) & LO4;
  scale_min(a, s, &u.d, &u.m);
  u.d *= half(b), u.m *= -half(b + 32);
  return u;
}
INLINE Sub decode_Q5_K(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  for (int t = 0; t < 8; t++)
    u.w[t] = (ld(a + 704 + 64 * (s / 2 * 8 + t)) >> (s % 2 * 4) & LO4) | (ld(a + 192 + 64 * t) >> s & 0x01010101) << 4;
  scale_min(a, s, &u.d, &u.m);
  u.d *= half(b), u.m *= -half(b + 32);
  return u;
}
INLINE Sub decode_Q6_K(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  const uint8_t *p = a + 256 + s / 4 * 1536;  // of this half: 2 high bits, then 4 low bits
  for (int t = 0; t < 8; t++)
    u.w[t] = (ld(p + 512 + 64 * (s % 2 * 8 + t)) >> (s % 4 / 2 * 4) & LO4) | (ld(p + 64 * t) >> (s % 4 * 2) & 0x03030303) << 4;
  f32v d = half(b);
  u.d = d * from_signed_bytes(ld8(a + 32 * s)), u.d2 = d * from_signed_bytes(ld8(a + 32 * s + 16));
  return u;
}
INLINE Sub decode_IQ4_NL(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a);
  for (int t = 0; t < 8; t++) u.w[t] = lookup(u.w[t], iq4_codes);
  u.d = half(b);
  return u;
}
INLINE Sub decode_IQ4_XS(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a + 64 + 256 * s);
  for (int t = 0; t < 8; t++) u.w[t] = lookup(u.w[t], iq4_codes);
  u32v low = __builtin_convertvector(ld8(a + 16 * (s / 2)), u32v), high = __builtin_convertvector(ld16(b + 32), u32v);
  i32v scale = (i32v)((low >> (s % 2 * 4) & 15) | (high >> (2 * s) & 3) << 4) - 32;
  u.d = half(b) * from_int(scale);
  return u;
}
INLINE Sub decode_MXFP4(const uint8_t *a, const uint8_t *b, int s) {
  Sub u;
  nibbles(u.w, a);
  for (int t = 0; t < 8; t++) u.w[t] = lookup(u.w[t], fp4_codes);
  u32v e = __builtin_convertvector(ld8(b), u32v);  // the value is 2^(e - 128)
  u.d = select_((i32v)(e < 2), (f32v)(splatu(0x00200000) << e), (f32v)((e - 1) << 23));
  return u;
}

// Quantised activations: NC columns side by side, block of 32 by block of 32. A value is scale * (HIGH * high + low) with two
// signed bytes, since 8 bits are not enough: they cost 3 % of relative error in the logits of a small model, and with it the
// answer, where 16 bits cost 0.02 %. Decode of one token is limited by memory, so that the extra arithmetic costs no time.
typedef struct {
  float scale, sum, first, last;  // sums of the quantised values (all 32, the first 16, the last 16) times scale
  int32_t minus[3];               // minus the same sums, without the scale
} XScale;
typedef struct {
  const int8_t *q;        // [k / 32][NC][high or low][32]
  const XScale *scales;   // [k / 32][NC]
  const float *f;         // [k][NC], the unquantised values, for float weights
  int k, planes;          // planes: f and scales hold what prepare_planes makes instead, for any weights
} X;                      // what no weights of an op need is NULL
// The columns from number `first` on, which begins a panel.
INLINE X columns_from(const X *x, size_t first) {
  return (X){x->q ? x->q + 2 * first * x->k : NULL, x->scales ? x->scales + first * (x->k / 32) : NULL,
             x->f ? x->f + first * x->k : NULL, x->k, x->planes};
}

// y + the scaled sums over 32 elements of a column: p of all, or p of the first 16 and r of the last 16 where there are two scales.
INLINE f32v scaled(const Sub *u, i32v p, i32v r, const XScale *x, f32v y, int min, int split) {
  y = fma_(from_int(p), u->d * x->scale, y);
  if (split) y = fma_(from_int(r), u->d2 * x->scale, y);
  if (min) {
    y = fma_(u->m, splat(split ? x->first : x->sum), y);
    if (split) y = fma_(u->m2, splat(x->last), y);
  }
  return y;
}

// Four chains of products for a column, since one alone would be waited for; where registers are many, for two columns at a time (on
// Sapphire Rapids 8 or 16 columns take 5 to 10 % less).
#if defined(__AVX512F__)
enum { WIDE_DOT = 2 };
#else
enum { WIDE_DOT = 1 };
#endif
INLINE void dot32(const Sub *u, const int8_t *q, const XScale *xs, f32v *acc, int nc, int offset, int min, int split, int sign) {
#define DOT(acc, t) (sign ? dot_s(acc, u->w[(t) % 8], x + 4 * (t)) : dot_u(acc, u->w[(t) % 8], x + 4 * (t)))
  for (int c = 0; c < nc; c += WIDE_DOT) {
    i32v h[WIDE_DOT] = {{0}}, l[WIDE_DOT] = {{0}}, p[WIDE_DOT], r[WIDE_DOT];
    int n = nc - c < WIDE_DOT ? nc - c : WIDE_DOT;
    for (int i = 0; i < n; i++) {
      const int32_t *minus = xs[c + i].minus;
      p[i] = splat_int(minus[split]) * offset, r[i] = splat_int(split ? minus[2] : 0) * offset;
    }
    for (int t = 0; t < 4; t++)
      for (int i = 0; i < n; i++) {
        const int8_t *x = q + 64 * (c + i);
        h[i] = DOT(h[i], t), l[i] = DOT(l[i], t + 4), p[i] = DOT(p[i], t + 8), r[i] = DOT(r[i], t + 12);
      }
    for (int i = 0; i < n; i++) {
      p[i] += h[i] * HIGH, r[i] += l[i] * HIGH;
      if (!split) p[i] += r[i];
      acc[c + i] = scaled(u, p[i], r[i], &xs[c + i], acc[c + i], min, split);
    }
  }
#undef DOT
}

// The same for columns two by two, where one instruction multiplies 2 rows with 2 columns: acc[2j] holds rows 0 to 7 of the
// columns 2j and 2j + 1, acc[2j + 1] rows 8 to 15, in each quarter (row, column), (row, column + 1), (row + 1, column), ...
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PAIRS 1
#define LOW_(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
INLINE f32v alternate(float a, float b) { return (f32v){a, b, a, b, a, b, a, b, a, b, a, b, a, b, a, b}; }
INLINE i32v alternate_int(int32_t a, int32_t b) { return (i32v){a, b, a, b, a, b, a, b, a, b, a, b, a, b, a, b}; }

INLINE void dot32_pairs(const Sub *u, const int8_t *q, const XScale *xs, f32v *acc, int nc, int offset, int min, int split) {
  for (int half = 0; half < 2; half++) {  // of the rows
#define ROWS(v) (half ? HIGH_(v, v) : LOW_(v, v))
    u32v w[4];  // 8 elements of 2 rows in each quarter
    for (int t = 0; t < 4; t++) w[t] = half ? HIGH_(u->w[2 * t], u->w[2 * t + 1]) : LOW_(u->w[2 * t], u->w[2 * t + 1]);
    f32v d = ROWS(u->d), d2 = split ? ROWS(u->d2) : d, m = min ? ROWS(u->m) : d, m2 = min && split ? ROWS(u->m2) : m;
#undef ROWS
    for (int c = 0; c < nc; c += 2) {
      const int8_t *x = q + 64 * c;
      const XScale *s = xs + c;
      i32v p = {0}, r = {0};
      for (int byte = 0; byte < 2; byte++, x += 32) {
        p *= HIGH, r *= HIGH;
        for (int t = 0; t < 4; t++) {
          int8x16_t both = vcombine_s8(vld1_s8(x + 8 * t), vld1_s8(x + 64 + 8 * t));
          if (split && t >= 2) r = dot_pairs(r, w[t], both);
          else p = dot_pairs(p, w[t], both);
        }
      }
      p += alternate_int(s[0].minus[split], s[1].minus[split]) * offset;
      if (split) r += alternate_int(s[0].minus[2], s[1].minus[2]) * offset;
      f32v scale = alternate(s[0].scale, s[1].scale), y = fma_(from_int(p), d * scale, acc[c + half]);
      if (split) y = fma_(from_int(r), d2 * scale, y);
      if (min) {
        y = fma_(m, split ? alternate(s[0].first, s[1].first) : alternate(s[0].sum, s[1].sum), y);
        if (split) y = fma_(m2, alternate(s[0].last, s[1].last), y);
      }
      acc[c + half] = y;
    }
  }
}
INLINE void unpair(f32v *acc, int nc) {
  for (int c = 0; c < nc; c += 2) {
    f32v a = acc[c], b = acc[c + 1];
    acc[c] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    acc[c + 1] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  }
}
#else
#define PAIRS 0
#define dot32_pairs(...)
#define unpair(...)
#endif

// Which 32 elements come as number i: those of a block of Q6_K in the order in which their bits lie.
INLINE int place(int i, int q6) { return q6 ? (i & ~3) | (i & 1) << 1 | (i >> 1 & 1) : i; }

// out[c] = 16 rows at `a` times column c.
typedef void (*Kernel)(const uint8_t *a, const X *x, f32v *out);

// Number i of each 32 elements of a block.
#define MULTIPLY_32(OFFSET, MIN, SPLIT, SIGN, Q6, DECODE, NC)                                                                   \
  int s = place(i, Q6);                                                                                                         \
  prefetch(a + i * part, part);                                                                                                 \
  Sub u = DECODE(a, b, s);                                                                                                      \
  if (PAIRS && NC > 1) dot32_pairs(&u, q + 64 * NC * s, xs + NC * s, acc, NC, OFFSET, MIN, SPLIT);                              \
  else dot32(&u, q + 64 * NC * s, xs + NC * s, acc, NC, OFFSET, MIN, SPLIT, SIGN);
#define IN_ORDER __asm__ volatile("" ::: "memory");  // loads stay where they are
// The body of a Kernel. Four times 32 elements of Q6_K share their high bits, whose places are constants where all four are written out.
#define MULTIPLY(BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, Q6, DECODE, NC, UNROLL)                              \
  int b_bytes = 16 * (B_LENGTH);                                                                                                \
  int blocks = x->k / BLOCK, a_bytes = (BYTES) * 16 - b_bytes;                                                                  \
  int part = (BYTES) * 16 / (BLOCK / 32);                                                                                       \
  const int8_t *q = x->q;                                                                                                       \
  const XScale *xs = x->scales;                                                                                                 \
  f32v acc[NC];                                                                                                                 \
  for (int c = 0; c < NC; c++) acc[c] = splat(0);                                                                               \
  while (blocks > 0) {                                                                                                          \
    int n = blocks < CHUNK_ ? blocks : CHUNK_;                                                                                  \
    const uint8_t *b = a;                                                                                                       \
    blocks -= n;                                                                                                                \
    for (a += (n * b_bytes + 63) / 64 * 64; n > 0; n--, a += a_bytes, b += b_bytes, q += 2 * BLOCK * NC, xs += BLOCK / 32 * NC) \
      if (NC == 1 && Q6) _Pragma("clang loop unroll(disable)") for (int j = 0; j < BLOCK / 32; j += 4)                          \
        _Pragma("clang loop unroll(full)") for (int i = j; i < j + 4; i++) {                                                    \
          IN_ORDER                                                                                                              \
          MULTIPLY_32(OFFSET, MIN, SPLIT, SIGN, Q6, DECODE, NC)                                                                 \
        }                                                                                                                       \
      else _Pragma(UNROLL) for (int i = 0; i < BLOCK / 32; i++) { MULTIPLY_32(OFFSET, MIN, SPLIT, SIGN, Q6, DECODE, NC) }       \
  }                                                                                                                             \
  if (PAIRS && NC > 1) unpair(acc, NC);                                                                                         \
  for (int c = 0; c < NC; c++) out[c] = acc[c];
#define KERNEL(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, NC, UNROLL)                          \
  static void T##_x##NC(const uint8_t *a, const X *x, f32v *out) {                                                       \
    MULTIPLY(BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, T == Q6_K, decode_##T, NC, UNROLL)                \
  }
// The products of RARE types, with a scale per 32 elements or per 16.
typedef Sub (*Decode)(const uint8_t *a, const uint8_t *b, int s);
#define SHARED(NAME, SPLIT, NC)                                                                                          \
  static __attribute__((noinline)) void NAME##_x##NC(const uint8_t *a, const X *x, f32v *out, int bytes, int chunk, int b_length, \
                                                     Decode decode) {                                                    \
    MULTIPLY(256, bytes, chunk, b_length, S8_OFFSET, 0, SPLIT, 1, 0, decode, NC, "clang loop unroll(disable)")           \
  }
#define SHARING(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, B, A, NC)                               \
  static void T##_x##NC(const uint8_t *a, const X *x, f32v *out) {                                                       \
    (SPLIT ? split_x##NC : plain_x##NC)(a, x, out, BYTES, CHUNK_, B_LENGTH, decode_##T);                                 \
  }

#define FLOAT_KERNEL(T, ID, VALUE, LOAD, NC)                                                                              \
  static void T##_x##NC(const uint8_t *a, const X *x, f32v *out) {                                                        \
    enum { BYTES = 16 * VALUE };                                                                                          \
    f32v even[NC], odd[NC];                                                                                               \
    for (int c = 0; c < NC; c++) even[c] = odd[c] = splat(0);                                                             \
    int k = 0;                                                                                                            \
    for (; k + 1 < x->k; k += 2) {                                                                                        \
      if (NC == 1) prefetch(a + (size_t)k * BYTES, 2 * BYTES);                                                            \
      f32v w0 = LOAD(a + (size_t)k * BYTES), w1 = LOAD(a + (size_t)k * BYTES + BYTES);                                    \
      const float *f = x->f + (size_t)k * NC;                                                                             \
      for (int c = 0; c < NC; c++) even[c] = fma_(w0, splat(f[c]), even[c]);                                              \
      for (int c = 0; c < NC; c++) odd[c] = fma_(w1, splat(f[NC + c]), odd[c]);                                           \
    }                                                                                                                     \
    if (k < x->k)                                                                                                         \
      for (int c = 0; c < NC; c++) even[c] = fma_(LOAD(a + (size_t)k * BYTES), splat(x->f[(size_t)k * NC + c]), even[c]); \
    for (int c = 0; c < NC; c++) out[c] = even[c] + odd[c];                                                               \
  }
INLINE f32v load_F32(const uint8_t *p) { return (f32v)ld(p); }
INLINE f32v load_BF16(const uint8_t *p) { return from_bf16(ld16(p)); }


FLOATING(FLOAT_KERNEL, 1)
FLOATING(FLOAT_KERNEL, 2)
FLOATING(FLOAT_KERNEL, 4)
FLOATING(FLOAT_KERNEL, 8)
FLOATING(FLOAT_KERNEL, 16)
QUANTISED(KERNEL, 1, "clang loop unroll_count(2)")  // full unrolling moves loads out of order: a third of the bandwidth
#define PANEL(NC) \
  COMMON(KERNEL, NC, "clang loop unroll(disable)") SHARED(plain, 0, NC) SHARED(split, 1, NC) RARE(SHARING, NC)
PANEL(2)
PANEL(4)
PANEL(8)
PANEL(16)

#define KERNEL_x1(T, ...) [T] = T##_x1,
#define KERNEL_x2(T, ...) [T] = T##_x2,
#define KERNEL_x4(T, ...) [T] = T##_x4,
#define KERNEL_x8(T, ...) [T] = T##_x8,
#define KERNEL_x16(T, ...) [T] = T##_x16,
#define TABLE(ROW) {QUANTISED(ROW) FLOATING(ROW)}
static const Kernel kernels[][TYPES] = {TABLE(KERNEL_x1), TABLE(KERNEL_x2), TABLE(KERNEL_x4), TABLE(KERNEL_x8), TABLE(KERNEL_x16)};
INLINE Kernel kernel(int type, int columns) { return kernels[__builtin_ctz((unsigned)columns)][type]; }

// out[k] = element k of the 16 packed rows at `a`: float32, the bits that gguf's dequantize gives.
#define DEQUANTISE(T, ID, BLOCK, BYTES, CHUNK_, B_LENGTH, OFFSET, MIN, SPLIT, SIGN, ...) \
  case T: {                                                                              \
    enum { B_BYTES = 16 * B_LENGTH };                                                    \
    int a_bytes = BYTES * 16 - B_BYTES;                                                  \
    const uint8_t *b = a;                                                                \
    for (int i = 0; i < k / BLOCK; i++, a += a_bytes, b += B_BYTES) {                    \
      int n = k / BLOCK - i < CHUNK_ ? k / BLOCK - i : CHUNK_;                           \
      if (i % CHUNK_ == 0) b = a, a += (n * B_BYTES + 63) / 64 * 64;                     \
      for (int s = 0; s < BLOCK / 32; s++) {                                             \
        Sub u = decode_##T(a, b, s);                                                     \
        for (int e = 0; e < 32; e++, out++) {                                            \
          i32v w = (i32v)(u.w[e / 4] << (24 - e % 4 * 8));                               \
          w = (SIGN && !S8_OFFSET ? w >> 24 : (i32v)((u32v)w >> 24)) - OFFSET;           \
          *out = (SPLIT && e >= 16 ? u.d2 : u.d) * from_int(w);                          \
          if (MIN) *out += SPLIT && e >= 16 ? u.m2 : u.m;                                \
        }                                                                                \
      }                                                                                  \
    }                                                                                    \
    break;                                                                               \
  }
static void dequantise(const uint8_t *a, int type, int k, f32v *out) {
  switch (type) {
    case F32: for (int i = 0; i < k; i++) out[i] = load_F32(a + 64 * (size_t)i); break;
    case F16: for (int i = 0; i < k; i++) out[i] = half(a + 32 * (size_t)i); break;
    case BF16: for (int i = 0; i < k; i++) out[i] = load_BF16(a + 32 * (size_t)i); break;
    QUANTISED(DEQUANTISE)
  }
}
