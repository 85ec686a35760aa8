// Weights times the activations of one token: what all mat-vec kernels of a decode step share. LANES lanes and SPLIT
// warps share a row, ROWS_PER_LANE rows per lane are in flight, DEPTH blocks of each (struct Spread, from Python). The
// first loads of weights go out before grid_wait(), so they overlap the kernel before. Every block stages the
// activations for itself, in int8 per 32 values: cheaper than another launch.

constexpr int WARPS = THREADS / 32;

struct Shared {
  V4 *q;
  Scale *s;
  float *f, *red;
};  // int8 codes (two planes of K / 32), their scales; floats; reductions

DEVICE F4 load4(const float *p) { return *(const F4 *)p; }
struct Plain {  // activations from a buffer
  const float *src;
  DEVICE F4 operator()(int i) const { return load4(src + i); }
  DEVICE void prepare() const {}
};
struct Quantised {
  const V4 *q;
  const Scale *s;
  DEVICE void prepare() const {}
};  // already as `Shared` holds them

// The block's shared memory for activations of K values. Floats are read at `direct` where they need no staging.
template <int K, bool QUANT, bool STAGE_FLOATS> DEVICE Shared staging(const float *direct) {
  __shared__ V4 q[QUANT ? K / 16 : 1];
  __shared__ Scale s[QUANT ? K / 32 : 1];
  __shared__ F4 f[STAGE_FLOATS ? K / 4 : 1];
  __shared__ float red[96];
  return Shared{q, s, STAGE_FLOATS ? (float *)f : (float *)direct, red};
}

