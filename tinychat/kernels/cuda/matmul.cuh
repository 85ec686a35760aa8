// Weights times a tile of tokens on tensor cores: a block makes TILE_ROWS rows by TILE_TOKENS tokens.

// Which tokens a tile holds. Dense: TILE_TOKENS in a row. Grouped: tile -> (expert, first, count) in `tiles`, `order` lists (token, slot) pairs.
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
  constexpr int KC = QUANT ? 128 : 64, KB = K / 32, CHUNKS = (K + KC - 1) / KC, PITCH = 144, BLOCKS = KC / block_of(T), PER = TILE_ROWS * BLOCKS / THREADS;
  __shared__ V4 ws4[TILE_ROWS * PITCH / 16], xs4[TILE_TOKENS * PITCH / 16];
  __shared__ F2 wscale[QUANT ? 4 * TILE_ROWS : 1];
  __shared__ F4 xscale[QUANT ? 4 * TILE_TOKENS / 2 : 1];
  __shared__ int row_of[TILE_TOKENS];
  u8 *wt = (u8 *)ws4, *xt = (u8 *)xs4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_row = blockIdx.x * TILE_ROWS;
  if (threadIdx.x < TILE_TOKENS) row_of[threadIdx.x] = threadIdx.x < n_tokens ? rows.row(threadIdx.x) : -1;
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
  float acc[TILE_TOKENS / 8][4] = {};
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
        wscale[b * TILE_ROWS + r] = there ? F2{s0, s1} : F2{0, 0};
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
    if (QUANT) ((F2 *)xscale)[threadIdx.x % 4 * TILE_TOKENS + threadIdx.x / 4] = sv;
    __syncthreads();
    if (c + 1 < CHUNKS) fetch_chunk(c + 1);
    const u8 *wa = wt + (warp * 16 + lane / 4) * PITCH + lane % 4 * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 bytes of each row
      const u32 a[4] = {*(const u32 *)(wa + k * 32), *(const u32 *)(wa + 8 * PITCH + k * 32), *(const u32 *)(wa + k * 32 + 16), *(const u32 *)(wa + 8 * PITCH + k * 32 + 16)};
      F2 lo = {0, 0}, hi = {0, 0};
      if (QUANT) { lo = wscale[k * TILE_ROWS + warp * 16 + lane / 4]; hi = wscale[k * TILE_ROWS + warp * 16 + lane / 4 + 8]; }
#pragma unroll
      for (int n = 0; n < TILE_TOKENS / 8; n++) {
        const u8 *xb = xt + (n * 8 + lane / 4) * PITCH + k * 32 + lane % 4 * 4;
        const u32 b0 = *(const u32 *)xb, b1 = *(const u32 *)(xb + 16);
        if constexpr (!QUANT) mma_f16(acc[n], a, b0, b1);
        else {
          const F4 s = xscale[(k * TILE_TOKENS + n * 8) / 2 + lane % 4];  // scale and scaled sum of two tokens
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
  for (int n = 0; n < TILE_TOKENS / 8; n++)
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
