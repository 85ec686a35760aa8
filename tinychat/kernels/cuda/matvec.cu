// Weights times the activations of one token: every linear op of a decode step. LPR lanes share a row, R rows
// per lane are in flight, DEPTH blocks of each. The first loads go out before grid_wait(), so they overlap the kernel before.
// Activations are normed (if asked) and quantised to int8 per 32 values by every block for itself: cheaper than another launch.

#define WARPS (THREADS / 32)

struct Shared { V4 *q; Scale *s; float *f, *red; };  // int8 codes (two planes of K / 32), their scales; floats; reductions

DEVICE F4 load4(const float *p) { return *(const F4 *)p; }
struct Plain {  // activations from a buffer
  const float *src;
  DEVICE F4 operator()(int i) const { return load4(src + i); }
  DEVICE void prepare() const {}
};
struct Quantised { const V4 *q; const Scale *s; DEVICE void prepare() const {} };  // already as `Shared` holds them

// Attention's partial results, not yet combined: o (SPLITS, heads, VD) halves and ml (SPLITS, heads): maximum (log2), sum.
template <int SPLITS, int HEADS, int VD> struct Combined {
  const u16 *o; const F2 *ml; float *weight; const int *state; int min_keys, head, active;
  DEVICE void prepare() {  // weight[s] of head `head`
    const int keys = state[POS] + 1, lane = threadIdx.x % 32;
    const int per = ((keys + SPLITS - 1) / SPLITS + min_keys - 1) / min_keys * min_keys;
    active = (keys + per - 1) / per;
    if (threadIdx.x < 32) combine_weights<SPLITS>(weight, ml + head, HEADS, active, lane);
    __syncthreads();
  }
  DEVICE F4 operator()(int i) const {
    F4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = 0; s < active; s++) {
      const V2 v = *(const V2 *)(o + ((u64)s * HEADS + head) * VD + i);
      const float w = weight[s];
      sum.x += w * half_to_float(v.x); sum.y += w * half_to_float(v.x >> 16); sum.z += w * half_to_float(v.y); sum.w += w * half_to_float(v.y >> 16);
    }
    return sum;
  }
};

