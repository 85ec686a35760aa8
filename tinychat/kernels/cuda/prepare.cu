// Prefill: one row of activations per block, as int8 blocks of 32 (as in decode, so both give the same logits but for the order of
// sums) where QUANTISED, as halves where FLOATING. NORMED: RMSNorm; GATED: silu(src) * up. Rows of tokens >= COUNT are skipped.

struct Args {
  u32 *xq = nullptr;  // (rows, COLS) int8
  F2 *xs = nullptr;  // (rows, COLS / 32): scale, scale times sum of the codes
  u16 *xh = nullptr;  // (rows, COLS) halves
  const float *src = nullptr;
  const int *state = nullptr;
  const float *gain = nullptr;
  const float *up = nullptr;
};

DEVICE void run(const Args &a) {
  __shared__ float red[8];
  const u64 row = blockIdx.x;
  if ((int)(row / ROWS_PER_TOKEN) >= a.state[COUNT]) return;
  grid_wait();
  const u64 from = row / ROWS_PER_TOKEN * TOKEN_STRIDE + row % ROWS_PER_TOKEN * ROW_STRIDE;
  const float *src = a.src + from, *up = GATED ? a.up + from : nullptr;
  float r = 1;
  if (NORMED) {
    float ss = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < COLS / 4; i += THREADS) { const F4 v = *(const F4 *)(src + 4 * i); ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
    ss = warp_sum(ss);
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
    __syncthreads();
    ss = 0;
    for (int i = 0; i < 8; i++) ss += red[i];
    r = rsqrt_(ss / COLS + EPS);
  }
  for (int first = 0; first < COLS / 4; first += THREADS) {
    const int i = first + threadIdx.x;
    F4 v = {0, 0, 0, 0};
    if (i < COLS / 4) {
      v = *(const F4 *)(src + 4 * i);
      if (NORMED) { const F4 g = *(const F4 *)(a.gain + 4 * i); v = F4{v.x * r * g.x, v.y * r * g.y, v.z * r * g.z, v.w * r * g.w}; }
      if (GATED) {
        const F4 u = *(const F4 *)(up + 4 * i);
        v = F4{v.x / (1.f + __expf(-v.x)) * u.x, v.y / (1.f + __expf(-v.y)) * u.y, v.z / (1.f + __expf(-v.z)) * u.z, v.w / (1.f + __expf(-v.w)) * u.w};
      }
    }
    if (FLOATING && i < COLS / 4) {
      auto h = [](float f) { return (u32)float_to_half(fminf(fmaxf(f, -65504.f), 65504.f)); };
      *(V2 *)(a.xh + row * COLS + 4 * i) = V2{h(v.x) | h(v.y) << 16, h(v.z) | h(v.w) << 16};
    }
    if (QUANTISED) {
      float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
      for (int m = 1; m < 8; m *= 2) amax = fmaxf(amax, shfl_xor(amax, m));
      const float inv = amax > 0 ? 127.f / amax : 0, d = amax / 127.f;
      const int q0 = round_int(v.x * inv), q1 = round_int(v.y * inv), q2 = round_int(v.z * inv), q3 = round_int(v.w * inv);
      int sum = q0 + q1 + q2 + q3;
      for (int m = 1; m < 8; m *= 2) sum += shfl_xor(sum, m);
      if (i < COLS / 4) {
        a.xq[row * (COLS / 4) + i] = (q0 & 255) | (q1 & 255) << 8 | (q2 & 255) << 16 | (u32)q3 << 24;
        if (i % 8 == 0) a.xs[row * (COLS / 32) + i / 8] = F2{d, d * (float)sum};
      }
    }
  }
}
