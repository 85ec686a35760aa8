// Weights times the activations of one token, or of C tokens (columns) that a step verifies: what all mat-vec kernels
// of a decode step share. LANES lanes and SPLIT warps share a row, ROWS_PER_LANE rows per lane are in flight, DEPTH
// blocks of each (struct Spread, from Python). The first loads of weights go out before grid_wait(), so they overlap
// the kernel before. Every block stages the activations for itself, in int8 per 32 values: cheaper than another launch.
// A block of weights is read once for all columns; each column's sums have the order that they have alone, so its
// results have the same bits.

constexpr int WARPS = THREADS / 32;

struct Shared {
  V4 *q;
  Scale *s;
  float *f, *red;
};  // int8 codes (two planes of K / 32), their scales; floats; reductions

DEVICE F4 load4(const float *p) { return *(const F4 *)p; }
struct Plain {  // activations from a buffer, `stride` values from a column to the next
  const float *src;
  int stride = 0;
  DEVICE F4 operator()(int column, int i) const { return load4(src + column * stride + i); }
  DEVICE void prepare() const {}
};
struct Quantised {
  const V4 *q;
  const Scale *s;
  DEVICE void prepare() const {}
};  // already as `Shared` holds them

// Where the 16 codes of one half of block `block` stand (vectors of 16 bytes), and its scale: column by column, in two
// planes, or block by block, TILED columns behind one another, as products in tensor cores read them.
template <int TILED> DEVICE int codes_at(int column, int half, int block, int blocks) {
  return TILED ? (block * 2 + half) * TILED + column : (column * 2 + half) * blocks + block;
}
template <int TILED> DEVICE int scale_at(int column, int block, int blocks) {
  return TILED ? block * TILED + column : column * blocks + block;
}
// Of what a kernel leaves for the next: two columns are still multiplied outside of tensor cores.
DEVICE constexpr int tiled_of(int columns) { return columns > 2 ? columns : 0; }

// The block's shared memory for activations of C columns of K values, one column after the other. Floats are read at
// `direct` where they need no staging.
template <int K, bool QUANT, bool STAGE_FLOATS, int C> DEVICE Shared staging(const float *direct) {
  __shared__ float red[96 * C];
  if constexpr (C == 1) {
    __shared__ V4 q[QUANT ? K / 16 : 1];
    __shared__ Scale s[QUANT ? K / 32 : 1];
    __shared__ F4 f[STAGE_FLOATS ? K / 4 : 1];
    return Shared{q, s, STAGE_FLOATS ? (float *)f : (float *)direct, red};
  } else {
    DYNAMIC_SHARED(pool);
    Scale *s = (Scale *)(pool + (QUANT ? C * K / 16 : 0));
    return Shared{pool, s, STAGE_FLOATS ? (float *)(s + (QUANT ? C * K / 32 : 0)) : (float *)direct, red};
  }
}

