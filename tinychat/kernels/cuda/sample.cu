// The next token on the device, in two kernels: candidates of each stretch of 4096 logits, then the choice by one
// block. Where top_k is 0 or above MAX_K, the choice looks at all logits instead (slower, by bisection; no sorting
// anywhere).

#define MAX_K 64   // top_k with candidate lists
#define SLOTS 128  // candidates kept per stretch: MAX_K and room for equal logits
#define STRETCH 4096

struct Candidate {
  u32 key;
  int id;
};  // key: the logit's bits, made to sort as unsigned

DEVICE float value_of(u32 k) { return unbits(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k); }

// How many candidates sampling looks at: 1 when greedy, top_k where the lists can serve it, else 0 (all logits).
DEVICE int wanted(const int *state) {
  if (unbits(state[TEMPERATURE]) <= 0) return 1;
  return state[TOP_K] > 0 && state[TOP_K] <= MAX_K ? state[TOP_K] : 0;
}

template <class T> DEVICE T block_sum(T v, T *red) {
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  __syncthreads();
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
  __syncthreads();
  v = red[threadIdx.x % 32];
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  return v;
}
DEVICE float block_max(float v, float *red) {
  v = warp_max(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_max(red[threadIdx.x % 32]);
}
// The largest key that at least `k` of the block's keys (N per thread) reach; 0 counts as absent. `red`: 64 words.
template <int N> DEVICE u32 kth_key(const u32 (&key)[N], int k, int *red) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < N; i++) most = max(most, key[i]);
  most = warp_most(most);
  __syncthreads();
  if (lane == 0) red[32 + warp] = (int)most;
  __syncthreads();
  most = warp_most((u32)red[32 + lane]);
  if (k == 1) return most;
  __syncthreads();
  u32 at = 0;
  int turn = 0;
  for (int bit = 31; bit >= 0; bit--) {  // one barrier each: the halves of `red` take turns
    const u32 tried = at | 1u << bit;
    if (tried > most) continue;
    int n = 0;
#pragma unroll
    for (int i = 0; i < N; i++) n += key[i] >= tried;
    n = warp_add(n);
    turn ^= 32;
    if (lane == 0) red[turn + warp] = n;
    __syncthreads();
    if (warp_add(red[turn + lane]) >= k) at = tried;
  }
  return at;
}

template <int VOCAB>
DEVICE void candidates(Candidate *list, int *counts, F2 *parts, float *adjusted, const float *logits,
    const int *history, const int *state) {
  __shared__ float red[32];
  __shared__ int ired[64];
  __shared__ u32 seen[STRETCH / 32];
  const int k = wanted(state), first = blockIdx.x * STRETCH, tid = threadIdx.x;
  const float penalty = unbits(state[PENALTY]);
  for (int i = tid; i < STRETCH / 32; i += THREADS) seen[i] = 0;
  grid_wait();
  __syncthreads();
  if (penalty != 1.f)
    for (int p = max(state[FIRST_KNOWN], state[POS] + 1 - state[LAST_N]) + tid; p <= state[POS]; p += THREADS) {
      const int id = history[p] - first;
      if (id >= 0 && id < STRETCH) atomicOr(&seen[id / 32], 1u << id % 32);
    }
  __syncthreads();
  float raw[4], top = -INFINITY;
  u32 key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int j = tid * 4 + i, id = first + j;
    raw[i] = id < VOCAB ? logits[id] : -INFINITY;
    top = fmaxf(top, raw[i]);
    float v = raw[i];
    if (penalty != 1.f && seen[j / 32] >> (j % 32) & 1) v = v > 0 ? v / penalty : v * penalty;
    key[i] = id < VOCAB ? key_of(v) : 0;
    if (!k && id < VOCAB) adjusted[id] = v;
  }
  top = block_max(top, red);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += raw[i] > -INFINITY ? expf(raw[i] - top) : 0;
  sum = block_sum(sum, red);
  if (tid == 0) parts[blockIdx.x] = F2{top, sum};
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
      if (at < SLOTS) list[blockIdx.x * SLOTS + at] = Candidate{key[i], first + tid * 4 + i};
      at++;
    }
  if (tid == 0) counts[blockIdx.x] = min(all, SLOTS);
}