// K activations of one token into shared memory, as int8 blocks if QUANT and as floats if FLOAT. NORM: times the gain only; what
// the rest of RMSNorm multiplies by, norm() gives after finish(), so that nothing waits for the sum of squares.
template <int K, bool NORM, bool QUANT, bool FLOAT> struct Stage {
  static constexpr int N = K / 4, V = (N + THREADS - 1) / THREADS, B = 8;
  F4 gain[NORM ? V : 1], x[NORM ? V : 1];
  DEVICE void prefetch(const float *g) {
    if (NORM)
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int at = threadIdx.x + i * THREADS;
        if (at < N) { V4 v = ldc16(g + 4 * at); gain[i] = F4{unbits(v.x), unbits(v.y), unbits(v.z), unbits(v.w)}; }
      }
  }
  template <class Load> DEVICE void load(const Load &src) {
    if constexpr (NORM)
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int at = threadIdx.x + i * THREADS;
        x[i] = at < N ? src(4 * at) : F4{0, 0, 0, 0};
      }
  }
  DEVICE float norm(float eps, const Shared &sh) const {
    if (!NORM) return 1;
    float ss = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) ss += sh.red[i];
    return rsqrt_(ss / K + eps);
  }
  DEVICE void finish(const Quantised &src, const Shared &sh) {
    constexpr int Q = K / 16, S = K / 32, VQ = (Q + THREADS - 1) / THREADS, VS = (S + THREADS - 1) / THREADS;
    V4 q[VQ];
    Scale s[VS];
#pragma unroll
    for (int i = 0; i < VQ; i++) if (threadIdx.x + i * THREADS < Q) q[i] = src.q[threadIdx.x + i * THREADS];
#pragma unroll
    for (int i = 0; i < VS; i++) if (threadIdx.x + i * THREADS < S) s[i] = src.s[threadIdx.x + i * THREADS];
#pragma unroll
    for (int i = 0; i < VQ; i++) if (threadIdx.x + i * THREADS < Q) sh.q[threadIdx.x + i * THREADS] = q[i];
#pragma unroll
    for (int i = 0; i < VS; i++) if (threadIdx.x + i * THREADS < S) sh.s[threadIdx.x + i * THREADS] = s[i];
    __syncthreads();
  }
  template <class Load> DEVICE void finish(const Load &src, const Shared &sh) {
    F4 loaded[NORM ? 1 : B];
    float ss = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int at = threadIdx.x + i * THREADS;
      if (!NORM && (QUANT || FLOAT) && i % B == 0)  // several loads before the first use
#pragma unroll
        for (int j = i; j < i + B && j < V; j++) loaded[j % B] = threadIdx.x + j * THREADS < N ? src(4 * (threadIdx.x + j * THREADS)) : F4{0, 0, 0, 0};
      F4 v;
      if (NORM) {
        ss += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
        v = F4{x[i].x * gain[i].x, x[i].y * gain[i].y, x[i].z * gain[i].z, x[i].w * gain[i].w};
      } else v = loaded[i % B];
      if (FLOAT && at < N) *(F4 *)(sh.f + 4 * at) = v;
      if (QUANT) {
        float amax = at < N ? fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))) : 0;
        amax = fmaxf(amax, shfl_xor(amax, 1));
        amax = fmaxf(amax, shfl_xor(amax, 2));
        amax = fmaxf(amax, shfl_xor(amax, 4));
        const float inv = amax > 0 ? 127.f / amax : 0;
        const int a = round_int(v.x * inv), b = round_int(v.y * inv), c = round_int(v.z * inv), d = round_int(v.w * inv);
        int sum = at < N ? a + b + c + d : 0;
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        const int other = shfl_xor(sum, 4), w = at & 7, block = at >> 3;
        if (at < N) {
          ((u32 *)sh.q)[((w >> 2) * (K / 32) + block) * 4 + (w & 3)] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)d << 24;
          if (w == 0) sh.s[block] = Scale{amax / 127.f, (sum & 0xFFFF) | other << 16};
        }
      }
    }
    if (NORM) {
      ss = warp_sum(ss);
      if (threadIdx.x % 32 == 0) sh.red[threadIdx.x / 32] = ss;
    }
    __syncthreads();
  }
};