// By the eight lanes of 32 values: vector `at` of a column's K activations as codes of an int8 block, and the block's
// scale.
template <int K, int TILED> DEVICE void stage_codes(const Shared &sh, int column, int at, F4 v) {
  constexpr int N = K / 4, BLOCKS = K / 32;
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
    ((u32 *)sh.q)[codes_at<TILED>(column, w >> 2, block, BLOCKS) * 4 + (w & 3)] =
        (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)d << 24;
    if (w == 0) sh.s[scale_at<TILED>(column, block, BLOCKS)] = Scale{amax / 127.f, (sum & 0xFFFF) | other << 16};
  }
}
DEVICE F4 times(F4 a, F4 b) { return F4{a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float squares(F4 v) {  // in one order, whatever the compiler could fuse
  return fma_rn(v.w, v.w, fma_rn(v.z, v.z, fma_rn(v.y, v.y, mul_rn(v.x, v.x))));
}

// K activations of each of C columns into shared memory, as int8 blocks if QUANT and as floats if FLOAT. NORM: times
// the gain only; what the rest of RMSNorm multiplies by, norm() gives after finish(), so that nothing waits for the sum
// of squares.
template <int K, bool NORM, bool QUANT, bool FLOAT, int C, int TILED = 0> struct Stage {
  static constexpr int N = K / 4, V = (N + THREADS - 1) / THREADS;  // vectors of a column: all, those of a thread
  static constexpr int B = NORM && C == 1 ? V : THREADS > 256 && C > 1 ? 4 : 8;  // loaded before the first use
  static constexpr int ALL = V * C;
  F4 gain[NORM ? V : 1], x[NORM && ALL > B ? B : NORM ? ALL : 1];
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
  template <class Load> static DEVICE F4 loaded(const Load &src, int n) {  // vector n of the thread's, over all columns
    const int at = threadIdx.x + n % V * THREADS;
    return at < N ? src(n / V, 4 * at) : F4{0, 0, 0, 0};
  }
  template <class Load> DEVICE void load(const Load &src, int first = 0) {
    if constexpr (NORM)
#pragma unroll
      for (int n = first; n < first + B && n < ALL; n++) x[n - first] = loaded(src, n);
  }
  DEVICE float norm(float eps, const Shared &sh, int column) const {
    if (!NORM) return 1;
    float ss = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) ss += sh.red[column * 32 + i];
    return rsqrt_(ss / K + eps);
  }
  DEVICE void finish(const Quantised &src, const Shared &sh) {
    static_assert(tiled_of(C) == 0, "more columns come in tiles (tiles.cuh)");
    constexpr int Q = C * K / 16, S = C * K / 32, VQ = (Q + THREADS - 1) / THREADS, VS = (S + THREADS - 1) / THREADS;
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
    F4 ahead[NORM ? 1 : B];
    float ss = 0;
#pragma unroll
    for (int n = 0; n < ALL; n++) {
      const int column = n / V, i = n % V, at = threadIdx.x + i * THREADS;
      if (NORM && n && n % B == 0) load(src, n);
      if (!NORM && (QUANT || FLOAT) && n % B == 0)  // several loads before the first use
#pragma unroll
        for (int j = n; j < n + B && j < ALL; j++) ahead[j % B] = loaded(src, j);
      F4 v;
      if (NORM) {
        const F4 x = this->x[n % B];
        ss = add_rn(ss, squares(x));
        v = times(x, gain[i]);
      } else v = ahead[n % B];
      if (FLOAT && at < N) *(F4 *)(sh.f + column * K + 4 * at) = v;
      if (QUANT) stage_codes<K, TILED>(sh, column, at, v);
      if (NORM && i == V - 1) {
        ss = warp_sum(ss);
        if (threadIdx.x % 32 == 0) sh.red[column * 32 + threadIdx.x / 32] = ss;
        ss = 0;
      }
    }
    __syncthreads();
  }
};

// R * 32 / LPR rows of one warp (KS warps share them, each every KS-th stretch of 32 blocks), DEPTH blocks per row in
// flight, times C columns.
template <int T, int K, int LPR, int KS, int R, int DEPTH, int C> struct Dot {
  static constexpr int KB = K / block_of(T), STEP = LPR * KS, NI = (KB + STEP - 1) / STEP, G = 32 / LPR,
                       D = DEPTH < NI ? DEPTH : NI;
  Block<T> f[D][R];
  float acc[C][R];
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
  DEVICE void clear() {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int r = 0; r < R; r++) acc[c][r] = 0;
  }
  DEVICE void prefetch() {
    clear();
#pragma unroll
    for (int i = 0; i < D; i++) issue(i);
  }
  DEVICE void use(int i, const Shared &sh, int first) {
    const int j = i * STEP + lane();
    if (KB % STEP == 0 || j < KB)
#pragma unroll
      for (int c = 0; c < C; c++) {
        if constexpr (is_float(T)) {
#pragma unroll
          for (int r = 0; r < R; r++) acc[c][r] += dot<T>(f[i % D][r], sh.f + c * staged + first + j * 8);
        } else {
          const int plane = staged / 32, at = first / 32 + j;  // a column's second plane starts `plane` blocks on
          const V4 x0 = sh.q[c * 2 * plane + at], x1 = sh.q[(c * 2 + 1) * plane + at];
          const Scale s = sh.s[c * plane + at];
#pragma unroll
          for (int r = 0; r < R; r++) acc[c][r] = added<T>(acc[c][r], f[i % D][r], x0, x1, s);
        }
      }
  }
  int staged;  // values of a whole staged column
  DEVICE void run(const Shared &sh, int values, int first = 0) {  // from staged value `first` on
    run(sh, values, first, false, [] {});
  }
  // With `again` the first blocks of other rows, which next() sets, are on their way behind it.
  template <class Next> DEVICE void run(const Shared &sh, int values, int first, bool again, const Next &next) {
    staged = values;
#pragma unroll
    for (int i = 0; i < NI; i++) step(i, sh, first, again, next);
    across_lanes();
  }
  template <class Next> DEVICE void step(int i, const Shared &sh, int first, bool again, const Next &next) {
    use(i, sh, first);
    if (i + D < NI) issue(i + D);
    else if (again) {
      if (i + D == NI) next();
      issue(i + D - NI);
    }
  }
  DEVICE void across_lanes() {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int m = LPR / 2; m; m >>= 1) acc[c][r] += shfl_xor(acc[c][r], m);
  }
  DEVICE void across_warps(float *red) {  // sums what the KS warps of a row have
    if (KS > 1) {
#pragma unroll
      for (int c = 0; c < C; c++)
#pragma unroll
        for (int r = 0; r < R; r++)
          if (threadIdx.x % 32 == 0) red[c * 64 + threadIdx.x / 32 * R + r] = acc[c][r];
      __syncthreads();
#pragma unroll
      for (int c = 0; c < C; c++)
#pragma unroll
        for (int r = 0; r < R; r++) {
          acc[c][r] = 0;
          for (int i = 0; i < KS; i++) acc[c][r] += red[c * 64 + (threadIdx.x / 32 / KS * KS + i) * R + r];
        }
    }
  }
  // A row's lanes have the sums of all columns; each finishes its own columns, `first` + lane of the row.
  DEVICE float mine(int first, int r) const {
    float v = acc[first][r];
#pragma unroll
    for (int c = 1; c < LPR && first + c < C; c++) v = threadIdx.x % LPR == c ? acc[first + c][r] : v;
    return v;
  }
};

