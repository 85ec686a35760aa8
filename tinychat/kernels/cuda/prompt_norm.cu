// Prompts: one row of RMSNorm(src), or of src, per block, as halves in the order the products read.
#include "halves.cuh"

struct Args {
  u16 *dst = nullptr;          // (tokens, padded(COLS))
  const float *src = nullptr;  // (tokens, COLS)
  const float *gain = nullptr;  // all 1 where there is none
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[WARPS];
  const u64 row = blockIdx.x;
  if ((int)row >= a.state[COUNT]) return;
  grid_wait();
  const float *src = a.src + row * COLS;
  float r = 1;
  if (NORMED) {
    float ss = 0;
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < COLS; i += THREADS * 4) {
      const F4 v = *(const F4 *)(src + i);
      ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    r = rsqrt_(warps_sum(ss, red) / COLS + EPS);
  }
  for (int i = threadIdx.x * 4; i < padded(COLS); i += THREADS * 4) {
    F4 v = {0, 0, 0, 0};
    if (i < COLS) {
      const F4 x = *(const F4 *)(src + i), g = a.gain ? *(const F4 *)(a.gain + i) : F4{1, 1, 1, 1};
      v = F4{x.x * r * g.x, x.y * r * g.y, x.z * r * g.z, x.w * r * g.w};
    }
    u16 *dst = a.dst + row * padded(COLS) + place(i);
    *(u32 *)dst = pack(v.x, v.y);
    *(u32 *)(dst + 8) = pack(v.z, v.w);
  }
}
