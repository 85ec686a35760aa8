// Decode: a block does all of a head of the gated delta rule: the convolution of its q, k and v, their norms, its
// state, and the norm and gate of its output. The state of the token before is on its way before the wait. A state
// that decays BY_CHANNEL does so first, and then by 1.
#include "matvec.cuh"
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  const float *src = nullptr;   // (columns, CHANNELS): q, k and v before their convolution
  const float *gate = nullptr;  // (columns, HEADS, VALUE_DIM)
  const float *beta = nullptr;  // (columns, HEADS)
  const float *alpha = nullptr;  // (columns, HEADS), or (columns, HEADS, KEY_DIM) where BY_CHANNEL
  float *dst = nullptr;  // (columns, HEADS, VALUE_DIM), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  float *slots = nullptr;
  const float *conv[3] = {};     // (CHANNELS, TAPS), or a third of the channels each
  const float *decay = nullptr;  // (HEADS)
  const float *decay_bias = nullptr;  // as alpha
  const float *gain = nullptr;  // (VALUE_DIM)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int PER = HEADS / KEY_HEADS, MIXED = 2 * KEY_DIM + VALUE_DIM, N = (MIXED + THREADS - 1) / THREADS;
  __shared__ F4 mixed4[MIXED / 4];  // q, k and v of this head
  __shared__ float squares[WARPS], values[VALUE_DIM];
  __shared__ F4 decays4[BY_CHANNEL ? KEY_DIM / 4 : 1];
  static_assert(KEY_DIM <= THREADS, "a thread for each decay");
  float *mixed = (float *)mixed4, *decays = (float *)decays4;
  const int head = blockIdx.x, key_head = GROUPED ? head / PER : head % KEY_HEADS, pos = a.state[POS];
  const bool owner = GROUPED ? head % PER == 0 : head < KEY_HEADS;  // of its key head's tail
  const float *before = carried(a.slots, pos);
  auto channel = [&](int i) {
    return i < KEY_DIM    ? key_head * KEY_DIM + i
        : i < 2 * KEY_DIM ? KEY_HEADS * KEY_DIM + key_head * KEY_DIM + i - KEY_DIM
                          : 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + i - 2 * KEY_DIM;
  };
  const int value = threadIdx.x / LANES;
  const bool there = value < VALUE_DIM;
  const u64 at = (TAPS - 1) * CHANNELS + ((u64)head * VALUE_DIM + value) * KEY_DIM;
  Column column;
  column.load(before + at, there && pos);
  Taps taps[N];
#pragma unroll
  for (int n = 0; n < N; n++)
    if (const int i = threadIdx.x + n * THREADS; i < MIXED)
      taps[n].load(taps_of(a.conv, i < KEY_DIM ? 0 : i < 2 * KEY_DIM ? 1 : 2, channel(i)), before, channel(i), !pos);
  const int lapses = BY_CHANNEL ? HEADS * KEY_DIM : HEADS,  // of a token, and this thread's
      lapse = BY_CHANNEL ? head * KEY_DIM + min((int)threadIdx.x, KEY_DIM - 1) : head;
  const float rule = a.decay[head], bias = a.decay_bias[lapse], gain = there ? a.gain[value] : 0;
  grid_wait();
  const int count = COLUMNS == 1 ? 1 : a.state[COUNT];
  for (int c = 0; c < count; c++) {  // columns of the step, in order
    float *after = carried(a.slots, pos + c + 1);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < MIXED) {
        const float input = a.src[c * CHANNELS + channel(i)];
        mixed[i] = silu(taps[n].run(input));
        taps[n].take(input);
        if (owner || i >= 2 * KEY_DIM) taps[n].store(after, channel(i));
      }
    }
    const float rate = sigmoid(a.beta[c * HEADS + head]);
    const float gate = there ? a.gate[(c * HEADS + head) * VALUE_DIM + value] : 0;
    float decay = decay_of(rule, a.alpha[c * lapses + lapse] + bias);
    if (BY_CHANNEL && threadIdx.x < KEY_DIM) decays[threadIdx.x] = decay;
    __syncthreads();
    if constexpr (BY_CHANNEL) {
      column.fade(decays);
      decay = 1;
    }
    const float *q = mixed, *k = mixed + KEY_DIM;
    float held = 0, answer = 0, qq = 0, kk = 0, qk = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (has_key(i)) {
        const F4 query = *(const F4 *)(q + first_key(i)), key = *(const F4 *)(k + first_key(i));
        held += dot4(column.s[i], key);
        answer += dot4(column.s[i], query);
        qq += dot4(query, query);
        kk += dot4(key, key);
        qk += dot4(query, key);
      }
    const float of_q = rsqrt_(sum_of_lanes(qq) + EPS) * QUERY_SCALE, of_k = rsqrt_(sum_of_lanes(kk) + EPS);
    held = sum_of_lanes(held) * of_k;
    const float v = there ? mixed[2 * KEY_DIM + value] : 0, news = rate * (v - decay * held);
    const float out = decay * sum_of_lanes(answer) * of_q + sum_of_lanes(qk) * of_q * of_k * news;
    column.take(k, decay, news * of_k);
    if (there) column.store(after + at);
    const float square = warp_sum(there && threadIdx.x % LANES == 0 ? out * out : 0);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[i];
    const float y = out * rsqrt_(sum / VALUE_DIM + EPS) * gain * gate_of(gate);
    if constexpr (OUT_QUANTISED) {
      if (there && threadIdx.x % LANES == 0) values[value] = y;
      __syncthreads();
      const int warp = threadIdx.x / 32, blocks = HEADS * VALUE_DIM / 32;
      if (warp < VALUE_DIM / 32)
        put_block<COLUMNS>(
            values[threadIdx.x], a.dst_q, a.dst_s, c, blocks, head * (VALUE_DIM / 32) + warp);
    } else if (there && threadIdx.x % LANES == 0) a.dst[(c * HEADS + head) * VALUE_DIM + value] = y;
    if (COLUMNS > 1) __syncthreads();  // before the next column takes the shared memory
  }
}
