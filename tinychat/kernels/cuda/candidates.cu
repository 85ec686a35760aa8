// Sampling, a block per stretch of a column's logits: the penalties, the bias and the mask, the maximum and sum of the raw
// logits, and the candidates: all logits that reach the stretch's top_k-th largest.
#include "sample.cuh"

struct Args {
  Candidate *list = nullptr;  // (columns, stretches, CANDIDATES)
  int *counts = nullptr;      // of candidates
  F2 *parts = nullptr;        // maximum and sum of exp of each stretch's raw logits
  float *adjusted = nullptr;  // logits with penalties, bias and mask, where no lists are made
  const float *logits = nullptr;
  const int *history = nullptr;
  const int *state = nullptr;
  const u32 *breakers = nullptr;  // a bit per token id: DRY's repetitions end there
  const float *bias = nullptr;    // (VOCAB), read where state[BIASED]
  const u32 *allowed = nullptr;   // a bit per token id, in host memory, read where state[MASKED]
};

// Into longest[id - first], for each token of the stretch: how many tokens the longest repetition has that it would
// continue, -1 for none (kernels/sampling.py, dry). Back from the newest token, at `pos`, distance d is position pos - d.
DEVICE void repetitions(int *longest, const Args &a, int pos, int first) {
  __shared__ int broken;
  const int last_n = a.state[DRY_PENALTY_LAST_N], allowed = a.state[DRY_ALLOWED_LENGTH],
            tid = threadIdx.x;
  const int known = max(a.state[FIRST_KNOWN], last_n < 0 ? 0 : pos + 1 - last_n), n = pos + 1 - known;
  const int *newest = a.history + pos;
  auto breaks = [&](int id) { return a.breakers[id / 32] >> id % 32 & 1; };
  for (int i = tid; i < STRETCH; i += THREADS) longest[i] = -1;
  if (tid == 0) broken = n;
  __syncthreads();
  for (int d = tid; d < n; d += THREADS)
    if (breaks(newest[-d])) atomicMin(&broken, d);
  __syncthreads();
  if (n <= allowed || broken < allowed) return;
  const int limit = min(broken, a.state[DRY_LONGEST]);
  for (int d = 1 + tid; d < n; d += THREADS) {
    const int next = newest[1 - d], i = next - first;  // the token behind the repetition at distance d
    if (i < 0 || i >= STRETCH || breaks(next)) continue;
    int same = 0;
    while (same < limit && d + same < n && newest[-d - same] == newest[-same]) same++;
    if (same >= allowed) atomicMax(&longest[i], same);
  }
}

DEVICE void run(Args a) {
  __shared__ float red[32];
  __shared__ int ired[64];
  __shared__ int times[STRETCH];  // that a token is among the last REPEAT_LAST_N
  __shared__ int longest[STRETCH];
  const int k = wanted(a.state), first = blockIdx.x * STRETCH, tid = threadIdx.x;
  const int column = COLUMNS == 1 ? 0 : blockIdx.y, stretches = (VOCAB + STRETCH - 1) / STRETCH;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.list += column * stretches * CANDIDATES;
  a.counts += column * stretches;
  a.parts += column * stretches;
  a.adjusted += column * VOCAB;
  a.logits += column * VOCAB;
  const float penalty = unbits(a.state[REPEAT_PENALTY]), presence = unbits(a.state[PRESENCE_PENALTY]),
              frequency = unbits(a.state[FREQUENCY_PENALTY]);
  const bool counts = penalty != 1.f || presence != 0 || frequency != 0, biased = a.state[BIASED];
  if (counts)
    for (int i = tid; i < STRETCH; i += THREADS) times[i] = 0;
  grid_wait();
  const int pos = a.state[POS] + column;
  __syncthreads();
  if (counts)
    for (int p = max(a.state[FIRST_KNOWN], pos + 1 - a.state[REPEAT_LAST_N]) + tid; p <= pos; p += THREADS) {
      const int id = a.history[p] - first;
      if (id >= 0 && id < STRETCH) atomicAdd(&times[id], 1);
    }
  const float dry = unbits(a.state[DRY_MULTIPLIER]);
  if (dry > 0) repetitions(longest, a, pos, first);
  __syncthreads();
  const u32 allowed = a.state[MASKED] && first + tid * 4 < VOCAB ? a.allowed[first / 32 + tid / 8] >> tid % 8 * 4 : ~0u;
  float raw[4], top = -INFINITY;
  u32 key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int j = tid * 4 + i, id = first + j;
    raw[i] = id < VOCAB ? a.logits[id] : -INFINITY;
    top = fmaxf(top, raw[i]);
    float v = raw[i];
    if ((counts || dry > 0 || biased) && id < VOCAB) {
      double less = 0;
      if (counts && times[j]) {
        v = v > 0 ? v / penalty : v * penalty;
        less = presence + (double)frequency * times[j];
      }
      if (dry > 0 && longest[j] >= 0)
        less += dry * pow((double)unbits(a.state[DRY_BASE]), (double)(longest[j] - a.state[DRY_ALLOWED_LENGTH]));
      if (biased) less -= a.bias[id];
      v = (float)(v - less);
    }
    if (!(allowed >> i & 1)) v = -INFINITY;
    key[i] = v > -INFINITY ? key_of(v) : 0;
    if (!k && id < VOCAB) a.adjusted[id] = v;
  }
  top = block_max(top, red);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += raw[i] > -INFINITY ? expf(raw[i] - top) : 0;
  sum = block_sum(sum, red);
  if (tid == 0) a.parts[blockIdx.x] = F2{top, sum};
  const u32 threshold = !k ? ~0u : max(1u, kth_key(key, min(k, min(VOCAB - first, STRETCH)), ired));
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
