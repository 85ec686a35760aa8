// Prompts: the convolution of q, k and v of the gated delta rule, q and k divided by their lengths, and what the rule
// needs of each token. A warp takes TOGETHER tokens of a key head's q and k, or of a head's v.
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *mixed = nullptr;      // (tokens, CHANNELS)
  float *both = nullptr;       // (tokens, KEY_HEADS, 2, GROUP): q and k times the k of the earlier ones of the group
  float *beta = nullptr;       // (tokens, HEADS): becomes the rate
  float *alpha = nullptr;      // and this the decay
  const float *src = nullptr;  // (tokens, CHANNELS)
  float *slots = nullptr;
  const float *conv = nullptr;
  const float *decay = nullptr;
  const float *decay_bias = nullptr;
  const int *state = nullptr;
};

DEVICE float square(F4 v) { return dot4(v, v); }
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
    F4 queries[TOGETHER] = {}, keys[TOGETHER] = {};
    over<KEY_DIM>(a, first, unit * KEY_DIM, [&](int t, int at, F4 v) {
      const float length = warp_sum(there ? square(v) : 0);
      const F4 q = times(v, there ? rsqrt_(length + EPS) * QUERY_SCALE : 0);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) queries[i] = q;
      if (there) *(F4 *)(a.mixed + (u64)t * CHANNELS + at) = q;
    });
    over<KEY_DIM>(a, first, KEYS + unit * KEY_DIM, [&](int t, int at, F4 v) {
      const float length = warp_sum(there ? square(v) : 0);
      const F4 k = times(v, there ? rsqrt_(length + EPS) : 0);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) keys[i] = k;
      if (there) *(F4 *)(a.mixed + (u64)t * CHANNELS + at) = k;
    });
    float with_query[32], with_key[32];  // of token i of these and token j of its group: value i * GROUP + j
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const F4 earlier = keys[i / GROUP * GROUP + j];
        with_query[i * GROUP + j] = j <= i % GROUP ? dot4(queries[i], earlier) : 0;
        with_key[i * GROUP + j] = j < i % GROUP ? dot4(keys[i], earlier) : 0;
      }
    const float of_query = transposed_sum(with_query), of_key = transposed_sum(with_key);
    const int t = first + lane / GROUP;
    float *both = a.both + ((u64)t * KEY_HEADS + unit) * 2 * GROUP + lane % GROUP;
    if (t < count) {
      both[0] = of_query;
      both[GROUP] = of_key;
    }
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