// R * 32 / LPR rows of one warp (KS warps share them, each every KS-th stretch of 32 blocks), DEPTH blocks per row in flight.
template <int T, int K, int LPR, int KS, int R, int DEPTH> struct Dot {
  static constexpr int KB = K / block_of(T), STEP = LPR * KS, NI = (KB + STEP - 1) / STEP, G = 32 / LPR, D = DEPTH < NI ? DEPTH : NI;
  Block<T> f[D][R];
  float acc[R];
  const u8 *w; u64 blocks; u64 row[R];
  static DEVICE int lane() { return threadIdx.x % LPR + (threadIdx.x / 32) % KS * LPR; }
  DEVICE void point(const u8 *weights, u64 total_blocks) { w = weights; blocks = total_blocks; }
  DEVICE void issue(int i) {
    const int j = i * STEP + lane();
    if (KB % STEP == 0 || j < KB)
#pragma unroll
      for (int r = 0; r < R; r++) fetch<T>(f[i % D][r], w, blocks, row[r] * KB + j);
  }
  DEVICE void prefetch() {
#pragma unroll
    for (int r = 0; r < R; r++) acc[r] = 0;
#pragma unroll
    for (int i = 0; i < D; i++) issue(i);
  }
  DEVICE void use(int i, const Shared &sh, int first) {
    const int j = i * STEP + lane();
    if (KB % STEP == 0 || j < KB) {
      if constexpr (is_float(T)) {
#pragma unroll
        for (int r = 0; r < R; r++) acc[r] += dot<T>(f[i % D][r], sh.f + first + j * 8);
      } else {
        const V4 x0 = sh.q[first / 32 + j], x1 = sh.q[first / 32 + j + plane];
        const Scale s = sh.s[first / 32 + j];
#pragma unroll
        for (int r = 0; r < R; r++) acc[r] += dot<T>(f[i % D][r], x0, x1, s);
      }
    }
  }
  int plane;  // blocks of the whole staged vector: where its second plane starts
  DEVICE void run(const Shared &sh, int staged_blocks, int first = 0) {  // from staged value `first` on
    plane = staged_blocks;
#pragma unroll
    for (int i = 0; i < NI; i++) { use(i, sh, first); if (i + D < NI) issue(i + D); }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int m = LPR / 2; m; m >>= 1) acc[r] += shfl_xor(acc[r], m);
  }
  DEVICE void across_warps(float *red) {  // sums what the KS warps of a row have
    if (KS > 1) {
#pragma unroll
      for (int r = 0; r < R; r++)
        if (threadIdx.x % 32 == 0) red[threadIdx.x / 32 * R + r] = acc[r];
      __syncthreads();
#pragma unroll
      for (int r = 0; r < R; r++) {
        acc[r] = 0;
        for (int i = 0; i < KS; i++) acc[r] += red[(threadIdx.x / 32 / KS * KS + i) * R + r];
      }
    }
  }
};

DEVICE float silu(float v) { return v / (1.f + __expf(-v)); }
// Where results go; finish() is called by all threads once, with the block's first row.
struct Put { float *dst; const float *bias; DEVICE void operator()(int row, float v) const { dst[row] = bias ? v + bias[row] : v; } DEVICE void finish(int) const {} };
struct PutHalf { u16 *dst; float scale; DEVICE void operator()(int row, float v) const { dst[row] = float_to_half(v * scale); } DEVICE void finish(int) const {} };  // queries
struct Add { float *dst; const float *bias; DEVICE void operator()(int row, float v) const { dst[row] += bias ? v + bias[row] : v; } DEVICE void finish(int) const {} };
// As int8 blocks for the next kernel (`Quantised`): a thread block makes exactly 32 rows, one block of the `blocks` there; `first` is that of row 0.
struct PutQuantised {
  float *values; u32 *q; Scale *s; int blocks, first;
  DEVICE void operator()(int row, float v) const { values[row % 32] = v; }
  DEVICE void finish(int row) const {
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, at = first + row / 32;
    const float v = values[lane], amax = warp_max(fabsf(v));
    const int code = round_int(amax > 0 ? v * (127.f / amax) : 0);
    int word = (code & 255) << lane % 4 * 8;
    word |= shfl_xor(word, 1);
    word |= shfl_xor(word, 2);
    if (lane % 4 == 0) q[((lane >> 4) * blocks + at) * 4 + (lane / 4 & 3)] = (u32)word;
    int sum = code;
    for (int m = 1; m < 16; m *= 2) sum += shfl_xor(sum, m);
    const int other = shfl_xor(sum, 16);
    if (lane == 0) s[at] = Scale{amax / 127.f, (sum & 0xFFFF) | other << 16};
  }
};

