// Prompts: Kimi Delta Attention over all tokens of the step, TOKENS of them in shared memory at a time, GROUP of them at
// once: the news of token i are rate (v - k S - sum over the earlier j of (k k_j) news_j), and what it answers is q S +
// sum of (q k_j) news_j, where keys, queries and their products have decayed already (prompt_convolve.cu). So the
// products with the state, and their sums over lanes, wait for no token but the group's last. A block has THREADS / LANES
// * COLUMNS_OF_LANE values of a head; their part of the state stays in registers.
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *dst = nullptr;          // (tokens, HEADS, VALUE_DIM)
  const float *mixed = nullptr;  // of prompt_convolve.cu, as the next three
  const float *both = nullptr;
  const float *late = nullptr;
  const float *shrink = nullptr;
  const float *rate = nullptr;
  float *slots = nullptr;
  const int *state = nullptr;
};

constexpr int COLUMNS_OF_LANE = 2;

DEVICE void run(const Args &a) {
  constexpr int TOKENS = 8, VALUES = THREADS / LANES * COLUMNS_OF_LANE, KV = KEY_DIM / 4, VV = VALUES / 4,
                BV = 2 * GROUP / 4, KEYS = HEADS * KEY_DIM, GROUPS = TOKENS / GROUP, ROW = 3 * KV + VV + BV;
  static_assert(LANES == 2 * GROUP, "a lane for each product of a group's tokens with the state");
  __shared__ F4 queries[2][TOKENS][KV], keys[2][TOKENS][KV], values[2][TOKENS][VV], products[2][TOKENS][BV];
  __shared__ F4 lates[2][TOKENS][KV], shrinks[2][GROUPS][KV];
  __shared__ float rates[2][TOKENS], out[TOKENS][VALUES];
  const int head = blockIdx.y, count = a.state[COUNT], pos = a.state[POS];
  const int part = threadIdx.x % LANES, mine = threadIdx.x / LANES * COLUMNS_OF_LANE, first_value = blockIdx.x * VALUES;
  const bool there = first_value + mine < VALUE_DIM;
  const u64 at = (TAPS - 1) * CHANNELS + ((u64)head * VALUE_DIM + first_value + mine) * KEY_DIM;
  auto fill = [&](int tile) {  // zeros behind the last token
    const int slot = tile & 1, first = tile * TOKENS;
    for (int i = threadIdx.x; i < TOKENS * ROW; i += THREADS) {
      const int t = i / ROW, v = i % ROW, token = min(first + t, count - 1);
      const float *row = a.mixed + (u64)token * CHANNELS;
      const bool valid = first + t < count;
      if (v < KV) copy_async(&queries[slot][t][v], row + head * KEY_DIM + v * 4, valid);
      else if (v < 2 * KV) copy_async(&keys[slot][t][v - KV], row + KEYS + head * KEY_DIM + (v - KV) * 4, valid);
      else if (v < 2 * KV + VV) {
        const int n = first_value + (v - 2 * KV) * 4;
        copy_async(&values[slot][t][v - 2 * KV], row + 2 * KEYS + head * VALUE_DIM + min(n, VALUE_DIM - 4),
            valid && n < VALUE_DIM);
      } else if (v < 2 * KV + VV + BV) {
        const int n = v - 2 * KV - VV;
        copy_async(&products[slot][t][n], a.both + ((u64)token * HEADS + head) * 2 * GROUP + n * 4, valid);
      } else {
        const int n = v - 2 * KV - VV - BV;
        copy_async(&lates[slot][t][n], a.late + (u64)token * KEYS + head * KEY_DIM + n * 4, valid);
      }
    }
    for (int i = threadIdx.x; i < GROUPS * KV; i += THREADS) {
      const int token = min(first + i / KV * GROUP, count - 1);
      const float *from = a.shrink + (u64)(token / GROUP) * KEYS + head * KEY_DIM + i % KV * 4;
      copy_async(&shrinks[slot][i / KV][i % KV], from, first + i / KV * GROUP < count);
    }
    copy_commit();
  };
  // Rate of a tile's tokens: a thread has one. Those behind the last token change nothing.
  auto rate_of = [&](int tile) {
    const int t = tile * TOKENS + (int)threadIdx.x % TOKENS;
    return t < count ? a.rate[(u64)t * HEADS + head] : 0.f;
  };
  auto put = [&](int tile, float v) {
    if (threadIdx.x < TOKENS) rates[tile & 1][threadIdx.x] = v;
  };
  grid_wait();
  Column columns[COLUMNS_OF_LANE];
#pragma unroll
  for (int c = 0; c < COLUMNS_OF_LANE; c++) columns[c].load(carried(a.slots, pos) + at + c * KEY_DIM, there && pos);
  fill(0);
  put(0, rate_of(0));
  for (int tile = 0; tile * TOKENS < count; tile++) {
    const int slot = tile & 1, first = tile * TOKENS, here = min(TOKENS, count - first);
    fill(tile + 1);
    const float next = rate_of(tile + 1);
    copy_wait<1>();
    __syncthreads();
    for (int t = 0; t < here; t += GROUP) {
      F4 key[GROUP][VECTORS];
      float sums[COLUMNS_OF_LANE][2 * GROUP] = {};  // with keys, then with queries
#pragma unroll
      for (int j = 0; j < GROUP; j++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          const F4 zero = {0, 0, 0, 0};
          key[j][i] = has_key(i) ? keys[slot][t + j][first_key(i) / 4] : zero;
          const F4 query = has_key(i) ? queries[slot][t + j][first_key(i) / 4] : zero;
#pragma unroll
          for (int c = 0; c < COLUMNS_OF_LANE; c++) {
            sums[c][j] += dot4(columns[c].s[i], key[j][i]);
            sums[c][GROUP + j] += dot4(columns[c].s[i], query);
          }
        }
#pragma unroll
      for (int c = 0; c < COLUMNS_OF_LANE; c++) {
        const float product = transposed_sum(sums[c]);  // of this lane's token: with its key, or its query
        float news[GROUP], answer = 0;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          const float *with = (const float *)products[slot][t + i];  // queries with keys, then keys with keys
          const float held = shfl(product, (int)threadIdx.x % 32 / LANES * LANES + i);
          float known = held, sum = 0;
#pragma unroll
          for (int j = 0; j < i; j++) known += with[GROUP + j] * news[j];
          news[i] = rates[slot][t + i] * (((const float *)values[slot][t + i])[mine + c] - known);
#pragma unroll
          for (int j = 0; j <= i; j++) sum += with[j] * news[j];
          if (part == GROUP + i) answer = product + sum;
        }
        if (part >= GROUP) out[t + part - GROUP][mine + c] = answer;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          if (!has_key(i)) continue;
          F4 s = by(columns[c].s[i], shrinks[slot][t / GROUP][first_key(i) / 4]);
#pragma unroll
          for (int j = 0; j < GROUP; j++) {
            const F4 k = lates[slot][t + j][first_key(i) / 4];
            s = F4{s.x + k.x * news[j], s.y + k.y * news[j], s.z + k.z * news[j], s.w + k.w * news[j]};
          }
          columns[c].s[i] = s;
        }
      }
    }
    if (first + TOKENS == a.state[KEPT])
#pragma unroll
      for (int c = 0; c < COLUMNS_OF_LANE; c++)
        if (there) columns[c].store(kept_slot(a.slots) + at + c * KEY_DIM);
    put(tile + 1, next);
    __syncthreads();
    for (int i = threadIdx.x; i < here * VALUES; i += THREADS)
      if (first_value + i % VALUES < VALUE_DIM)
        a.dst[((u64)(first + i / VALUES) * HEADS + head) * VALUE_DIM + first_value + i % VALUES] =
            out[i / VALUES][i % VALUES];
  }
  copy_wait<0>();
#pragma unroll
  for (int c = 0; c < COLUMNS_OF_LANE; c++)
    if (there) columns[c].store(carried(a.slots, pos + count) + at + c * KEY_DIM);
}
