// Sampling, one block for each column: the next token from the candidates or from all logits, and its log-probability.
// Of a step of one token also the next position and its token, so that a step can follow.
#include "sample.cuh"

struct Args {
  V2 *ring = nullptr;  // (RING) words for the host: token, log-probability
  int *history = nullptr;
  int *state = nullptr;
  const Candidate *list = nullptr;
  int *chosen = nullptr;  // (columns)
  const int *counts = nullptr;
  const F2 *parts = nullptr;
  const float *adjusted = nullptr;
  const float *logits = nullptr;
};

// splitmix64's finaliser over (seed, position, id), as a Gumbel variate (kernels/sampling.py).
DEVICE double gumbel(u64 seed, u64 position, u64 id) {
  u64 x = seed * 0x9E3779B97F4A7C15ull + position * 0xBF58476D1CE4E5B9ull + id * 0x94D049BB133111EBull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  return -log(-log(((double)(x >> 40) + 0.5) / 16777216.0));
}

// What a token scores, and the better of two: the larger score, then the lower id.
struct Pick {
  double score;
  int id;
};
DEVICE Pick better(Pick a, Pick b) { return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a; }
DEVICE Pick warp_best(Pick p) {
  for (int m = 16; m; m >>= 1) {
    const int lo = shfl_xor((int)(u32)__double_as_longlong(p.score), m),
              hi = shfl_xor((int)(u32)((u64)__double_as_longlong(p.score) >> 32), m);
    p = better(p, Pick{__longlong_as_double((long long)((u64)(u32)hi << 32 | (u32)lo)), shfl_xor(p.id, m)});
  }
  return p;
}
DEVICE Pick block_best(Pick p, Pick *red) {
  p = warp_best(p);
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = p;
  __syncthreads();
  return warp_best(red[threadIdx.x % 32]);
}