// splitmix64's finaliser over (seed, position, id), as a Gumbel variate (engine/sampling.py).
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
DEVICE Pick block_best(Pick p, Pick *red) {
  for (int m = 16; m; m >>= 1) {
    const int lo = shfl_xor((int)(u32)__double_as_longlong(p.score), m),
              hi = shfl_xor((int)(u32)((u64)__double_as_longlong(p.score) >> 32), m);
    p = better(p, Pick{__longlong_as_double((long long)((u64)(u32)hi << 32 | (u32)lo)), shfl_xor(p.id, m)});
  }
  if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = p;
  __syncthreads();
  for (int i = 0; i < 32; i++) p = better(p, red[i]);
  return p;
}

template <int VOCAB, int RING>
DEVICE void choose_token(V2 *ring, int *history, int *state, const Candidate *list, const int *counts, const F2 *parts,
    const float *adjusted, const float *logits) {
  constexpr int BLOCKS = (VOCAB + STRETCH - 1) / STRETCH, N = (BLOCKS * SLOTS + THREADS - 1) / THREADS, KEPT = 512;
  __shared__ float red[32];
  __shared__ int ired[64];
  __shared__ Pick pred[32];
  __shared__ float kept[KEPT];
  __shared__ int kept_id[KEPT], n_kept;
  const int k = wanted(state), tid = threadIdx.x, pos = state[POS];
  const float temperature = unbits(state[TEMPERATURE]), top_p = unbits(state[TOP_P]), min_p = unbits(state[MIN_P]);
  const u64 seed = (u32)state[SEED_LO] | (u64)(u32)state[SEED_HI] << 32;
  if (tid == 0) n_kept = 0;
  grid_wait();
  float top = -INFINITY;  // of the raw logits, for the log-probability
  for (int b = tid; b < BLOCKS; b += THREADS) top = fmaxf(top, parts[b].x);
  top = block_max(top, red);
  float sum = 0;
  for (int b = tid; b < BLOCKS; b += THREADS) sum += parts[b].y * expf(parts[b].x - top);
  sum = block_sum(sum, red);
  Pick pick = {-INFINITY, VOCAB};
  if (k) {
    u32 key[N];
    int id[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int slot = tid + i * THREADS, b = slot / SLOTS;
      const bool there = b < BLOCKS && slot % SLOTS < counts[b];
      const Candidate c = there ? list[slot] : Candidate{0, 0};
      key[i] = c.key;
      id[i] = c.id;
    }
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
  } else {  // all logits, already adjusted
    const int top_k = state[TOP_K];
    float largest = -INFINITY, total = 0;
    for (int i = tid; i < VOCAB; i += THREADS) largest = fmaxf(largest, adjusted[i]);
    largest = block_max(largest, red);
    u32 threshold = 0;
    if (top_k > 0 && top_k < VOCAB)
      for (int bit = 31; bit >= 0; bit--) {
        const u32 tried = threshold | 1u << bit;
        int n = 0;
        for (int i = tid; i < VOCAB; i += THREADS) n += key_of(adjusted[i]) >= tried;
        if (block_sum(n, ired) >= top_k) threshold = tried;
      }
    if (top_p < 1.f) {  // the smallest key below whose larger neighbours less than top_p of the mass lies
      for (int i = tid; i < VOCAB; i += THREADS)
        if (key_of(adjusted[i]) >= threshold) total += expf(adjusted[i] - largest);
      total = block_sum(total, red);
      u32 low = 0;  // the largest key with mass(greater or equal) >= top_p * total
      for (int bit = 31; bit >= 0; bit--) {
        const u32 tried = low | 1u << bit;
        float m = 0;
        for (int i = tid; i < VOCAB; i += THREADS) {
          const u32 key = key_of(adjusted[i]);
          if (key >= tried && key >= threshold) m += expf(adjusted[i] - largest);
        }
        if (block_sum(m, red) >= top_p * total) low = tried;
      }
      threshold = max(threshold, min(low, key_of(largest)));
    }
    if (min_p > 0) threshold = max(threshold, min(key_of(largest + logf(min_p)), key_of(largest)));
    for (int i = tid; i < VOCAB; i += THREADS)
      if (key_of(adjusted[i]) >= threshold)
        pick = better(pick, Pick{(double)adjusted[i] / temperature + gumbel(seed, pos, i), i});
  }
  pick = block_best(pick, pred);
  if (tid == 0) {
    const int id = pick.id < VOCAB ? pick.id : 0;  // not a number anywhere
    history[pos + 1] = id;
    state[POS] = pos + 1;
    fence_system();
    const u32 logprob = bits(logits[id] - top - logf(sum));
    *(volatile u64 *)&ring[(pos + 1) % RING] = (u64)logprob << 32 | (u32)id;
  }
}
