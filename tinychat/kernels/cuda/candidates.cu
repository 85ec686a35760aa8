// Sampling, a block per stretch of logits: the repeat penalty, the maximum and sum of the raw logits, and the candidates: all logits that
// reach the stretch's top_k-th largest.
#include "sample.cuh"

struct Args {
  Candidate *list = nullptr;  // (stretches, CANDIDATES)
  int *counts = nullptr;  // of candidates
  F2 *parts = nullptr;  // maximum and sum of exp of each stretch's raw logits
  float *adjusted = nullptr;  // logits with penalties, where no lists are made
  const float *logits = nullptr;
  const int *history = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[32];
  __shared__ int ired[64];
  __shared__ u32 seen[STRETCH / 32];
  const int k = wanted(a.state), first = blockIdx.x * STRETCH, tid = threadIdx.x;
  const float penalty = unbits(a.state[PENALTY]);
  for (int i = tid; i < STRETCH / 32; i += THREADS) seen[i] = 0;
  grid_wait();
  __syncthreads();
  if (penalty != 1.f)
    for (int p = max(a.state[FIRST_KNOWN], a.state[POS] + 1 - a.state[LAST_N]) + tid; p <= a.state[POS]; p += THREADS) {
      const int id = a.history[p] - first;
      if (id >= 0 && id < STRETCH) atomicOr(&seen[id / 32], 1u << id % 32);
    }
  __syncthreads();
  float raw[4], top = -INFINITY;
  u32 key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int j = tid * 4 + i, id = first + j;
    raw[i] = id < VOCAB ? a.logits[id] : -INFINITY;
    top = fmaxf(top, raw[i]);
    float v = raw[i];
    if (penalty != 1.f && seen[j / 32] >> (j % 32) & 1) v = v > 0 ? v / penalty : v * penalty;
    key[i] = id < VOCAB ? key_of(v) : 0;
    if (!k && id < VOCAB) a.adjusted[id] = v;
  }
  top = block_max(top, red);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += raw[i] > -INFINITY ? expf(raw[i] - top) : 0;
  sum = block_sum(sum, red);
  if (tid == 0) a.parts[blockIdx.x] = F2{top, sum};
  const u32 threshold = !k ? ~0u : kth_key(key, min(k, min(VOCAB - first, STRETCH)), ired);
  int mine = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) mine += k && key[i] >= threshold;
  int before = mine;
  for (int by = 1; by < 32; by *= 2) {
    const int v = shfl_up(before, by);
    if (tid % 32 >= by) before += v;
  }
  __syncthreads();
  if (tid % 32 == 31) ired[tid / 32] = before;
  __syncthreads();
  int at = before - mine, all = 0;
  for (int w = 0; w < 32; w++) {
    if (w < tid / 32) at += ired[w];
    all += ired[w];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (k && key[i] >= threshold) {
      if (at < CANDIDATES) a.list[blockIdx.x * CANDIDATES + at] = Candidate{key[i], first + tid * 4 + i};
      at++;
    }
  if (tid == 0) a.counts[blockIdx.x] = min(all, CANDIDATES);
}
