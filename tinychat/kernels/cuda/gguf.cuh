// Blocks of a GGUF file, for repack.cu: codes and scales of the 32-weight part g (0 where blocks have 32 weights) of
// block `b`. Layouts: ggml-common.h of https://github.com/ggml-org/ggml.

DEVICE u32 u16_at(const u8 *p) { return p[0] | (u32)p[1] << 8; }
DEVICE u32 u32_at(const u8 *p) { return u16_at(p) | u16_at(p + 2) << 16; }
DEVICE u32 nibble(const u8 *p, int i) { return p[i / 2] >> 4 * (i % 2) & 15; }

// Value i of an entry of a grid: 8 of 2 bits, or 4 of 4 bits; even ones lie in the low byte (kernels/grids.py).
template <int VALUES> DEVICE u32 value_of(u32 entry, int i) {
  constexpr int BITS = 16 / VALUES;
  return entry >> (i / 2 * BITS + i % 2 * 8) & ((1 << BITS) - 1);
}
// Sign i of 8, of which the last one, which is not stored, makes their number even.
DEVICE u32 even_sign(u32 sevens, int i) {
  u32 parity = sevens ^ sevens >> 4;
  parity ^= parity >> 2;
  return (i < 7 ? sevens >> i : parity ^ parity >> 1) & 1;
}
// Digit n (0: the first) of a byte with 5 digits of base 3, a fraction in 256ths.
DEVICE u32 digit(u32 byte, int n) {
  for (int i = 0; i < n; i++) byte = byte * 3 & 255;
  return byte * 3 >> 8;
}

// What the planes hold of weight i (0..31): its bits of lo, above them those of two, then of one.
template <int T> DEVICE u32 file_code(const u8 *b, const u16 *grid, int g, int i) {
  constexpr Planes P = planes(T);
  const int j = i / 8, k = 4 * g + j, e = i % 8;
  const u8 *codes = b + P.codes;
  if (T == IQ2_XXS) {
    const u8 *part = codes + 8 * g;
    return value_of<8>(grid[part[j]], e) | even_sign(u32_at(part + 4) >> 7 * j & 127, e) << 2;
  }
  if (T == IQ2_XS) {
    const u32 q = u16_at(codes + 2 * k);
    return value_of<8>(grid[q & 511], e) | even_sign(q >> 9, e) << 2;
  }
  if (T == IQ2_S) return value_of<8>(grid[codes[k] | (b[66 + g] >> 2 * j & 3) << 8], e) | (b[34 + k] >> e & 1) << 2;
  if (T == IQ3_XXS) {
    const u32 negative = even_sign(u32_at(b + 66 + 4 * g) >> 7 * j & 127, e);
    return value_of<4>(grid[codes[8 * g + i / 4]], i % 4) | (negative ^ 1) << 3;
  }
  if (T == IQ3_S) {
    const u32 index = codes[8 * g + i / 4] | (b[66 + g] >> i / 4 & 1) << 8;
    const u32 v = value_of<4>(grid[index], i % 4);
    return b[74 + k] >> e & 1 ? 7 - v : 8 + v;  // -15, -13 to 15
  }
  if (T == IQ1_S) {
    const u32 high = u16_at(b + 34 + 2 * g);
    return value_of<8>(grid[codes[k] | (high >> 3 * j & 7) << 8], e) | (~high >> 15 & 1) << 2;
  }
  if (T == IQ1_M) {
    const u32 high = nibble(b + 32, k);
    return value_of<8>(grid[codes[k] | (high & 7) << 8], e) | (~high >> 3 & 1) << 2;
  }
  if (T == TQ1_0) {  // 5 digits of 32 bytes, then of 16, then 4 of 4
    const int n = 32 * g + i;
    if (n < 160) return digit(codes[i], g);
    return n < 240 ? digit(codes[32 + n % 16], (n - 160) / 16) : digit(codes[48 + n % 4], (n - 240) / 4);
  }
  if (T == Q6_K) {
    const int half = g / 4, part = g % 4;
    const u8 q = codes[64 * half + 32 * (part & 1) + i], h = b[P.bits + 32 * half + i];
    return (part < 2 ? q & 15 : q >> 4) | (u32)(h >> 2 * part & 3) << 4;
  }
  const u32 bit = P.bits < 0 ? 0 : P.s2 ? b[P.bits + i] >> g & 1 : b[P.bits + j] >> e & 1;
  if (P.two) return codes[32 * (g / 4) + i] >> 2 * (g % 4) & 3 | bit << 2;  // Q2_K, Q3_K, TQ2_0
  if (P.lo == 32) return codes[i];
  if (P.s2 && !has_table(T)) return codes[32 * (g / 2) + i] >> 4 * (g % 2) & 15 | bit << 4;  // Q4_K, Q5_K
  return (codes[16 * g + i % 16] >> i / 16 * 4 & 15 | bit << 4) ^ (T == MXFP4 ? 8 : 0);  // the sign is that of +
}

// Scale number n, of 16 weights in types with split scales, of 32 in others: the byte that s1 has.
template <int T> DEVICE u32 file_scale(const u8 *b, int n) {
  if (T == Q2_K) return b[n];
  if (T == Q3_K) return (nibble(b + 96, n % 8 * 2 + n / 8) | (b[104 + n % 4] >> n / 4 * 2 & 3) << 4) - 32;
  if (T == Q6_K) return b[192 + n];
  if (T == IQ4_XS) return (nibble(b + 4, n) | (u16_at(b + 2) >> 2 * n & 3) << 4) - 32;
  if (T == IQ2_XXS) return 2 * (u32_at(b + 6 + 8 * n) >> 28) + 1;
  if (T == IQ2_XS) return 2 * nibble(b + 66, n) + 1;
  if (T == IQ2_S) return 2 * nibble(b + 74, n) + 1;
  if (T == IQ3_XXS) return 2 * (u32_at(b + 66 + 4 * n) >> 28) + 1;
  if (T == IQ3_S) return 2 * nibble(b + 106, n) + 1;
  if (T == IQ1_S) return 2 * (u16_at(b + 34 + 2 * n) >> 12 & 7) + 1;
  if (T == IQ1_M) return 2 * (u16_at(b + 48 + n / 4 * 2) >> n % 4 * 3 & 7) + 1;
  return b[n];  // MXFP4
}
// Writes the scales of part g to `s1`, and those of the whole block, where it has some, to `s2`.
template <int T> DEVICE void file_scales(u8 *s1, u8 *s2, const u8 *b, int g) {
  constexpr Planes P = planes(T);
  if (T == Q4_K || T == Q5_K) {
    const u8 *s = b + 4;
    s1[0] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    s1[1] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
  } else if (P.s2 || P.scale < 0)
    for (int c = 0; c < P.s1; c++) s1[c] = file_scale<T>(b, P.s1 * g + c);
  else
    for (int c = 0; c < P.s1; c++) s1[c] = b[P.scale + c];  // and the minimum behind it
  if (g) return;
  if (T == IQ1_M) {  // in the upper 4 bits of four words
    s2[0] = b[49] >> 4 | (b[51] & 0xF0);
    s2[1] = b[53] >> 4 | (b[55] & 0xF0);
  } else
    for (int c = 0; c < P.s2; c++) s2[c] = b[P.scale + c];
}