// Where results go, by column and row; finish() is called by all threads once, with the block's first row. Where ADDS,
// the last argument is before(), what stands there, loaded in front of grid_wait(): the kernel before does not write
// it.
struct Put {
  float *dst;
  const float *bias;
  float scale = 1, softcap = 0;
  int stride = 0;  // from a column to the next
  DEVICE void operator()(int column, int row, float v) const {
    const float y = mul_rn(scale, bias ? add_rn(v, bias[row]) : v);
    dst[column * stride + row] = softcap == 0 ? y : softcap * tanhf(y / softcap);
  }
  DEVICE void finish(int) const {}
};
struct Add {
  float *dst;
  const float *bias;
  float scale = 1;
  int stride = 0;
  // volatile: past the first-level cache
  DEVICE float before(int column, int row) const { return *(const volatile float *)(dst + column * stride + row); }
  DEVICE void operator()(int column, int row, float v, float before) const {
    dst[column * stride + row] = fma_rn(scale, bias ? add_rn(v, bias[row]) : v, before);
  }
  DEVICE void operator()(int column, int row, float v) const { (*this)(column, row, v, before(column, row)); }
  DEVICE void finish(int) const {}
};
template <class Epilogue> constexpr bool ADDS = false;
template <> constexpr bool ADDS<Add> = true;
// By one warp: its lanes' values as int8 block `at` of the `blocks` of a column; TILED where there are several.
template <int C> DEVICE void put_block(float v, u32 *q, Scale *s, int column, int blocks, int at) {
  const int lane = threadIdx.x % 32;
  const float amax = warp_max(fabsf(v));
  const int code = round_int(amax > 0 ? v * (127.f / amax) : 0);
  int word = (code & 255) << lane % 4 * 8;
  word |= shfl_xor(word, 1);
  word |= shfl_xor(word, 2);
  if (lane % 4 == 0) q[codes_at<tiled_of(C)>(column, lane >> 4, at, blocks) * 4 + (lane / 4 & 3)] = (u32)word;
  int sum = code;
  for (int m = 1; m < 16; m *= 2) sum += shfl_xor(sum, m);
  const int other = shfl_xor(sum, 16);
  if (lane == 0) s[scale_at<tiled_of(C)>(column, at, blocks)] = Scale{amax / 127.f, (sum & 0xFFFF) | other << 16};
}
// As int8 blocks for the next kernel (`Quantised`): a thread block makes exactly 32 rows, one block of the `blocks`
// there; `first` is that of row 0.
template <int C> struct PutQuantised {
  float *values;  // (C, 32)
  u32 *q;
  Scale *s;
  int blocks, first;
  DEVICE void operator()(int column, int row, float v) const { values[column * 32 + row % 32] = v; }
  DEVICE void finish(int row) const {
    __syncthreads();
    for (int c = threadIdx.x / 32; c < C; c += WARPS)
      put_block<C>(values[c * 32 + threadIdx.x % 32], q, s, c, blocks, first + row / 32);
  }
};

