// Prompts: the convolution of q, k and v of the gated delta rule, q and k divided by their lengths, and what the rule
// needs of each token. A warp takes TOGETHER tokens of a key head's q and k, or of a head's v. Where the state decays
// BY_CHANNEL, q and k are decayed from the group's first token on, and the products of two tokens in between them.
#include "halves.cuh"
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *mixed = nullptr;      // (tokens, CHANNELS); (tokens, HEADS, VALUE_DIM) where q and k are in `halves`
  u16 *halves = nullptr;       // (tokens, 2, KEY_HEADS, HALF_KEYS): q and k; not BY_CHANNEL, which has the next three
  float *both = nullptr;       // (tokens, KEY_HEADS, 2, GROUP): q and k times the k of the earlier ones of the group
  float *late = nullptr;       // (tokens, KEY_HEADS, KEY_DIM): k, decayed to the group's last token
  float *shrink = nullptr;     // (groups, KEY_HEADS, KEY_DIM): what the state decays by in a group
  float *beta = nullptr;       // (tokens, HEADS): becomes the rate
  float *alpha = nullptr;      // (tokens, HEADS): and this the logarithm of the decay; (tokens, HEADS, KEY_DIM) where BY_CHANNEL
  const float *src = nullptr;  // (tokens, CHANNELS)
  float *slots = nullptr;
  const float *conv[3] = {};  // as in delta.cu
  const float *decay = nullptr;
  const float *decay_bias = nullptr;
  const int *state = nullptr;
};

DEVICE float square(F4 v) { return dot4(v, v); }
DEVICE F4 times(F4 v, float f) { return F4{v.x * f, v.y * f, v.z * f, v.w * f}; }

// N channels from `channel` on, of q, k or v, a vector of four a lane: use(token, the lane's channel, values).
template <int N, class Use> DEVICE void over(const Args &a, int first, int part, int channel, const Use &use) {
  const int lane = threadIdx.x % 32, mine = channel + min(4 * lane, N - 4);
  convolve(
      taps_of(a.conv, part, mine), a.slots, a.state[POS], a.state[COUNT], a.state[KEPT], first, mine, 4 * lane < N,
      [&](int t) { return *(const F4 *)(a.src + (u64)t * CHANNELS + mine); },
      [&](int t, F4 v) { use(t, mine, F4{silu(v.x), silu(v.y), silu(v.z), silu(v.w)}); });
}

DEVICE void run(const Args &a) {
  constexpr int KEYS = KEY_HEADS * KEY_DIM;
  constexpr int PITCH = BY_CHANNEL ? CHANNELS : HEADS * VALUE_DIM, VALUES = BY_CHANNEL ? 2 * KEYS : 0;
  const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32,
            first = blockIdx.y * TOGETHER;
  const int count = a.state[COUNT];
  grid_wait();
  if (first >= count || unit >= KEY_HEADS + HEADS) return;
  if (unit < KEY_HEADS) {
    const bool there = 4 * lane < KEY_DIM;
    auto put = [&](int t, int which, F4 v) {  // zeros behind the last key
      if (!BY_CHANNEL && 4 * lane < HALF_KEYS)
        *(V2 *)(a.halves + (((u64)t * 2 + which) * KEY_HEADS + unit) * HALF_KEYS + 4 * lane) =
            V2{pack(v.x, v.y), pack(v.z, v.w)};
    };
    F4 queries[TOGETHER] = {}, keys[TOGETHER] = {};
    over<KEY_DIM>(a, first, 0, unit * KEY_DIM, [&](int t, int at, F4 v) {
      const float length = warp_sum(there ? square(v) : 0);
      const F4 q = times(v, there ? rsqrt_(length + EPS) * QUERY_SCALE : 0);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) queries[i] = q;
      put(t, 0, q);
    });
    over<KEY_DIM>(a, first, 1, KEYS + unit * KEY_DIM, [&](int t, int at, F4 v) {
      const float length = warp_sum(there ? square(v) : 0);
      const F4 k = times(v, there ? rsqrt_(length + EPS) : 0);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (t - first == i) keys[i] = k;
      put(t, 1, k);
    });
    if constexpr (BY_CHANNEL) {
      const u64 mine = unit * KEY_DIM + 4 * lane;
      const float rule = a.decay[unit];
      const F4 bias = there ? *(const F4 *)(a.decay_bias + mine) : F4{0, 0, 0, 0};
      F4 decays[TOGETHER], since = {1, 1, 1, 1};
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {  // those behind the last token do not decay
        decays[i] = F4{1, 1, 1, 1};
        if (there && first + i < count) {
          const F4 v = *(const F4 *)(a.alpha + (u64)(first + i) * KEYS + mine);
          decays[i] = F4{decay_of(rule, v.x + bias.x), decay_of(rule, v.y + bias.y), decay_of(rule, v.z + bias.z),
              decay_of(rule, v.w + bias.w)};
        }
      }
      float with_query[32], with_key[32];  // of token i of these and token j of its group: value i * GROUP + j
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        F4 earlier = keys[j];
#pragma unroll
        for (int i = j / GROUP * GROUP; i < (j / GROUP + 1) * GROUP; i++) {
          if (i > j) earlier = by(earlier, decays[i]);
          with_query[i * GROUP + j % GROUP] = i >= j ? dot4(queries[i], earlier) : 0;
          with_key[i * GROUP + j % GROUP] = i > j ? dot4(keys[i], earlier) : 0;
        }
        if (there && first + j < count) *(F4 *)(a.late + (u64)(first + j) * KEYS + mine) = earlier;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        since = i % GROUP ? by(since, decays[i]) : decays[i];
        float *to = a.mixed + (u64)(first + i) * CHANNELS + mine;
        if (there && first + i < count) {
          *(F4 *)to = by(queries[i], since);
          *(F4 *)(to + KEYS) = by(keys[i], since);
        }
        if (i % GROUP == GROUP - 1 && there && first + i / GROUP * GROUP < count)
          *(F4 *)(a.shrink + (u64)((first + i) / GROUP) * KEYS + mine) = since;
      }
      const float of_query = transposed_sum(with_query), of_key = transposed_sum(with_key);
      const int t = first + lane / GROUP;
      float *both = a.both + ((u64)t * KEY_HEADS + unit) * 2 * GROUP + lane % GROUP;
      if (t < count) {
        both[0] = of_query;
        both[GROUP] = of_key;
      }
    }
  } else {
    const int head = unit - KEY_HEADS;
    over<VALUE_DIM>(a, first, 2, 2 * KEYS + head * VALUE_DIM, [&](int t, int at, F4 v) {
      at -= 2 * KEYS;
      if (4 * lane < VALUE_DIM) *(F4 *)(a.mixed + (u64)t * PITCH + VALUES + at) = v;
    });
    if (lane < TOGETHER && first + lane < count) {
      const u64 at = (u64)(first + lane) * HEADS + head;
      if (!BY_CHANNEL) a.alpha[at] = log_decay(a.decay[head], a.alpha[at] + a.decay_bias[head]);
      a.beta[at] = sigmoid(a.beta[at]);
    }
  }
}
