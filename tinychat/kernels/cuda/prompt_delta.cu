// Prompts: the recurrence of the gated delta rule over all tokens of the step, TOKENS of them in shared memory at a
// time. A block has THREADS / LANES values of a head; their part of the state stays in registers.
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *dst = nullptr;          // (tokens, HEADS, VALUE_DIM)
  const float *mixed = nullptr;  // of prompt_convolve.cu, as the next three
  const float *both = nullptr;
  const float *rate = nullptr;
  const float *decay = nullptr;
  float *slots = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int TOKENS = 16, VALUES = THREADS / LANES, PER = HEADS / KEY_HEADS, KV = KEY_DIM / 4, VV = VALUES / 4,
                KEYS = KEY_HEADS * KEY_DIM;
  __shared__ F4 queries[2][TOKENS][KV], keys[2][TOKENS][KV], values[2][TOKENS][VV];
  __shared__ float gates[2][3][TOKENS], out[TOKENS][VALUES];
  const int head = blockIdx.y, key_head = GROUPED ? head / PER : head % KEY_HEADS, count = a.state[COUNT],
            pos = a.state[POS];
  const int mine = threadIdx.x / LANES, first_value = blockIdx.x * VALUES, value = first_value + mine;
  const bool there = value < VALUE_DIM;
  const u64 at = (TAPS - 1) * CHANNELS + ((u64)head * VALUE_DIM + value) * KEY_DIM;
  auto fill = [&](int tile) {
    const int slot = tile & 1, first = tile * TOKENS;
    for (int i = threadIdx.x; i < TOKENS * (2 * KV + VV); i += THREADS) {
      const int t = i / (2 * KV + VV), v = i % (2 * KV + VV);
      const float *row = a.mixed + (u64)min(first + t, count - 1) * CHANNELS;
      if (v < KV) copy_async(&queries[slot][t][v], row + key_head * KEY_DIM + v * 4, first + t < count);
      else if (v < 2 * KV)
        copy_async(&keys[slot][t][v - KV], row + KEYS + key_head * KEY_DIM + (v - KV) * 4, first + t < count);
      else {
        const int n = first_value + (v - 2 * KV) * 4;
        copy_async(&values[slot][t][v - 2 * KV], row + 2 * KEYS + head * VALUE_DIM + min(n, VALUE_DIM - 4),
            first + t < count && n < VALUE_DIM);
      }
    }
    copy_commit();
  };
  // The three numbers of a tile's tokens: a thread has one.
  auto gate = [&](int tile) {
    const int t = min(tile * TOKENS + (int)threadIdx.x % TOKENS, count - 1), kind = threadIdx.x / TOKENS;
    return kind == 0 ? a.decay[(u64)t * HEADS + head]
        : kind == 1  ? a.rate[(u64)t * HEADS + head]
                     : a.both[(u64)t * KEY_HEADS + key_head];
  };
  auto put = [&](int tile, float v) {
    if (threadIdx.x < 3 * TOKENS) gates[tile & 1][threadIdx.x / TOKENS][threadIdx.x % TOKENS] = v;
  };
  grid_wait();
  Column column;
  column.load(carried(a.slots, pos) + at, there && pos);
  fill(0);
  put(0, gate(0));
  for (int tile = 0; tile * TOKENS < count; tile++) {
    const int slot = tile & 1, first = tile * TOKENS, here = min(TOKENS, count - first);
    fill(tile + 1);
    const float next = gate(tile + 1);
    copy_wait<1>();
    __syncthreads();
#pragma unroll 2
    for (int t = 0; t < here; t++) {
      const float *q = (const float *)queries[slot][t], *k = (const float *)keys[slot][t];
      const float decay = gates[slot][0][t];
      float held = 0, answer = 0;
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
        if (has_key(i)) {
          held += dot4(column.s[i], *(const F4 *)(k + first_key(i)));
          answer += dot4(column.s[i], *(const F4 *)(q + first_key(i)));
        }
      const float v = ((const float *)values[slot][t])[mine];
      const float news = gates[slot][1][t] * (v - decay * sum_of_lanes(held));
      column.take(k, decay, news);
      const float o = decay * sum_of_lanes(answer) + gates[slot][2][t] * news;
      if (threadIdx.x % LANES == 0) out[t][mine] = o;
    }
    put(tile + 1, next);
    __syncthreads();
    for (int i = threadIdx.x; i < here * VALUES; i += THREADS)
      if (first_value + i % VALUES < VALUE_DIM)
        a.dst[((u64)(first + i / VALUES) * HEADS + head) * VALUE_DIM + first_value + i % VALUES] =
            out[i / VALUES][i % VALUES];
  }
  copy_wait<0>();
  if (there) column.store(carried(a.slots, pos + count) + at);
}
