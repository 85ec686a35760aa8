// Prompts of few tokens, MLA: what the parts of prompt_latent_attention.cu left, combined, as halves in the order the
// products read. A block has a head of a token.
#include "halves.cuh"
#include "key_parts.cuh"

struct Args {
  u16 *out = nullptr;            // (tokens, HEADS, padded(VALUE_DIM))
  u16 *rest = nullptr;           // (tokens, PITCH): from value REST on zeros, which no product of a head writes
  const u16 *partial = nullptr;  // (parts, tokens, HEADS, VALUE_DIM)
  const F2 *ml = nullptr;        // (parts, tokens, HEADS)
  const float *gate = nullptr;   // (tokens, HEADS), where GATED: results are multiplied by its sigmoid
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float weight[BLOCKS];
  const int count = a.state[COUNT], rows = count * HEADS, row = blockIdx.x;
  if (row >= rows) return;
  const KeyParts parts(rows, a.state[POS] + count);
  grid_wait();
  if (threadIdx.x < 32) combine_weights<BLOCKS>(weight, a.ml + row, rows, parts.active, threadIdx.x);
  __syncthreads();
  const float gate = GATED ? sigmoid(a.gate[row]) : 1;
  for (int i = threadIdx.x * 2; i < VALUE_DIM; i += THREADS * 2) {
    const u16 *from = a.partial + (u64)row * VALUE_DIM + i;
    F2 sum = {0, 0};
#pragma unroll 8
    for (int p = 0; p < parts.active; p++) {
      const u32 two = *(const u32 *)(from + (u64)p * rows * VALUE_DIM);
      sum.x += weight[p] * half_to_float(two);
      sum.y += weight[p] * half_to_float(two >> 16);
    }
    *(u32 *)(a.out + (u64)row * padded(VALUE_DIM) + place(i)) = pack(sum.x * gate, sum.y * gate);
  }
  if (row % HEADS == 0)
    for (int i = REST + threadIdx.x * 2; i < PITCH; i += THREADS * 2)
      *(u32 *)(a.rest + (u64)(row / HEADS) * PITCH + place(i)) = 0;
}
