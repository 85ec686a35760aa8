// The input of a matrix product: RMSNorm, and quantisation to two bytes per value.
#pragma once
#include "quant.h"

static float rms_scale(const float *x, int n, float eps) {
  f32v s0 = splat(0), s1 = splat(0);
  int i = 0;
  for (; i + 32 <= n; i += 32) s0 = fma_(ldf(x + i), ldf(x + i), s0), s1 = fma_(ldf(x + i + 16), ldf(x + i + 16), s1);
  float total = hsum(s0 + s1);
  for (; i < n; i++) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / (float)n + eps);
}

// h with x - HIGH * h in a signed byte.
INLINE i32v high_byte(i32v x) { return HIGH == 256 ? (x + 128) >> 8 : round_(from_int(x) / HIGH); }

#if WORDS
// Column c of a panel of nc: x * inv * gain (gain NULL: x as it is) as words, [n / 32][nc][32], in each four elements the second and the
// third exchanged; n is a multiple of 32.
static void prepare_planes(const float *x, int n, const float *gain, float inv, float *planes, PanelScale *scales, int nc, int c) {
  int16_t *to = (int16_t *)planes + 32 * c;
  scales += c;
  for (int k = 0; k < n; k += DEPTH) {
    int depth = n - k < DEPTH ? n - k : DEPTH;
    f32v values[DEPTH / 16], top = splat(0), squares[DEPTH / 32] = {{0}};
    for (int i = 0; i < depth; i += 32) {
      f32v *v = &values[i / 16];
      for (int j = 0; j < 2; j++) {
        v[j] = ldf(x + k + i + 16 * j);
        if (gain) v[j] *= ldf(gain + k + i + 16 * j) * inv;
        top = max_(top, abs_(v[j])), squares[i / 32] = fma_(v[j], v[j], squares[i / 32]);
      }
    }
    float most = hmax(top), norm = __builtin_sqrtf(hmax(sums_of_eight(squares))), step = most / COLUMN_LIMIT;
    if (step < norm / COLUMN_NORM) step = norm / COLUMN_NORM;
    float up = step > 0 ? 1.0f / step : 0;
    u32v words[DEPTH / 32];
    for (int i = 0; i < depth; i += 32, to += 32 * nc) {
      for (int j = 0; j < 2; j++) {
        i32v q = round_(values[i / 16 + j] * up), s = __builtin_shufflevector(q, q, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        i16x16 half = __builtin_convertvector(s, i16x16);
        memcpy((int16_t *)&words[i / 32] + 16 * j, &half, 32);
      }
      memcpy(to, &words[i / 32], 64);
    }
    for (int i = 0; i < depth; i += 128) {
      int many = depth - i < 128 ? (depth - i) / 32 : 4;
      i32v minus = PAIRED ? minus_of(words + i / 32, many) : splat_int(0);
      for (int j = 0; j < many; j++, scales += nc) *scales = (PanelScale){step, minus[j]};
    }
  }
}
#else
// Elements that share a scale in planes, the largest integer there, and what a sum of products stands for. The high byte of LIMIT,
// rounded, is 127, so that sums of products fit 32 bits: 512 * 127 * (256 * 127 + 2 * 128) < 2^31.
enum { DEPTH = 512, LIMIT = 32600, UNIT = 256 };
// A column's, of SCALED elements.
typedef float PanelScale;
enum { SCALED = DEPTH };

// Column c of a panel of nc: x * inv * gain (gain NULL: x as it is) as 16-bit integers in two planes of signed bytes, 256 * high +
// low: [n / 64][high or low][nc][64] with zeros behind the last one, and [n / DEPTH][nc] scales. n is a multiple of 32.
static void prepare_planes(const float *x, int n, const float *gain, float inv, float *planes, PanelScale *scales, int nc, int c) {
  int8_t *to = (int8_t *)planes + 64 * c;
  for (int k = 0; k < n; k += DEPTH, scales += nc) {
    int depth = n - k < DEPTH ? n - k : DEPTH;
    f32v values[DEPTH / 16], top = splat(0);
    for (int i = 0; i < depth; i += 16) {
      f32v a = ldf(x + k + i);
      if (gain) a *= ldf(gain + k + i) * inv;
      values[i / 16] = a, top = max_(top, abs_(a));
    }
    float most = hmax(top), up = most > 0 ? LIMIT / most : 0;
    scales[c] = most / LIMIT;
    for (int i = 0; i < depth; i += 16) {
      i32v q = round_(values[i / 16] * up), high = (q + 128) >> 8;
      i8x16 h = __builtin_convertvector(high, i8x16), l = __builtin_convertvector(q - high * 256, i8x16);
      int8_t *at = to + (size_t)((k + i) / 64) * 128 * nc + i % 64;
      memcpy(at, &h, 16), memcpy(at + 64 * nc, &l, 16);
    }
    if (depth % 64) {
      int8_t *at = to + (size_t)((k + depth) / 64) * 128 * nc + 32;
      memset(at, 0, 32), memset(at + 64 * nc, 0, 32);
    }
  }
}
#endif

// Column c of a panel of nc: x * inv * gain (gain NULL: x as it is), as blocks of 32 high and low bytes and, if f is given, as floats.
static void prepare(const float *x, int n, const float *gain, float inv, int8_t *q, XScale *xs, float *f, int nc, int c) {
  int quants = q && n % 32 == 0;
  for (int i = 0; i < n; i += 32) {
    float tail[32];
    const float *p = x + i, *g = gain ? gain + i : NULL;
    if (n - i < 32) {
      for (int j = 0; j < n - i; j++) tail[j] = x[i + j] * (gain ? inv * gain[i + j] : 1.0f);
      if (f)
        for (int j = 0; j < n - i; j++) f[(size_t)(i + j) * nc + c] = tail[j];
      continue;
    }
    f32v a = ldf(p), b = ldf(p + 16);
    if (g) a *= ldf(g) * inv, b *= ldf(g + 16) * inv;
    if (f) {
      if (nc == 1) stf(f + i, a), stf(f + i + 16, b);
      else
        for (int j = 0; j < 16; j++) f[(size_t)(i + j) * nc + c] = a[j], f[(size_t)(i + 16 + j) * nc + c] = b[j];
    }
    if (!quants) continue;
    float top = hmax(max_(abs_(a), abs_(b))), step = top / (127.0f * HIGH), up = top > 0 ? 127.0f * HIGH / top : 0.0f;
    i32v qa = round_(a * up), qb = round_(b * up), ha = high_byte(qa), hb = high_byte(qb);
    i8x16 bytes[4] = {__builtin_convertvector(ha, i8x16), __builtin_convertvector(hb, i8x16),
                      __builtin_convertvector(qa - ha * HIGH, i8x16), __builtin_convertvector(qb - hb * HIGH, i8x16)};
    memcpy(q + 64 * c, bytes, 64);
    int sa = hsum_int(qa), sb = hsum_int(qb);
    xs[c] = (XScale){step, step * (float)(sa + sb), step * (float)sa, step * (float)sb, {-sa - sb, -sa, -sb}};
    q += 64 * nc, xs += nc;
  }
}