DEVICE void run(Args a) {
  constexpr int BLOCKS = (VOCAB + STRETCH - 1) / STRETCH, N = (BLOCKS * CANDIDATES + THREADS - 1) / THREADS, KEPT = 512;
  __shared__ float red[32];
  __shared__ int ired[64];
  __shared__ Pick pred[32];
  __shared__ float kept[KEPT];
  __shared__ int kept_id[KEPT], n_kept;
  const int column = COLUMNS == 1 ? 0 : blockIdx.x;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.list += column * BLOCKS * CANDIDATES;
  a.counts += column * BLOCKS;
  a.parts += column * BLOCKS;
  a.adjusted += column * VOCAB;
  a.logits += column * VOCAB;
  const int k = wanted(a.state), tid = threadIdx.x, pos = a.state[POS] + column;
  const float temperature = unbits(a.state[TEMPERATURE]), top_p = unbits(a.state[TOP_P]),
              min_p = unbits(a.state[MIN_P]);
  const u64 seed = (u32)a.state[SEED_LO] | (u64)(u32)a.state[SEED_HI] << 32;
  if (tid == 0) n_kept = 0;
  grid_wait();
  u32 key[N];
  int id[N];
#pragma unroll
  for (int i = 0; i < N; i++) {  // whether or not they are wanted, so that nothing is waited for twice
    const int slot = tid + i * THREADS, b = min(slot / CANDIDATES, BLOCKS - 1);
    const Candidate c = a.list[min(slot, BLOCKS * CANDIDATES - 1)];
    key[i] = slot < BLOCKS * CANDIDATES && slot % CANDIDATES < a.counts[b] ? c.key : 0;
    id[i] = c.id;
  }
  float top = -INFINITY;  // of the raw a.logits, for the log-probability
  for (int b = tid; b < BLOCKS; b += THREADS) top = fmaxf(top, a.parts[b].x);
  top = block_max(top, red);
  float sum = 0;
  for (int b = tid; b < BLOCKS; b += THREADS) sum += a.parts[b].y * expf(a.parts[b].x - top);
  sum = block_sum(sum, red);
  Pick pick = {-INFINITY, VOCAB};
  if (k) {
    const u32 threshold = kth_key(key, min(k, VOCAB), ired);
#pragma unroll
    for (int i = 0; i < N; i++)
      if (key[i] >= threshold && key[i]) {
        if (temperature <= 0) {
          pick = better(pick, Pick{(double)value_of(key[i]), id[i]});
          continue;
        }
        const int at = atomicAdd(&n_kept, 1);
        if (at < KEPT) {
          kept[at] = value_of(key[i]);
          kept_id[at] = id[i];
        }
      }
    __syncthreads();
    if (temperature > 0) {
      const int n = min(n_kept, KEPT);
      float largest = -INFINITY, mass = 0, before = 0;
      for (int i = 0; i < n; i++) largest = fmaxf(largest, kept[i]);
      const float v = tid < n ? kept[tid] : 0;
      for (int i = 0; i < n; i++) {
        const float p = expf(kept[i] - largest);
        mass += p;
        if (kept[i] > v) before += p;
      }
      const bool stays = tid < n && (top_p >= 1.f || before < top_p * mass || v == largest) &&
          (min_p <= 0 || v >= largest + logf(min_p));
      if (stays) pick = Pick{(double)v / temperature + gumbel(seed, pos, kept_id[tid]), kept_id[tid]};
    }
  } else {  // all a.logits, already a.adjusted
    const int top_k = a.state[TOP_K];
    float largest = -INFINITY, total = 0;
    for (int i = tid; i < VOCAB; i += THREADS) largest = fmaxf(largest, a.adjusted[i]);
    largest = block_max(largest, red);
    u32 threshold = 0;
    if (top_k > 0 && top_k < VOCAB)
      for (int bit = 31; bit >= 0; bit--) {
        const u32 tried = threshold | 1u << bit;
        int n = 0;
        for (int i = tid; i < VOCAB; i += THREADS) n += key_of(a.adjusted[i]) >= tried;
        if (block_sum(n, ired) >= top_k) threshold = tried;
      }
    if (top_p < 1.f) {  // the smallest key below whose larger neighbours less than top_p of the mass lies
      for (int i = tid; i < VOCAB; i += THREADS)
        if (key_of(a.adjusted[i]) >= threshold) total += expf(a.adjusted[i] - largest);
      total = block_sum(total, red);
      u32 low = 0;  // the largest key with mass(greater or equal) >= top_p * total
      for (int bit = 31; bit >= 0; bit--) {
        const u32 tried = low | 1u << bit;
        float m = 0;
        for (int i = tid; i < VOCAB; i += THREADS) {
          const u32 key = key_of(a.adjusted[i]);
          if (key >= tried && key >= threshold) m += expf(a.adjusted[i] - largest);
        }
        if (block_sum(m, red) >= top_p * total) low = tried;
      }
      threshold = max(threshold, min(low, key_of(largest)));
    }
    if (min_p > 0) threshold = max(threshold, min(key_of(largest + logf(min_p)), key_of(largest)));
    for (int i = tid; i < VOCAB; i += THREADS)
      if (key_of(a.adjusted[i]) >= threshold)
        pick = better(pick, Pick{(double)a.adjusted[i] / temperature + gumbel(seed, pos, i), i});
  }
  pick = block_best(pick, pred);
  if (tid == 0) {
    const int id = pick.id < VOCAB ? pick.id : 0;  // not a number anywhere
    if (COLUMNS == 1) {
      a.history[pos + 1] = id;
      a.state[POS] = pos + 1;
    }
    a.chosen[column] = id;
    const u32 logprob = bits(a.logits[id] - top - logf(sum));
    *(volatile u64 *)&a.ring[(pos + 1 + RING_FIRST + a.state[TURN]) % RING] = (u64)logprob << 32 | (u32)id;
  }
}
