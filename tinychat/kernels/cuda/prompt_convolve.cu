// Prompts: the convolution of q, k and v of the gated delta rule, q and k divided by their lengths, and what the rule
// needs of each token. A warp takes TOGETHER tokens of a key head's q and k, or of a head's v.
#include "carried.cuh"

struct Args {
  float *mixed = nullptr;      // (tokens, CHANNELS)
  float *both = nullptr;       // (tokens, KEY_HEADS): q times k
  float *beta = nullptr;       // (tokens, HEADS): becomes the rate
  float *alpha = nullptr;      // and this the decay
  const float *src = nullptr;  // (tokens, CHANNELS)
  float *slots = nullptr;
  const float *conv = nullptr;
  const float *decay = nullptr;
  const float *decay_bias = nullptr;
  const int *state = nullptr;
};

DEVICE float square(F4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
DEVICE F4 times(F4 v, float f) { return F4{v.x * f, v.y * f, v.z * f, v.w * f}; }

// N channels from `channel` on, a vector of four a lane: use(token, the lane's channel, values).
template <int N, class Use> DEVICE void over(const Args &a, int first, int channel, const Use &use) {
  const int lane = threadIdx.x % 32, mine = channel + min(4 * lane, N - 4);
  convolve(
      a.conv, a.slots, a.state[POS], a.state[COUNT], first, mine, 4 * lane < N,
      [&](int t) { return *(const F4 *)(a.src + (u64)t * CHANNELS + mine); },
      [&](int t, F4 v) { use(t, mine, F4{silu(v.x), silu(v.y), silu(v.z), silu(v.w)}); });
}

DEVICE void run(const Args &a) {
  constexpr int KEYS = KEY_HEADS * KEY_DIM;
  const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32,
            first = blockIdx.y * TOGETHER;
  const int count = a.state[COUNT];
  grid_wait();
  if (first >= count || unit >= KEY_HEADS + HEADS) return;
  if (unit < KEY_HEADS) {
    const bool there = 4 * lane < KEY_DIM;
    F4 queries[TOGETHER];
    over<KEY_DIM>(a, first, unit * KEY_DIM, [&](int t, int at, F4 v) {
      const F4 q = times(v, rsqrt_(warp_sum(there ? square(v) : 0) + EPS) * QUERY_SCALE);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) queries[i] = q;
      if (there) *(F4 *)(a.mixed + (u64)t * CHANNELS + at) = q;
    });
    over<KEY_DIM>(a, first, KEYS + unit * KEY_DIM, [&](int t, int at, F4 v) {
      const F4 k = times(v, rsqrt_(warp_sum(there ? square(v) : 0) + EPS));
      F4 q = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) q = queries[i];
      const float both = warp_sum(there ? q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w : 0);
      if (there) *(F4 *)(a.mixed + (u64)t * CHANNELS + at) = k;
      if (lane == 0) a.both[t * KEY_HEADS + unit] = both;
    });
  } else {
    const int head = unit - KEY_HEADS;
    over<VALUE_DIM>(a, first, 2 * KEYS + head * VALUE_DIM, [&](int t, int at, F4 v) {
      if (4 * lane < VALUE_DIM) *(F4 *)(a.mixed + (u64)t * CHANNELS + at) = v;
    });
    if (lane < TOGETHER && first + lane < count) {
      const u64 at = (u64)(first + lane) * HEADS + head;
      const float lapse = a.alpha[at] + a.decay_bias[head];
      a.alpha[at] = expf(a.decay[head] * (lapse > 20 ? lapse : log1pf(expf(lapse))));
      a.beta[at] = sigmoid(a.beta[at]);
    }
  }
}
