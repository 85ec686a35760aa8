// Delta rules and short convolutions, for a few channels or one head (blocks.DeltaRule, KDA, ShortConvolution). A state is float32
// [key][value], so that 16 values of a key lie side by side; all vectors of values are filled up to 16.
#pragma once
#include "simd.h"

// x [tokens][stride], 16 channels of it (n of them exist): each becomes silu of its convolution with weights [taps][columns].
// tail [taps - 1][channels] holds the inputs in front of the first token (`fresh`: zeros), and those of the last ones afterwards.
static void convolve16(float *x, size_t stride, int tokens, const float *weights, int columns, int taps, float *tail, int channels, int n,
                       int fresh) {
  f32v before[taps], weight[taps];  // the last of `before` is the token itself
  for (int j = 0; j < taps; j++) weight[j] = fetch(weights + (size_t)j * columns, n);
  for (int j = 0; j < taps - 1; j++) before[j] = fresh ? splat(0) : fetch(tail + (size_t)j * channels, n);
  for (int t = 0; t < tokens; t++) {
    float *at = x + t * stride;
    before[taps - 1] = fetch(at, n);
    f32v y = splat(0);
    for (int j = 0; j < taps; j++) y = fma_(before[j], weight[j], y);
    store(at, y / (exp_(-y) + 1.0f), n);
    for (int j = 0; j < taps - 1; j++) before[j] = before[j + 1];
  }
  for (int j = 0; j < taps - 1; j++) store(tail + (size_t)j * channels, before[j], n);
}

// The same with inputs b * z instead of x, and out = c * the sum; b, c and z are [tokens][stride], out [tokens][out_stride].
static void gated_convolve16(const float *b, const float *c, const float *z, size_t stride, float *out, size_t out_stride, int tokens,
                             const float *weights, int taps, float *tail, int channels, int n, int fresh) {
  f32v before[taps], weight[taps];
  for (int j = 0; j < taps; j++) weight[j] = fetch(weights + (size_t)j * channels, n);
  for (int j = 0; j < taps - 1; j++) before[j] = fresh ? splat(0) : fetch(tail + (size_t)j * channels, n);
  for (int t = 0; t < tokens; t++) {
    before[taps - 1] = fetch(b + t * stride, n) * fetch(z + t * stride, n);
    f32v y = splat(0);
    for (int j = 0; j < taps; j++) y = fma_(before[j], weight[j], y);
    store(out + t * out_stride, fetch(c + t * stride, n) * y, n);
    for (int j = 0; j < taps - 1; j++) before[j] = before[j + 1];
  }
  for (int j = 0; j < taps - 1; j++) store(tail + (size_t)j * channels, before[j], n);
}

// The inputs of a head's delta rule: q, k and v of token t lie `stride` values behind those of token t - 1.
typedef struct {
  const float *q, *k, *v;
  size_t stride;
  const float *decay;  // [tokens][pitch]: one, or one for each key where `by_channel`
  size_t pitch;
  const float *rate;   // [tokens]
  int tokens, keys, by_channel;
} Rule;

// 16 * `vectors` values (n of them exist) of the state [keys][width], and of the outputs out [tokens][out_stride]. The sums over
// the keys run in the order of the keys, so that a token's bits do not depend on what runs with it.
INLINE void delta_columns(const Rule *r, float *state, size_t width, float *out, size_t out_stride, int n, const int vectors,
                          const int by_channel) {
  f32v held[4], news[4], o[4];  // what the state answers to the key, what it takes in, its answer to the query
  for (int i = 0; i < vectors; i++) held[i] = splat(0);
  for (int a = 0; a < r->keys; a++)
    for (int i = 0; i < vectors; i++)
      held[i] = fma_(ldf(state + a * width + 16 * i), splat(by_channel ? r->k[a] * r->decay[a] : r->k[a]), held[i]);
  for (int t = 0; t < r->tokens; t++) {
    const float *k = r->k + t * r->stride, *q = r->q + t * r->stride, *next = t + 1 < r->tokens ? k + r->stride : k;
    const float *decays = r->decay + t * r->pitch, *coming = t + 1 < r->tokens ? decays + r->pitch : decays;
    f32v decay = splat(decays[0]), rate = splat(r->rate[t]);
    for (int i = 0; i < vectors; i++) {  // what is held has decayed by channel already
      news[i] = (fetch(r->v + t * r->stride + 16 * i, n - 16 * i) - (by_channel ? held[i] : held[i] * decay)) * rate;
      held[i] = o[i] = splat(0);
    }
    for (int a = 0; a < r->keys; a++) {
      if (by_channel) decay = splat(decays[a]);
      f32v key = splat(by_channel ? next[a] * coming[a] : next[a]);
      for (int i = 0; i < vectors; i++) {
        float *at = state + a * width + 16 * i;
        f32v s = fma_(splat(k[a]), news[i], ldf(at) * decay);
        stf(at, s);
        o[i] = fma_(s, splat(q[a]), o[i]);
        held[i] = fma_(s, key, held[i]);
      }
    }
    for (int i = 0; i < vectors; i++) store(out + t * out_stride + 16 * i, o[i], n - 16 * i);
  }
}

// A head: its state [keys][width], width = `values` filled up to 16, and its outputs.
static void delta_rule(const Rule *r, float *state, int values, size_t width, float *out, size_t out_stride) {
  for (int i = 0; i < (int)width; i += 32) {
    Rule part = *r;
    part.v += i;
    int two = (int)width - i >= 32;
    if (r->by_channel && two) delta_columns(&part, state + i, width, out + i, out_stride, values - i, 2, 1);
    else if (r->by_channel) delta_columns(&part, state + i, width, out + i, out_stride, values - i, 1, 1);
    else if (two) delta_columns(&part, state + i, width, out + i, out_stride, values - i, 2, 0);
    else delta_columns(&part, state + i, width, out + i, out_stride, values - i, 1, 0);
  }
}
