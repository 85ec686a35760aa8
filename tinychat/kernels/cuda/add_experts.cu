// Prefill: x += SCALE * sum over the chosen experts of weight * (y[pair] + bias).

struct Args {
  float *x = nullptr;
  const float *y = nullptr;        // (tokens, chosen, dim)
  const float *weights = nullptr;  // (tokens, chosen)
  const int *state = nullptr;
  const int *ids = nullptr;     // (tokens, chosen), where there is a
  const float *bias = nullptr;  // (experts, dim)
};

DEVICE void run(const Args &a) {
  grid_wait();
  const int t = blockIdx.y, i = (blockIdx.x * THREADS + threadIdx.x) * 4;
  if (t >= a.state[COUNT] || i >= DIM) return;
  F4 sum = {0, 0, 0, 0};
  if (ADD) sum = *(F4 *)(a.x + (u64)t * DIM + i);
#pragma unroll
  for (int s = 0; s < CHOSEN; s++) {
    const float w = SCALE * a.weights[t * CHOSEN + s];
    F4 v = *(const F4 *)(a.y + ((u64)t * CHOSEN + s) * DIM + i);
    if (a.bias) {
      const F4 b = *(const F4 *)(a.bias + (u64)a.ids[t * CHOSEN + s] * DIM + i);
      v = F4{v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w};
    }
    sum.x += w * v.x;
    sum.y += w * v.y;
    sum.z += w * v.z;
    sum.w += w * v.w;
  }
  *(F4 *)(a.x + (u64)t * DIM + i) = sum;
}
