// The next token from logits, as kernels/sampling.py defines it, without sorting the vocabulary.
#pragma once
#include "simd.h"

double log(double);
double exp(double);
double log1p(double);

// The fields of Sampling (kernels/sampling.py) that are used here, by their names there; library.py reads them in this file.
#define SAMPLING(X) X(temperature, double) X(top_p, double) X(min_p, double) X(top_k, int32_t)

typedef struct {
#define DECLARE(name, type) type name;
  SAMPLING(DECLARE)
  int32_t n_penalised;
  uint64_t seed;
  const int32_t *penalised;            // [n_penalised]: distinct ids under a penalty
  const double *divisors, *amounts;    // per id: a logit > 0 is divided by the divisor, else multiplied; then minus the amount
  const uint32_t *mask;                // NULL, or a bit per token: only tokens whose bit is set can be chosen
} SampleSpec;

enum { SPAN = 256 };  // logits per partial result

// Per span: its largest logit and the sum of exp(logit - largest).
static void span_stats(const float *logits, int n, float *max, float *sum) {
  float tail[16];
  f32v high = splat(-__builtin_inff()), total = splat(0);
  for (int j = 0; j < 16; j++) tail[j] = n / 16 * 16 + j < n ? logits[n / 16 * 16 + j] : -__builtin_inff();
  for (int i = 0; i + 16 <= n; i += 16) high = max_(high, ldf(logits + i));
  *max = hmax(max_(high, ldf(tail)));
  for (int i = 0; i + 16 <= n; i += 16) total += exp_(ldf(logits + i) - *max);
  *sum = hsum(total + exp_(ldf(tail) - *max));
}

static double gumbel(uint64_t seed, uint64_t position, uint64_t id) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + position * 0xBF58476D1CE4E5B9u + id * 0x94D049BB133111EBu;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return -log(-log(((double)(x >> 40) + 0.5) / 16777216.0));
}

static int descending(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x < y) - (x > y);
}

// The k-th largest of n values (k from 1); reorders v.
static float kth_largest(float *v, int n, int k) {
  int lo = 0, hi = n - 1;
  while (lo < hi) {
    float pivot = v[lo + (hi - lo) / 2];
    int i = lo, j = hi;
    while (i <= j) {
      while (v[i] > pivot) i++;
      while (v[j] < pivot) j--;
      if (i <= j) { float t = v[i]; v[i++] = v[j]; v[j--] = t; }
    }
    if (k - 1 <= j) hi = j;
    else if (k - 1 >= i) lo = i;
    else break;
  }
  return v[k - 1];
}

// The lowest logit of the smallest set of largest-first values whose mass reaches top_p; v has n values, reordered.
static float nucleus(float *v, int n, double top_p, float high) {
  double total = 0, before = 0;
  for (int i = 0; i < n; i++) total += exp((double)v[i] - high);
  // Sort prefixes of growing size, because the nucleus is nearly always small.
  for (int done = 0, size = 256; done < n; size *= 4) {
    int end = size < n ? size : n;
    if (end < n) kth_largest(v + done, n - done, end - done);  // the larger values come first now
    qsort(v + done, (size_t)(end - done), sizeof *v, descending);
    for (int i = done; i < end; i++) {
      if (i > 0 && before >= top_p * total) return v[i - 1];
      before += exp((double)v[i] - high);
    }
    done = end;
  }
  return v[n - 1];
}

// Puts -inf where the bit in mask (null: all are set) is clear; returns the largest of the n values.
static float allow(float *x, int n, const uint32_t *mask) {
  const i32v lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  f32v none = splat(-__builtin_inff()), high = none;
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    f32v values = ldf(x + i);
    if (mask) {
      int bits = (int)(mask[i / 32] >> i % 32 & 0xffff);
      values = select_((i32v)((lanes & bits) != 0), values, none);
      stf(x + i, values);
    }
    high = max_(high, values);
  }
  float top = hmax(high);
  for (; i < n; i++) {
    if (mask && !(mask[i / 32] >> i % 32 & 1)) x[i] = -__builtin_inff();
    top = x[i] > top ? x[i] : top;
  }
  return top;
}

// work: scratch of 2 * n + spans floats. spans: (n + SPAN - 1) / SPAN pairs from span_stats. Returns the id, and in *logprob its log
// probability under softmax(logits).
static int sample(const float *logits, int n, const SampleSpec *spec, uint64_t position, const float *span_max,
                  const float *span_sum, float *work, double *logprob) {
  int spans = (n + SPAN - 1) / SPAN;
  double top = span_max[0], total = 0;
  for (int i = 1; i < spans; i++) top = span_max[i] > top ? span_max[i] : top;
  for (int i = 0; i < spans; i++) total += span_sum[i] * exp(span_max[i] - top);
  const float *x = logits;
  float *v = work + n;
  float high = (float)top;
  const float *maxima = span_max;
  int changed = spec->n_penalised || spec->mask;
  if (changed) {
    memcpy(work, logits, sizeof(float) * n);
    for (int i = 0; i < spec->n_penalised; i++) {
      float *l = &work[spec->penalised[i]];
      *l = (float)((*l > 0 ? *l / spec->divisors[i] : *l * spec->divisors[i]) - spec->amounts[i]);
    }
    float *own = work + 2 * n;
    for (int i = 0; i < spans; i++) {
      int size = n - i * SPAN < SPAN ? n - i * SPAN : SPAN;
      own[i] = allow(work + i * SPAN, size, spec->mask ? spec->mask + i * SPAN / 32 : 0);
      high = i == 0 || own[i] > high ? own[i] : high;
    }
    x = work;
    maxima = own;
  }
  int best = 0;
  if (spec->temperature <= 0) {
    while (maxima[best / SPAN] != high && best + SPAN < n) best += SPAN;
    while (x[best] != high && best < n - 1) best++;
  } else {
    float floor = -__builtin_inff();
    int kept = 0;
    if (spec->top_k > 0 && spec->top_k < n) {
      // at least top_k logits reach the top_k-th largest span maximum
      if (spans >= spec->top_k) {
        memcpy(v, maxima, sizeof(float) * spans);
        floor = kth_largest(v, spans, spec->top_k);
      }
      for (int i = 0; i < n; i++)
        if (x[i] >= floor && x[i] > -__builtin_inff()) v[kept++] = x[i];
      if (kept) floor = kth_largest(v, kept, spec->top_k < kept ? spec->top_k : kept);
    }
    if (spec->top_p < 1.0) {
      kept = 0;
      for (int i = 0; i < n; i++)
        if (x[i] >= floor && x[i] > -__builtin_inff()) v[kept++] = x[i];
      if (kept) floor = nucleus(v, kept, spec->top_p, high);
    }
    double low = floor;
    if (spec->min_p > 0 && high + log(spec->min_p) > low) low = high + log(spec->min_p);
    double score = -__builtin_inf();
    for (int i = 0; i < n; i++) {
      // the noise never exceeds 17.4
      if (x[i] < low || x[i] / spec->temperature + 17.4 <= score) continue;
      double y = x[i] / spec->temperature + gumbel(spec->seed, position, (uint64_t)i);
      if (y > score) score = y, best = i;
    }
  }
  *logprob = logits[best] - top - log(total);
  return best;
}
