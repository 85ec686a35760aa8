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

// Column c of a panel of nc: x * inv * gain, as two bfloat16 whose sum has 16 to 17 of a float's 24 bits. n is a multiple of 32.
static void prepare_planes(const float *x, int n, const float *gain, float inv, float *planes, int nc, int c) {
  uint16_t *to = (uint16_t *)planes + 32 * c;
  for (int i = 0; i < n; i += 16, to += i % 32 ? 16 : 64 * nc - 16) {
    f32v a = ldf(x + i);
    if (gain) a *= ldf(gain + i) * inv;
    u32v high = ((u32v)a + 0x8000) & 0xffff0000, low = (u32v)(a - (f32v)high) + 0x8000;
    u16x16 h = __builtin_convertvector(high >> 16, u16x16), l = __builtin_convertvector(low >> 16, u16x16);
    memcpy(to, &h, 32), memcpy(to + 32 * nc, &l, 32);
  }
}

// Weights that the input will be multiplied with, two streams of them: 128 bytes of each are asked for beside each 32 values, so that
// the memory is at work while the input is prepared. NULL: none.
typedef struct { const uint8_t *a, *b; } Streams;

// Column c of a panel of nc: x * inv * gain (gain NULL: x as it is), as blocks of 32 high and low bytes and, if f is given, as floats.
static void prepare(const float *x, int n, const float *gain, float inv, int8_t *q, XScale *xs, float *f, int nc, int c, Streams soon) {
  int quants = q && n % 32 == 0;
  for (int i = 0; i < n; i += 32) {
    if (soon.a)
      for (int j = 4 * i; j < 4 * i + 128; j += 64) __builtin_prefetch(soon.a + j), __builtin_prefetch(soon.b + j);
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
