// Prefill: x += sum over the chosen experts of weight * y[pair].

struct Args {
  float *x = nullptr;
  const float *y = nullptr;        // (tokens, chosen, dim)
  const float *weights = nullptr;  // (tokens, chosen)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int t = blockIdx.y, i = (blockIdx.x * THREADS + threadIdx.x) * 4;
  if (t >= a.state[COUNT] || i >= DIM) return;
  F4 sum = *(F4 *)(a.x + (u64)t * DIM + i);
#pragma unroll
  for (int s = 0; s < CHOSEN; s++) {
    const float w = SCALE * a.weights[t * CHOSEN + s];
    const F4 v = *(const F4 *)(a.y + ((u64)t * CHOSEN + s) * DIM + i);
    sum.x += w * v.x;
    sum.y += w * v.y;
    sum.z += w * v.z;
    sum.w += w * v.w;
  }
  *(F4 *)(a.x + (u64)t * DIM + i) = sum;
}
