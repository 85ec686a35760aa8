// Prompts: the gated delta rule over all tokens of the step, TOKENS of them in shared memory at a time, GROUP of them
// at once: with G the product of the decays up to a token and D those behind an earlier one, the news of token i are
// rate (v - G k S - sum over the earlier j of D (k k_j) news_j), and what it answers is G q S + sum of D (q k_j)
// news_j. So the products with the state, and their sums over lanes, wait for no token but the group's last. A block
// has THREADS / LANES * COLUMNS_OF_LANE values of a head; their part of the state stays in registers. Where the state
// decays BY_CHANNEL, keys, queries and their products have decayed already (prompt_convolve.cu).
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *dst = nullptr;          // (tokens, HEADS, VALUE_DIM)
  const float *mixed = nullptr;  // of prompt_convolve.cu, as the next three
  const float *both = nullptr;
  const float *late = nullptr;
  const float *shrink = nullptr;
  const float *rate = nullptr;
  const float *decay = nullptr;
  float *slots = nullptr;
  const int *state = nullptr;
};

constexpr int COLUMNS_OF_LANE = 2;

DEVICE void run(const Args &a) {
  constexpr int TOKENS = BY_CHANNEL ? 8 : 16, VALUES = THREADS / LANES * COLUMNS_OF_LANE, PER = HEADS / KEY_HEADS, KV = KEY_DIM / 4,
                VV = VALUES / 4, BV = 2 * GROUP / 4, KEYS = KEY_HEADS * KEY_DIM, GROUPS = TOKENS / GROUP,
                ROW = 2 * KV + VV + BV + (BY_CHANNEL ? KV : 0);
  static_assert(LANES == 2 * GROUP, "a lane for each product of a group's tokens with the state");
  __shared__ F4 queries[2][TOKENS][KV], keys[2][TOKENS][KV], values[2][TOKENS][VV], products[2][TOKENS][BV];
  __shared__ F4 lates[2][BY_CHANNEL ? TOKENS : 1][KV], shrinks[2][BY_CHANNEL ? GROUPS : 1][KV];
  __shared__ float gates[2][2][TOKENS], out[TOKENS][VALUES];
  const int head = blockIdx.y, key_head = GROUPED ? head / PER : head % KEY_HEADS, count = a.state[COUNT],
            pos = a.state[POS];
  const int part = threadIdx.x % LANES, mine = threadIdx.x / LANES * COLUMNS_OF_LANE, first_value = blockIdx.x * VALUES;
  const bool there = first_value + mine < VALUE_DIM;
  const u64 at = (TAPS - 1) * CHANNELS + ((u64)head * VALUE_DIM + first_value + mine) * KEY_DIM;
  auto fill = [&](int tile) {  // zeros behind the last token
    const int slot = tile & 1, first = tile * TOKENS;
    for (int i = threadIdx.x; i < TOKENS * ROW; i += THREADS) {
      const int t = i / ROW, v = i % ROW, token = min(first + t, count - 1);
      const float *row = a.mixed + (u64)token * CHANNELS;
      const bool valid = first + t < count;
      if (v < KV) copy_async(&queries[slot][t][v], row + key_head * KEY_DIM + v * 4, valid);
      else if (v < 2 * KV) copy_async(&keys[slot][t][v - KV], row + KEYS + key_head * KEY_DIM + (v - KV) * 4, valid);
      else if (v < 2 * KV + VV) {
        const int n = first_value + (v - 2 * KV) * 4;
        copy_async(&values[slot][t][v - 2 * KV], row + 2 * KEYS + head * VALUE_DIM + min(n, VALUE_DIM - 4),
            valid && n < VALUE_DIM);
      } else if (v < 2 * KV + VV + BV) {
        const int n = v - 2 * KV - VV;
        copy_async(&products[slot][t][n], a.both + ((u64)token * KEY_HEADS + key_head) * 2 * GROUP + n * 4, valid);
      } else {
        const int n = v - 2 * KV - VV - BV;
        copy_async(&lates[slot][t][n], a.late + (u64)token * KEYS + key_head * KEY_DIM + n * 4, valid);
      }
    }
    if constexpr (BY_CHANNEL)
      for (int i = threadIdx.x; i < GROUPS * KV; i += THREADS) {
        const int token = min(first + i / KV * GROUP, count - 1);
        const float *from = a.shrink + (u64)(token / GROUP) * KEYS + key_head * KEY_DIM + i % KV * 4;
        copy_async(&shrinks[slot][i / KV][i % KV], from, first + i / KV * GROUP < count);
      }
    copy_commit();
  };
  // Decay and rate of a tile's tokens: a thread has one number. Those behind the last token change nothing.
  auto gate = [&](int tile) {
    const int t = tile * TOKENS + (int)threadIdx.x % TOKENS;
    const float *from = BY_CHANNEL || threadIdx.x / TOKENS ? a.rate : a.decay;
    return t < count ? from[(u64)t * HEADS + head] : threadIdx.x / TOKENS == 0 ? 1.f : 0.f;
  };
  auto put = [&](int tile, float v) {
    if (threadIdx.x < 2 * TOKENS) gates[tile & 1][threadIdx.x / TOKENS][threadIdx.x % TOKENS] = v;
  };
  grid_wait();
  Column columns[COLUMNS_OF_LANE];
#pragma unroll
  for (int c = 0; c < COLUMNS_OF_LANE; c++) columns[c].load(carried(a.slots, pos) + at + c * KEY_DIM, there && pos);
  fill(0);
  put(0, gate(0));
  for (int tile = 0; tile * TOKENS < count; tile++) {
    const int slot = tile & 1, first = tile * TOKENS, here = min(TOKENS, count - first);
    fill(tile + 1);
    const float next = gate(tile + 1);
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
      // since[i][j]: the product of the decays of tokens j + 1 .. i; since[i][GROUP]: of all up to i
      float since[GROUP][GROUP + 1], rate[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        const float decay = BY_CHANNEL ? 1 : gates[slot][0][t + i];
        rate[i] = gates[slot][1][t + i];
#pragma unroll
        for (int j = 0; j < i; j++) since[i][j] = decay * (j == i - 1 ? 1 : since[i ? i - 1 : 0][j]);
        since[i][i] = 1;
        since[i][GROUP] = decay * (i ? since[i ? i - 1 : 0][GROUP] : 1);
      }
#pragma unroll
      for (int c = 0; c < COLUMNS_OF_LANE; c++) {
        const float product = transposed_sum(sums[c]);  // of this lane's token: with its key, or its query
        float news[GROUP], answer = 0;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          const float *with = (const float *)products[slot][t + i];  // queries with keys, then keys with keys
          const float held = shfl(product, (int)threadIdx.x % 32 / LANES * LANES + i);
          float known = since[i][GROUP] * held, sum = 0;
#pragma unroll
          for (int j = 0; j < i; j++) known += since[i][j] * with[GROUP + j] * news[j];
          news[i] = rate[i] * (((const float *)values[slot][t + i])[mine + c] - known);
#pragma unroll
          for (int j = 0; j <= i; j++) sum += since[i][j] * with[j] * news[j];
          if (part == GROUP + i) answer = since[i][GROUP] * product + sum;
        }
        if (part >= GROUP) out[t + part - GROUP][mine + c] = answer;
        const float shrink = since[GROUP - 1][GROUP];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          F4 s = columns[c].s[i];
          if constexpr (BY_CHANNEL) s = has_key(i) ? by(s, shrinks[slot][t / GROUP][first_key(i) / 4]) : s;
          else s = F4{shrink * s.x, shrink * s.y, shrink * s.z, shrink * s.w};
#pragma unroll
          for (int j = 0; j < GROUP; j++) {
            const float f = since[GROUP - 1][j] * news[j];
            F4 k = key[j][i];
            if constexpr (BY_CHANNEL) k = has_key(i) ? lates[slot][t + j][first_key(i) / 4] : k;
            s = F4{s.x + k.x * f, s.y + k.y * f, s.z + k.z * f, s.w + k.w * f};
          }
          columns[c].s[i] = s;
        }
      }
    }
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