// K activations of one token into shared memory, as int8 blocks if QUANT and as floats if FLOAT. NORM: times the gain
// only; what the rest of RMSNorm multiplies by, norm() gives after finish(), so that nothing waits for the sum of
// squares.
template <int K, bool NORM, bool QUANT, bool FLOAT> struct Stage {
  static constexpr int N = K / 4, V = (N + THREADS - 1) / THREADS, B = 8;
  F4 gain[NORM ? V : 1], x[NORM ? V : 1];
  DEVICE void prefetch(const float *g) {
    if (NORM)
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int at = threadIdx.x + i * THREADS;
        if (at < N) {
          V4 v = ldc16(g + 4 * at);
          gain[i] = F4{unbits(v.x), unbits(v.y), unbits(v.z), unbits(v.w)};
        }
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
    for (int i = 0; i < VQ; i++)
      if (threadIdx.x + i * THREADS < Q) q[i] = src.q[threadIdx.x + i * THREADS];
#pragma unroll
    for (int i = 0; i < VS; i++)
      if (threadIdx.x + i * THREADS < S) s[i] = src.s[threadIdx.x + i * THREADS];
#pragma unroll
    for (int i = 0; i < VQ; i++)
      if (threadIdx.x + i * THREADS < Q) sh.q[threadIdx.x + i * THREADS] = q[i];
#pragma unroll
    for (int i = 0; i < VS; i++)
      if (threadIdx.x + i * THREADS < S) sh.s[threadIdx.x + i * THREADS] = s[i];
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
        for (int j = i; j < i + B && j < V; j++)
          loaded[j % B] = threadIdx.x + j * THREADS < N ? src(4 * (threadIdx.x + j * THREADS)) : F4{0, 0, 0, 0};
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
        const int a = round_int(v.x * inv), b = round_int(v.y * inv), c = round_int(v.z * inv),
                  d = round_int(v.w * inv);
        int sum = at < N ? a + b + c + d : 0;
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        const int other = shfl_xor(sum, 4), w = at & 7, block = at >> 3;
        if (at < N) {
          ((u32 *)sh.q)[((w >> 2) * (K / 32) + block) * 4 + (w & 3)] =
              (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)d << 24;
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

// R * 32 / LPR rows of one warp (KS warps share them, each every KS-th stretch of 32 blocks), DEPTH blocks per row in
// flight.
template <int T, int K, int LPR, int KS, int R, int DEPTH> struct Dot {
  static constexpr int KB = K / block_of(T), STEP = LPR * KS, NI = (KB + STEP - 1) / STEP, G = 32 / LPR,
                       D = DEPTH < NI ? DEPTH : NI;
  Block<T> f[D][R];
  float acc[R];
  const u8 *w;
  u64 blocks;
  u64 row[R];
  static DEVICE int lane() { return threadIdx.x % LPR + (threadIdx.x / 32) % KS * LPR; }
  DEVICE void point(const u8 *weights, u64 total_blocks) {
    w = weights;
    blocks = total_blocks;
  }
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
    for (int i = 0; i < NI; i++) {
      use(i, sh, first);
      if (i + D < NI) issue(i + D);
    }
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

// Where results go; finish() is called by all threads once, with the block's first row.
struct Put {
  float *dst;
  const float *bias;
  float scale = 1, softcap = 0;
  DEVICE void operator()(int row, float v) const {
    const float y = scale * (bias ? v + bias[row] : v);
    dst[row] = softcap == 0 ? y : softcap * tanhf(y / softcap);
  }
  DEVICE void finish(int) const {}
};
struct Add {
  float *dst;
  const float *bias;
  float scale = 1;
  DEVICE void operator()(int row, float v) const { dst[row] += scale * (bias ? v + bias[row] : v); }
  DEVICE void finish(int) const {}
};
struct PutHalf {  // queries
  u16 *dst;
  float scale;
  DEVICE void operator()(int row, float v) const { dst[row] = float_to_half(v * scale); }
  DEVICE void finish(int) const {}
};
// By one warp: its lanes' values as int8 block `at` of the `blocks` there.
DEVICE void put_block(float v, u32 *q, Scale *s, int blocks, int at) {
  const int lane = threadIdx.x % 32;
  const float amax = warp_max(fabsf(v));
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
// As int8 blocks for the next kernel (`Quantised`): a thread block makes exactly 32 rows, one block of the `blocks`
// there; `first` is that of row 0.
struct PutQuantised {
  float *values;
  u32 *q;
  Scale *s;
  int blocks, first;
  DEVICE void operator()(int row, float v) const { values[row % 32] = v; }
  DEVICE void finish(int row) const {
    __syncthreads();
    if (threadIdx.x < 32) put_block(values[threadIdx.x], q, s, blocks, first + row / 32);
  }
};

// By block b of those of one matrix: put(row, value) for each of its rows in W's matrix g. LOAD gives the activations,
// of W::COLS values.
template <class W, class S, bool NORM, bool QUANT, bool FLOAT, class Load, class Epilogue>
DEVICE void linear(const u8 *w, int g, int b, Load src, const float *gain, float eps, Shared sh, const Epilogue &put) {
  constexpr int K = W::COLS, ROWS = W::ROWS, LPR = S::LANES, KS = S::SPLIT, R = S::ROWS_PER_LANE;
  Dot<W::TYPE, K, LPR, KS, R, S::DEPTH> dot;
  constexpr int G = 32 / LPR;
  const int unit = (b * (WARPS / KS) + threadIdx.x / 32 / KS) * R * G + threadIdx.x % 32 / LPR;
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int row = unit + r * G;
    dot.row[r] = W::START + (u64)g * W::STRIDE + (row < ROWS ? row : ROWS - 1);
  }
  dot.point(w, W::BLOCKS);
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

// What producer and consumer of activations have agreed on: int8 blocks, which the consumer only copies, or floats.
template <bool INT8, class A> DEVICE auto activations(const A &a, u64 first = 0) {
  if constexpr (INT8) return Quantised{a.src_q, a.src_s};
  else return Plain{a.src + first};
}
// Results of a buffer of SIZE values, from value `at` on. `values`: 32 floats of shared memory.
template <bool INT8, int SIZE, class A> DEVICE auto results(const A &a, float *values, int at) {
  if constexpr (INT8) return PutQuantised{values, a.dst_q, a.dst_s, SIZE / 32, at / 32};
  else return Put{a.dst + at, nullptr};
}
