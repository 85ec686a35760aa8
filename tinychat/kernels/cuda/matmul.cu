// Prefill: weights times many tokens on tensor cores. Activations are int8 per 32 values, as in decode (so both give the same
// logits but for the order of sums), halves where the weights are floating-point. A block makes 128 rows by 64 tokens.

enum { PLAIN, NORMED, SILU };
constexpr int TOKENS = 64;  // of a tile

// Row blockIdx.x of `src` (K values from src + row / PER * STRIDE + row % PER * STEP) as int8 blocks and, or, halves.
// NORMED: RMSNorm; SILU: silu(src) * src2. Rows of tokens >= COUNT are skipped: a token has PER rows.
template <int K, int MODE, bool QUANT, bool FLOAT, int PER, int STRIDE, int STEP>
DEVICE void prepare(u32 *xq, F2 *xs, u16 *xh, const float *src, const float *src2, const float *gain, float eps, const int *state) {
  __shared__ float red[8];
  const u64 row = blockIdx.x;
  if ((int)(row / PER) >= state[COUNT]) return;
  grid_wait();
  src += row / PER * STRIDE + row % PER * STEP;
  if (MODE == SILU) src2 += row / PER * STRIDE + row % PER * STEP;
  float r = 1;
  if (MODE == NORMED) {
    float ss = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < K / 4; i += THREADS) { const F4 v = *(const F4 *)(src + 4 * i); ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
    ss = warp_sum(ss);
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = ss;
    __syncthreads();
    ss = 0;
    for (int i = 0; i < 8; i++) ss += red[i];
    r = rsqrt_(ss / K + eps);
  }
  for (int first = 0; first < K / 4; first += THREADS) {
    const int i = first + threadIdx.x;
    F4 v = {0, 0, 0, 0};
    if (i < K / 4) {
      v = *(const F4 *)(src + 4 * i);
      if (MODE == NORMED) { const F4 g = *(const F4 *)(gain + 4 * i); v = F4{v.x * r * g.x, v.y * r * g.y, v.z * r * g.z, v.w * r * g.w}; }
      if (MODE == SILU) {
        const F4 u = *(const F4 *)(src2 + 4 * i);
        v = F4{v.x / (1.f + __expf(-v.x)) * u.x, v.y / (1.f + __expf(-v.y)) * u.y, v.z / (1.f + __expf(-v.z)) * u.z, v.w / (1.f + __expf(-v.w)) * u.w};
      }
    }
    if (FLOAT && i < K / 4) {
      auto h = [](float f) { return (u32)float_to_half(fminf(fmaxf(f, -65504.f), 65504.f)); };
      *(V2 *)(xh + row * K + 4 * i) = V2{h(v.x) | h(v.y) << 16, h(v.z) | h(v.w) << 16};
    }
    if (QUANT) {
      float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
      for (int m = 1; m < 8; m *= 2) amax = fmaxf(amax, shfl_xor(amax, m));
      const float inv = amax > 0 ? 127.f / amax : 0, d = amax / 127.f;
      const int a = round_int(v.x * inv), b = round_int(v.y * inv), c = round_int(v.z * inv), e = round_int(v.w * inv);
      int sum = a + b + c + e;
      for (int m = 1; m < 8; m *= 2) sum += shfl_xor(sum, m);
      if (i < K / 4) {
        xq[row * (K / 4) + i] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)e << 24;
        if (i % 8 == 0) xs[row * (K / 32) + i / 8] = F2{d, d * (float)sum};
      }
    }
  }
}

// Which tokens a tile holds. Dense: TOKENS in a row. Grouped: tile -> (expert, first, count) in `tiles`, `order` lists (token, slot) pairs.
struct Dense {
  int count, first;
  DEVICE int row(int i) const { return first + i; }
};
struct Grouped {
  int count; const int *order; int per;  // x's row is pair / per
  DEVICE int row(int i) const { return order[i] / per; }
  DEVICE int out(int i) const { return order[i]; }
};