// By block b of BLOCKS that make the rows of W's matrix g: put(column, row, value) for each. LOAD gives the
// activations, of W::COLS values. Where there are fewer blocks than stretches of rows, a block has the weights of its
// next one on their way while it finishes one.
template <class W, class S, int BLOCKS, bool NORM, bool QUANT, bool FLOAT, int C, class Load, class Epilogue>
DEVICE void linear(const u8 *w, int g, int b, Load src, const float *gain, float eps, Shared sh, const Epilogue &put) {
  constexpr int K = W::COLS, ROWS = W::ROWS, LPR = S::LANES, KS = S::SPLIT, R = S::ROWS_PER_LANE;
  using Product = Dot<W::TYPE, K, LPR, KS, R, S::DEPTH, C>;
  Product dot;
  constexpr int G = 32 / LPR, MINE = (C + LPR - 1) / LPR;  // columns that a lane finishes
  constexpr int STRETCH_ROWS = WARPS / KS * R * G, STRETCHES = (ROWS + STRETCH_ROWS - 1) / STRETCH_ROWS;
  constexpr bool AGAIN = BLOCKS < STRETCHES;
  static_assert(!AGAIN || (KS == 1 && !ADDS<Epilogue> && Product::NI % Product::D == 0), "what a stretch may be");
  const int lane = threadIdx.x % LPR;
  int unit = (b * (WARPS / KS) + threadIdx.x / 32 / KS) * R * G + threadIdx.x % 32 / LPR;
  const auto aim = [&] {
#pragma unroll
    for (int r = 0; r < R; r++) dot.row[r] = packed_row<W>(g, min(unit + r * G, ROWS - 1));
  };
  aim();
  dot.point(w, W::BLOCKS);
  dot.prefetch();
  const bool last = threadIdx.x / 32 % KS == 0;  // finishes its rows
  float before[MINE][R];
  if constexpr (ADDS<Epilogue>)
#pragma unroll
    for (int m = 0; m < MINE; m++)
      if ((C == 1 ? lane == 0 : m * LPR + lane < C) && last)
#pragma unroll
        for (int r = 0; r < R; r++)
          if (unit + r * G < ROWS) before[m][r] = put.before(C == 1 ? 0 : m * LPR + lane, unit + r * G);
  Stage<K, NORM, QUANT, FLOAT, C> stage;
  stage.prefetch(gain);
  grid_wait();
  src.prepare();
  stage.load(src);
  stage.finish(src, sh);
  float norm[MINE];
#pragma unroll
  for (int m = 0; m < MINE; m++) norm[m] = stage.norm(eps, sh, C == 1 ? 0 : min(m * LPR + lane, C - 1));
#pragma unroll 1
  for (int stretch = b;; stretch += BLOCKS) {
    const bool again = AGAIN && stretch + BLOCKS < STRETCHES;
    const int row = unit;
    dot.run(sh, K, 0, again, [&] {
      unit += BLOCKS * STRETCH_ROWS;
      aim();
    });
    dot.across_warps(sh.red + 32 * C);
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int column = C == 1 ? 0 : m * LPR + lane;
      if ((C == 1 ? lane == 0 : column < C) && last)
#pragma unroll
        for (int r = 0; r < R; r++)
          if (row + r * G < ROWS) {
            const float v = mul_rn(dot.mine(m * LPR, r), norm[m]);
            if constexpr (ADDS<Epilogue>) put(column, row + r * G, v, before[m][r]);
            else put(column, row + r * G, v);
          }
    }
    put.finish(stretch * STRETCH_ROWS);
    if (!again) break;
    dot.clear();
  }
}

// What producer and consumer of activations have agreed on: int8 blocks, which the consumer only copies, or floats,
// `stride` of them from a column to the next.
template <bool INT8, class A> DEVICE auto activations(const A &a, int stride, u64 first = 0) {
  if constexpr (INT8) return Quantised{a.src_q, a.src_s};
  else return Plain{a.src + first, stride};
}
// Results of a buffer of SIZE values a column, from value `at` on. `values`: (C, 32) floats of shared memory.
template <bool INT8, int SIZE, int C, class A> DEVICE auto results(const A &a, float *values, int at) {
  if constexpr (INT8) return PutQuantised<C>{values, a.dst_q, a.dst_s, SIZE / 32, at / 32};
  else return Put{a.dst + at, nullptr, 1, 0, SIZE};
}
