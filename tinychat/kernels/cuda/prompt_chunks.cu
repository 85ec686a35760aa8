// Prompts, the gated delta rule in chunks of CHUNK tokens: what its recurrence from chunk to chunk (prompt_delta.cu)
// needs of a chunk, with G the product of the decays from the chunk's first token on. A is strictly lower, A[i][j] =
// rate[i] G[i] / G[j] (k_i k_j); a block makes solve = (I + A)^-1 diag(rate) and mixing[i][j] = G[i] / G[j] (q_i k_j) of
// a chunk and a head. What blocks of 16 tokens above the diagonal hold there is not defined.
#include "halves.cuh"
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  u16 *solve = nullptr;          // (chunks, HEADS, CHUNK, CHUNK)
  u16 *mixing = nullptr;         // the same
  float *fading = nullptr;       // (chunks, HEADS, 2, CHUNK): G, and the decay from a token to the chunk's last
  const u16 *halves = nullptr;   // of prompt_convolve.cu, as the next two
  const float *rate = nullptr;
  const float *decay = nullptr;
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int PITCH = HALF_KEYS + 8, ROW = CHUNK + 4, TEMPORARY = CHUNK / 2 + 4, NK = HALF_KEYS / 8;
  constexpr int LOADED = 4 * CHUNK * PITCH, INVERTED = 4 * (CHUNK * ROW + CHUNK / 2 * TEMPORARY),
                BYTES = LOADED > INVERTED ? LOADED : INVERTED;
  static_assert(THREADS == 2 * CHUNK, "a warp for 16 tokens");
  __shared__ V4 pool[BYTES / 16];  // queries and keys, then the matrix that is inverted
  __shared__ float since[CHUNK], rates[CHUNK], logs[CHUNK];
  u16 *queries = (u16 *)pool, *keys = queries + CHUNK * PITCH;
  float *matrix = (float *)pool, *temporary = matrix + CHUNK * ROW;
  const int first = blockIdx.x * CHUNK, head = blockIdx.y, key_head = GROUPED ? head / (HEADS / KEY_HEADS) : head % KEY_HEADS;
  const int count = a.state[COUNT], lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = threadIdx.x;
  if (first >= count) return;
  grid_wait();
  for (int i = mine; i < 2 * CHUNK * NK; i += THREADS) {
    const int which = i / (CHUNK * NK), t = i / NK % CHUNK, v = i % NK * 8;
    const u16 *from = a.halves + (((u64)min(first + t, count - 1) * 2 + which) * KEY_HEADS + key_head) * HALF_KEYS + v;
    copy_async((which ? keys : queries) + t * PITCH + v, from, first + t < count);
  }
  copy_commit();
  if (mine < CHUNK) {  // those behind the last token change nothing
    const u64 at = (u64)(first + mine) * HEADS + head;
    const bool there = first + mine < count;
    logs[mine] = there ? a.decay[at] : 0;
    rates[mine] = there ? a.rate[at] : 0;
  }
  copy_wait<0>();
  __syncthreads();
  if (mine < CHUNK) {
    float sum = 0;
    for (int t = 0; t <= mine; t++) sum += logs[t];
    since[mine] = sum;
  }
  float with_query[CHUNK / 8][4] = {}, with_key[CHUNK / 8][4] = {};
  for (int k = 0; k < HALF_KEYS; k += 16) {
    const int at = (warp * 16 + lane % 16) * PITCH + k + lane / 16 * 8;
    const V4 q = ldmatrix4(queries + at), r = ldmatrix4(keys + at);
    const u32 query[4] = {q.x, q.y, q.z, q.w}, key[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int n = 0; n < CHUNK / 16; n++)
      if (n <= warp) {
        const V4 b = ldmatrix4(keys + (n * 16 + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
        mma_f16(with_query[2 * n], query, b.x, b.y);
        mma_f16(with_query[2 * n + 1], query, b.z, b.w);
        mma_f16(with_key[2 * n], key, b.x, b.y);
        mma_f16(with_key[2 * n + 1], key, b.z, b.w);
      }
  }
  __syncthreads();
  const u64 own = (u64)blockIdx.x * HEADS + head;  // the whole of the matrix is written: what is merged has zeros above
#pragma unroll
  for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = warp * 16 + h * 8 + lane / 4, j = n * 8 + lane % 4 * 2;
      const float one = i >= j ? expf(since[i] - since[j]) : 0, two = i > j ? expf(since[i] - since[j + 1]) : 0;
      if (n / 2 <= warp)
        *(u32 *)(a.mixing + (own * CHUNK + i) * CHUNK + j) =
            pack(one * with_query[n][2 * h], two * with_query[n][2 * h + 1]);
      matrix[i * ROW + j] = i > j ? rates[i] * one * with_key[n][2 * h] : 0;
      matrix[i * ROW + j + 1] = i > j + 1 ? rates[i] * two * with_key[n][2 * h + 1] : 0;
    }
  if (mine < CHUNK) {
    a.fading[own * 2 * CHUNK + mine] = expf(since[mine]);
    a.fading[(own * 2 + 1) * CHUNK + mine] = expf(since[CHUNK - 1] - since[mine]);
  }
  __syncthreads();
  // (I + A)^-1: blocks of 16 on the diagonal, a thread per column, by substitution
  float x[16];
  float *block = matrix + mine / 16 * 16 * (ROW + 1);
  if (mine < CHUNK)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      x[i] = i == mine % 16;
#pragma unroll
      for (int l = 0; l < i; l++) x[i] -= block[i * ROW + l] * x[l];
    }
  __syncthreads();
  if (mine < CHUNK)
#pragma unroll
    for (int i = 0; i < 16; i++) block[i * ROW + mine % 16] = x[i];
  __syncthreads();
  // then two of `size` to one of twice that: the inverse of (B 0; C D) has -D^-1 C B^-1 in C's place
#pragma unroll
  for (int size = 16; size < CHUNK; size *= 2)
#pragma unroll
    for (int step = 0; step < 2; step++) {
      for (int u = mine; u < CHUNK / 2 * size / 4; u += THREADS) {
        const int pair = u / (size * size / 4), r = u / (size / 4) % size, c = u % (size / 4) * 4;
        const float *low = matrix + (pair * 2 + 1) * size * ROW + pair * 2 * size;
        const float *left = step ? low + size : low, *right = step ? temporary + pair * size * TEMPORARY : low - size * ROW;
        F4 sum = {0, 0, 0, 0};
        for (int l = 0; l < size; l++) {
          const float f = left[r * ROW + l];
          const F4 v = *(const F4 *)(right + l * (step ? TEMPORARY : ROW) + c);
          sum = F4{sum.x + f * v.x, sum.y + f * v.y, sum.z + f * v.z, sum.w + f * v.w};
        }
        if (step) *(F4 *)(low + r * ROW + c) = F4{-sum.x, -sum.y, -sum.z, -sum.w};
        else *(F4 *)(temporary + (pair * size + r) * TEMPORARY + c) = sum;
      }
      __syncthreads();
    }
  for (int u = mine; u < CHUNK * CHUNK / 2; u += THREADS) {
    const int i = u / (CHUNK / 2), j = u % (CHUNK / 2) * 2;
    if (j / 16 <= i / 16)
      *(u32 *)(a.solve + (own * CHUNK + i) * CHUNK + j) =
          pack(matrix[i * ROW + j] * rates[j], matrix[i * ROW + j + 1] * rates[j + 1]);
  }
}