// Rows first..first+ROWS of a matrix; block b of them does the b-th WARPS / KS * R * 32 / LPR.
template <int T, int K, int ROWS, int LPR, int KS, int R, int DEPTH, bool NORM, bool QUANT, bool FLOAT, class Load, class Epilogue>
DEVICE void linear(const u8 *w, u64 blocks, u64 first, int b, Load src, const float *gain, float eps, Shared sh, const Epilogue &put) {
  Dot<T, K, LPR, KS, R, DEPTH> dot;
  constexpr int G = 32 / LPR;
  const int unit = (b * (WARPS / KS) + threadIdx.x / 32 / KS) * R * G + threadIdx.x % 32 / LPR;
#pragma unroll
  for (int r = 0; r < R; r++) { const int row = unit + r * G; dot.row[r] = first + (row < ROWS ? row : ROWS - 1); }
  dot.point(w, blocks);
  dot.prefetch();
  Stage<K, NORM, QUANT, FLOAT> stage;
  stage.prefetch(gain);
  grid_wait();
  src.prepare();
  stage.load(src);
  stage.finish(src, sh);
  const float norm = stage.norm(eps, sh);
  dot.run(sh, K / 32);
  dot.across_warps(sh.red + 32);
  if (threadIdx.x % LPR == 0 && threadIdx.x / 32 % KS == 0)
#pragma unroll
    for (int r = 0; r < R; r++)
      if (unit + r * G < ROWS) put(unit + r * G, dot.acc[r] * norm);
  put.finish(b * (WARPS / KS) * R * G);
}

// The same for silu(gate) * up.
template <int TG, int TU, int K, int ROWS, int LPR, int R, int DEPTH, bool LATE, bool QUANT, bool FLOAT, class Epilogue>
DEVICE void gated(const u8 *wg, u64 gate_blocks, u64 gate_first, const u8 *wu, u64 up_blocks, u64 up_first, int b, Stage<K, true, QUANT, FLOAT> &stage,
                  const float *src, float eps, Shared sh, const Epilogue &put) {
  Dot<TG, K, LPR, 1, R, DEPTH> gate;
  Dot<TU, K, LPR, 1, R, DEPTH> up;
  constexpr int G = 32 / LPR;
  const int unit = (b * WARPS + threadIdx.x / 32) * R * G + threadIdx.x % 32 / LPR;
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int row = unit + r * G < ROWS ? unit + r * G : ROWS - 1;
    gate.row[r] = gate_first + row;
    up.row[r] = up_first + row;
  }
  gate.point(wg, gate_blocks);
  up.point(wu, up_blocks);
  gate.prefetch();
  up.prefetch();
  if (!LATE) {  // weights known beforehand: the step's input comes after them
    grid_wait();
    stage.load(Plain{src});
  }
  stage.finish(Plain{src}, sh);
  const float norm = stage.norm(eps, sh);
  gate.run(sh, K / 32);
  up.run(sh, K / 32);
  if (threadIdx.x % LPR == 0)
#pragma unroll
    for (int r = 0; r < R; r++)
      if (unit + r * G < ROWS) put(unit + r * G, silu(gate.acc[r] * norm) * (up.acc[r] * norm));
  put.finish(b * WARPS * R * G);
}