// y[token][row] for a tile: put(token's index in the tile, row, value). X's row r starts at value r * pitch + offset.
template <int T, int K, int ROWS, class Rows, class Put>
DEVICE void matmul(const u8 *w, u64 blocks, u64 first_row, const u32 *xq, const F2 *xs, const u16 *xh, int pitch, int offset, const Rows &rows, int n_tokens, const Put &put) {
  constexpr bool QUANT = !is_float(T);
  constexpr int KC = QUANT ? 128 : 64, KB = K / 32, CHUNKS = (K + KC - 1) / KC, PITCH = 144, BLOCKS = KC / block_of(T), PER = 128 * BLOCKS / THREADS;
  __shared__ V4 ws4[128 * PITCH / 16], xs4[TOKENS * PITCH / 16];
  __shared__ F2 wscale[QUANT ? 4 * 128 : 1];
  __shared__ F4 xscale[QUANT ? 4 * TOKENS / 2 : 1];
  __shared__ int row_of[TOKENS];
  u8 *wt = (u8 *)ws4, *xt = (u8 *)xs4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_row = blockIdx.x * 128;
  if (threadIdx.x < TOKENS) row_of[threadIdx.x] = threadIdx.x < n_tokens ? rows.row(threadIdx.x) : -1;
  __syncthreads();
  Block<T> f[PER];
  V4 xv[2];
  F2 sv;
  // Chunk c of the weights (PER blocks a thread) and of the activations (64 rows of 128 bytes; 4 scales each) into registers.
  auto fetch_chunk = [&](int c) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
      const int i = threadIdx.x + p * THREADS, r = min(tile_row + i / BLOCKS, ROWS - 1), b = c * BLOCKS + i % BLOCKS;
      if (b < K / block_of(T)) fetch<T>(f[p], w, blocks, (first_row + r) * (K / block_of(T)) + b);
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int i = threadIdx.x + p * THREADS, t = i / 8, col = c * KC * (QUANT ? 1 : 2) + i % 8 * 16, row = row_of[t];
      xv[p] = V4{0, 0, 0, 0};
      if (row >= 0 && col < K * (QUANT ? 1 : 2)) xv[p] = *(const V4 *)((QUANT ? (const u8 *)xq : (const u8 *)xh) + ((u64)row * pitch + offset) * (QUANT ? 1 : 2) + col);
    }
    if (QUANT) {
      const int t = threadIdx.x / 4, b = c * 4 + threadIdx.x % 4, row = row_of[t];
      sv = row >= 0 && b < KB ? xs[((u64)row * pitch + offset) / 32 + b] : F2{0, 0};
    }
  };
  float acc[TOKENS / 8][4] = {};
  fetch_chunk(0);
  for (int c = 0; c < CHUNKS; c++) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PER; p++) {
      const int i = threadIdx.x + p * THREADS, r = i / BLOCKS, b = i % BLOCKS;
      const bool there = c * BLOCKS + b < K / block_of(T);
      if constexpr (QUANT) {
        const u32 lo[8] = {f[p].a.x, f[p].a.y, f[p].a.z, f[p].a.w, T == Q8_0 ? f[p].b.x : f[p].a.x, T == Q8_0 ? f[p].b.y : f[p].a.y, T == Q8_0 ? f[p].b.z : f[p].a.z, T == Q8_0 ? f[p].b.w : f[p].a.w};
        u32 q[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
          q[k] = codes<T>(lo[k], f[p].h0, f[p].h1, k);
          if (offset_of(T)) q[k] = ((q[k] | 0x80808080u) - offset_of(T) * 0x01010101u) ^ 0x80808080u;  // bytes minus the offset
          if (!there) q[k] = 0;
        }
        *(V4 *)(wt + r * PITCH + b * 32) = V4{q[0], q[1], q[2], q[3]};
        *(V4 *)(wt + r * PITCH + b * 32 + 16) = V4{q[4], q[5], q[6], q[7]};
        const float s0 = scale_of<T>(f[p].s1, f[p].s2, 0), s1 = T == Q6_K ? scale_of<T>(f[p].s1, f[p].s2, 1) : has_min(T) ? shift_of<T>(f[p].s1, f[p].s2) : 0;
        wscale[b * 128 + r] = there ? F2{s0, s1} : F2{0, 0};
      } else {
        float v[8];
        floats<T>(f[p], v);
        u32 h[4];
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = there ? (u32)float_to_half(v[2 * k]) | (u32)float_to_half(v[2 * k + 1]) << 16 : 0;
        *(V4 *)(wt + r * PITCH + b * 16) = V4{h[0], h[1], h[2], h[3]};
      }
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int i = threadIdx.x + p * THREADS;
      *(V4 *)(xt + i / 8 * PITCH + i % 8 * 16) = xv[p];
    }
    if (QUANT) ((F2 *)xscale)[threadIdx.x % 4 * TOKENS + threadIdx.x / 4] = sv;
    __syncthreads();
    if (c + 1 < CHUNKS) fetch_chunk(c + 1);
    const u8 *wa = wt + (warp * 16 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of each row
      const u32 a[4] = {*(const u32 *)(wa + k * 32), *(const u32 *)(wa + 8 * PITCH + k * 32), *(const u32 *)(wa + k * 32 + 16), *(const u32 *)(wa + 8 * PITCH + k * 32 + 16)};
      F2 lo = {0, 0}, hi = {0, 0};
      if (QUANT) { lo = wscale[k * 128 + warp * 16 + lane / 4]; hi = wscale[k * 128 + warp * 16 + lane / 4 + 8]; }
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
        const u8 *xb = xt + (n * 8 + lane / 4) * PITCH + k * 32 + lane % 4 * 4;
        const u32 b0 = *(const u32 *)xb, b1 = *(const u32 *)(xb + 16);
        if constexpr (!QUANT) mma_f16(acc[n], a, b0, b1);
        else {
          const F4 s = xscale[(k * TOKENS + n * 8) / 2 + lane % 4];  // scale and scaled sum of two tokens
          if (T == Q6_K) {
            int d[4] = {}, e[4] = {};
            mma_s8_k16(d, a[0], a[1], b0);
            mma_s8_k16(e, a[2], a[3], b1);
            acc[n][0] += s.x * (lo.x * (float)d[0] + lo.y * (float)e[0]);
            acc[n][1] += s.z * (lo.x * (float)d[1] + lo.y * (float)e[1]);
            acc[n][2] += s.x * (hi.x * (float)d[2] + hi.y * (float)e[2]);
            acc[n][3] += s.z * (hi.x * (float)d[3] + hi.y * (float)e[3]);
          } else {
            int d[4] = {};
            mma_s8_k32(d, a, b0, b1);
            acc[n][0] += lo.x * (s.x * (float)d[0]);
            acc[n][1] += lo.x * (s.z * (float)d[1]);
            acc[n][2] += hi.x * (s.x * (float)d[2]);
            acc[n][3] += hi.x * (s.z * (float)d[3]);
            if (has_min(T)) { acc[n][0] += lo.y * s.y; acc[n][1] += lo.y * s.w; acc[n][2] += hi.y * s.y; acc[n][3] += hi.y * s.w; }
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = tile_row + warp * 16 + lane / 4 + i / 2 * 8, t = n * 8 + lane % 4 * 2 + i % 2;
      if (row < ROWS && t < n_tokens) put(t, row, acc[n][i]);
    }
}

// Where results go: element (token t, row r) of a tile.
struct Out { float *dst; u64 pitch; const float *bias; DEVICE void operator()(int t, int r, float v) const { dst[t * pitch + r] = bias ? v + bias[r] : v; } };
struct AddOut { float *dst; u64 pitch; const float *bias; DEVICE void operator()(int t, int r, float v) const { dst[t * pitch + r] += bias ? v + bias[r] : v; } };
struct HalfOut { u16 *dst; u64 pitch; float scale; DEVICE void operator()(int t, int r, float v) const { dst[t * pitch + r] = float_to_half(v * scale); } };
struct PairOut { float *dst; const int *order; u64 pitch; DEVICE void operator()(int t, int r, float v) const { dst[order[t] * pitch + r] = v; } };

// Router logits and choice for up to 4 tokens per block: float32 all through.
template <int T, int K, int E, int TOP_K, class Choose>
DEVICE void router(int *ids, float *weights, const u8 *w, u64 blocks, const float *x, const float *gain, const float *router_bias, float eps, const int *state, const Choose &choose) {
  constexpr int NT = K <= 2560 ? 4 : K <= 5120 ? 2 : 1;
  __shared__ F4 xn4[NT * K / 4];
  __shared__ float logits[NT][E], my_weights[NT][TOP_K], red[8];
  __shared__ int my_ids[NT][TOP_K];
  float *xn = (float *)xn4;
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * NT, count = state[COUNT];
  if (first >= count) return;
  for (int t = 0; t < NT; t++) {
    const float *src = x + (u64)min(first + t, count - 1) * K;
    float ss = 0;
    for (int i = threadIdx.x; i < K; i += THREADS) ss += src[i] * src[i];
    ss = warp_sum(ss);
    __syncthreads();
    if (lane == 0) red[warp] = ss;
    __syncthreads();
    ss = 0;
    for (int i = 0; i < 8; i++) ss += red[i];
    const float r = rsqrt_(ss / K + eps);
    for (int i = threadIdx.x; i < K; i += THREADS) xn[t * K + i] = src[i] * r * gain[i];
  }
  __syncthreads();
  for (int e = warp; e < E; e += 8) {
    float acc[NT] = {};
#pragma unroll 4
    for (int j = lane; j < K / 8; j += 32) {
      Block<T> f;
      fetch<T>(f, w, blocks, (u64)e * (K / 8) + j);
#pragma unroll
      for (int t = 0; t < NT; t++) acc[t] += dot<T>(f, xn + t * K + j * 8);
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const float v = warp_sum(acc[t]);
      if (lane == 0) logits[t][e] = router_bias ? v + router_bias[e] : v;
    }
  }
  __syncthreads();
  if (warp < NT && first + warp < count) {
    choose(logits[warp], my_ids[warp], my_weights[warp]);
    if (lane < TOP_K) { ids[(first + warp) * TOP_K + lane] = my_ids[warp][lane]; weights[(first + warp) * TOP_K + lane] = my_weights[warp][lane]; }
  }
}

// Sorts (token, slot) pairs by expert, one block: order (pairs by expert) and tiles (expert, first, count) of up to TOKENS; tiles[0] is their number.
template <int E, int TOP_K> DEVICE void group_pairs(int *order, int *tiles, const int *ids, const int *state) {
  __shared__ int count[E], at[E];
  grid_wait();
  const int pairs = state[COUNT] * TOP_K;
  for (int e = threadIdx.x; e < E; e += THREADS) count[e] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += THREADS) atomicAdd(&count[ids[p]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0, n = 0;
    for (int e = 0; e < E; e++) {
      at[e] = sum;
      for (int i = 0; i < count[e]; i += TOKENS, n++) {
        tiles[1 + 3 * n] = e;
        tiles[2 + 3 * n] = sum + i;
        tiles[3 + 3 * n] = min(TOKENS, count[e] - i);
      }
      sum += count[e];
    }
    tiles[0] = n;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += THREADS) order[atomicAdd(&at[ids[p]], 1)] = p;
}

// x += sum over the chosen experts of weight * y[pair].
template <int DIM, int TOP_K> DEVICE void add_experts(float *x, const float *y, const float *weights, const int *state) {
  grid_wait();
  const int t = blockIdx.y, i = (blockIdx.x * THREADS + threadIdx.x) * 4;
  if (t >= state[COUNT] || i >= DIM) return;
  F4 sum = *(F4 *)(x + (u64)t * DIM + i);
#pragma unroll
  for (int s = 0; s < TOP_K; s++) {
    const float w = weights[t * TOP_K + s];
    const F4 v = *(const F4 *)(y + ((u64)t * TOP_K + s) * DIM + i);
    sum.x += w * v.x; sum.y += w * v.y; sum.z += w * v.z; sum.w += w * v.w;
  }
  *(F4 *)(x + (u64)t * DIM + i) = sum;
}
