// GQA: the heads of one token as attention takes them, a warp for each: optional RMSNorm of all, RoPE of q and k.
// Constants: KEY_DIM, VALUE_DIM, NORM, EPS, VALUE_NORM and those of rope.cuh. All is rounded explicitly: steps of one
// token and of several have the same bits.
#include "rope.cuh"

// Of q or k; a lane has values lane + 32 n. What does not depend on the values is loaded early.
struct Rotated {
  static constexpr int N = (KEY_DIM + 31) / 32;
  float gain[N];
  F2 angle[N];
  DEVICE void gains(const float *of, int head) {
    if (NORM != NO_NORM)
#pragma unroll
      for (int n = 0; n < N; n++) {
        const int i = threadIdx.x % 32 + 32 * n;
        gain[n] = i < KEY_DIM ? unbits(ldc4(of + (NORM == ALL_HEADS ? head * KEY_DIM : 0) + i)) : 0;
      }
  }
  DEVICE void angles(const F2 *table, int pos) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int i = threadIdx.x % 32 + 32 * n;
      const V2 v = i < ROPE_DIMS ? ldc8(table + (u64)pos * (ROPE_DIMS / 2) + pair_of(i)) : V2{};
      angle[n] = F2{unbits(v.x), unbits(v.y)};
    }
  }
  // put(i, value) for head `head` of the `heads` of a token in `all`; `mine`: KEY_DIM floats of the warp's.
  template <class Out> DEVICE void run(const float *all, int heads, int head, float *mine, const Out &put) const {
    const int lane = threadIdx.x % 32;
    float x[N], r = 1, ss = 0;
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = lane + 32 * n < KEY_DIM ? all[head * KEY_DIM + lane + 32 * n] : 0;
    if (NORM == PER_HEAD) {
#pragma unroll
      for (int n = 0; n < N; n++) ss = fma_rn(x[n], x[n], ss);
      r = rsqrt_(warp_sum(ss) / KEY_DIM + EPS);
    } else if (NORM == ALL_HEADS) {
      for (int i = lane; i < heads * KEY_DIM; i += 32) ss = fma_rn(all[i], all[i], ss);
      r = rsqrt_(warp_sum(ss) / (heads * KEY_DIM) + EPS);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (NORM != NO_NORM) x[n] = mul_rn(mul_rn(x[n], r), gain[n]);
      if (lane + 32 * n < KEY_DIM) mine[lane + 32 * n] = x[n];
    }
    warp_sync();
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int i = lane + 32 * n;
      if (i < KEY_DIM) put(i, i < ROPE_DIMS ? rotated(mine, angle[n], i) : x[n]);
    }
    warp_sync();
  }
};

// put(i, value) for a head of v.
template <class Out> DEVICE void value_head(const float *src, const Out &put) {
  constexpr int N = (VALUE_DIM + 31) / 32;
  const int lane = threadIdx.x % 32;
  float v[N], r = 1, ss = 0;
#pragma unroll
  for (int n = 0; n < N; n++) v[n] = lane + 32 * n < VALUE_DIM ? src[lane + 32 * n] : 0;
  if (VALUE_NORM) {
#pragma unroll
    for (int n = 0; n < N; n++) ss = fma_rn(v[n], v[n], ss);
    r = rsqrt_(warp_sum(ss) / VALUE_DIM + EPS);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    if (lane + 32 * n < VALUE_DIM) put(lane + 32 * n, mul_rn(v[n], r));
}
