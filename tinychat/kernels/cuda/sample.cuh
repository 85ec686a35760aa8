// The next token on the device, in two kernels: the candidates of each stretch of STRETCH logits (candidates.cu), then
// the choice by one block (choose_token.cu). Where top_k is 0 or above MAX_K, the choice looks at all logits instead
// (slower, by bisection; no sorting anywhere).

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