// Top-k choice of experts from router logits by one warp, into ids and weights (TOP_K each, in shared memory). See kernels/ops.py, Route.
enum { SOFTMAX, SIGMOID, SOFTMAX_WEIGHT, SQRT_SOFTPLUS };
template <int E, int TOP_K, int GATING, bool NORMALIZE, int GROUPS, int USED>
DEVICE void choose(const float *logits, const float *bias, float scale, int *ids, float *weights) {
  constexpr int N = (E + 31) / 32;
  const int lane = threadIdx.x % 32;
  float p[N], score[N];
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int e = lane + 32 * i;
    p[i] = e < E ? *(const volatile float *)(logits + e) : -INFINITY;  // volatile: past the first-level cache
    top = fmaxf(top, p[i]);
  }
  if (GATING == SOFTMAX) {
    top = warp_max(top);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) { p[i] = lane + 32 * i < E ? expf(p[i] - top) : 0; sum += p[i]; }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; i++) p[i] /= sum;
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int e = lane + 32 * i;
    if (GATING == SIGMOID) p[i] = 1.f / (1.f + expf(-p[i]));
    if (GATING == SQRT_SOFTPLUS) p[i] = sqrtf(p[i] > 20 ? p[i] : log1pf(expf(p[i])));
    score[i] = e < E ? p[i] + (bias ? bias[e] : 0) : -INFINITY;
  }
  if (GROUPS > 1) {  // only the best groups stay
    constexpr int PER = E / GROUPS;
    float group = -INFINITY;  // of group `lane`
    for (int g = 0; g < GROUPS; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (int j = 0; j < PER; j++) {
        const int e = g * PER + j;
        float mine = 0;
#pragma unroll
        for (int i = 0; i < N; i++) mine = e / 32 == i ? score[i] : mine;
        const float v = shfl(mine, e % 32);
        second = fmaxf(second, fminf(first, v));
        first = fmaxf(first, v);
      }
      if (lane == g) group = PER > 1 ? first + second : first;
    }
    int rank = 0;
    for (int g = 0; g < GROUPS; g++) { const float v = shfl(group, g); rank += v > group || (v == group && g < lane); }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int e = lane + 32 * i, r = shfl(rank, e < E ? e / PER : 0);
      if (e < E && r >= USED) score[i] = -INFINITY;
    }
  }
  if (lane < TOP_K) { ids[lane] = lane; weights[lane] = 0; }  // what stays where logits are not numbers
  warp_sync();
  u32 key[N];  // sorts as the score does; 0: not to be chosen
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = lane + 32 * i < E ? key_of(score[i]) : 0;
  for (int k = 0; k < TOP_K; k++) {
    u32 best = 0, id = ~0u;
#pragma unroll
    for (int i = N - 1; i >= 0; i--)
      if (key[i] >= best) { best = key[i]; id = lane + 32 * i; }
    const u32 most = warp_most(best);
    id = warp_least(best == most ? id : ~0u);
    if (most == 0) break;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (id == lane + 32 * i) { ids[k] = id; weights[k] = p[i]; key[i] = 0; }
  }
  warp_sync();
  float w = lane < TOP_K ? weights[lane] : 0;
  if (GATING == SOFTMAX_WEIGHT) {
    const float most = warp_max(lane < TOP_K ? w : -INFINITY), e = lane < TOP_K ? expf(w - most) : 0;
    w = e / warp_sum(e);
  } else if (NORMALIZE) w /= fmaxf(warp_sum(w), 6.103515625e-5f);
  warp_sync();
  if (lane < TOP_K) weights[lane] = w * scale;
  warp_sync();
}

// Sum over the chosen experts of weight * (down[e] @ part e) for the row of this warp, added to `acc`.
template <int T, int FF, int ROWS, int TOP_K> struct Experts {
  static constexpr int KB = FF / block_of(T), ALL = KB * TOP_K, NI = (ALL + 31) / 32, D = NI < 8 ? NI : 8;
  Block<T> f[D];
  DEVICE void issue(const u8 *w, u64 blocks, const int *ids, int row, int i) {
    const int j = i * 32 + threadIdx.x % 32;
    if (j < ALL) fetch<T>(f[i % D], w, blocks, ((u64)ids[j / KB] * ROWS + row) * KB + j % KB);
  }
  DEVICE void prefetch(const u8 *w, u64 blocks, const int *ids, int row) {
#pragma unroll
    for (int i = 0; i < D; i++) issue(w, blocks, ids, row, i);
  }
  DEVICE float run(const u8 *w, u64 blocks, const int *ids, const float *weights, int row, const Shared &sh, int staged_blocks) {
    float acc = 0;
#pragma unroll
    for (int i = 0; i < NI; i++) {
      const int j = i * 32 + threadIdx.x % 32;
      if (j < ALL) {
        if constexpr (is_float(T)) acc += weights[j / KB] * dot<T>(f[i % D], sh.f + j * 8);
        else acc += weights[j / KB] * dot<T>(f[i % D], sh.q[j], sh.q[j + staged_blocks], sh.s[j]);
      }
      if (i + D < NI) issue(w, blocks, ids, row, i + D);
    }
    return acc;
  }
};
