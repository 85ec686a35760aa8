// Prompts: packed weights times many tokens' activations as halves on tensor cores, float32 sums. A lane takes 32
// weights in a row, of 128 that the four lanes of a matrix row share: it reads them with 16-byte loads and turns them
// into halves in its registers. So the activations' values stand in another order (`place`), in which ldmatrix gives
// each lane those of its own weights.

constexpr int SPAN = 128, SPAN_VECTORS = SPAN / 8, WARPS = THREADS / 32;

DEVICE constexpr int padded(int values) {
  return (values + SPAN - 1) / SPAN * SPAN;
}  // pitch of a row of halves; the rest is zeros
// Where value k of a row stands: bits (lane 6-5, half of a block 4, word 3-2, pair 1, 0) go to (half, word, pair, lane,
// 0).
DEVICE constexpr int place(int k) { return (k & ~(SPAN - 1)) | (k & 30) << 2 | (k & 96) >> 4 | (k & 1); }

DEVICE float to_half_range(float v) { return fminf(fmaxf(v, -65504.f), 65504.f); }
DEVICE u32 pack(float lo, float hi) { return pack_halves(to_half_range(lo), to_half_range(hi)); }

// Two halves, each the lowest byte of v less OFFSET: a byte behind 0x64 is the half 1024 + byte.
template <int OFFSET> DEVICE u32 twice(u32 v) {
  return half2_sub(permute_bytes(v, 0x64646464u, 0x4040), (0x6400 + OFFSET) * 0x10001u);
}

// A lane's 32 weights of one row.
template <int T> struct Piece {
  static constexpr int N = 32 / block_of(T);
  Block<T> f[N];
  u32 scale[2], shift[2];  // pairs of halves, of the first and the last 16 weights
  // The weights from block `first` of a tensor on; zeros where the row has fewer than `left` blocks left. CODES:
  // without their scales.
  template <bool CODES> DEVICE void load(const u8 *w, u64 blocks, u64 first, int left) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (CODES) fetch_codes<T>(f[i], w, blocks, first + i);
      else if (i < left) fetch<T>(f[i], w, blocks, first + i);
      else f[i] = Block<T>{};
    }
  }
  DEVICE void begin() {
    constexpr Planes P = planes(T);
    if (is_float(T)) return;
    const u32 s1 = f[0].s1, s2 = f[0].s2;
    // d times an integer is a product of halves, rounded once either way. Converting integers is an instruction of its
    // own pipe, which ptxas moves into the products of the span before: they would wait for this span's scales.
    constexpr bool EXACT = P.s1 && P.s2 && !P.shift;
    const u32 d = permute_bytes(s2, 0, 0x1010), low = permute_bytes(s2, 0, 0x3232) ^ 0x80008000u;  // -dmin
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (EXACT && P.split && P.min) {
        scale[half] = half2_mul(d, twice<0>(s1 >> 8 * half & 15));
        shift[half] = half2_mul(low, twice<0>(s1 >> (8 * half + 4) & 15));
      } else if constexpr (EXACT) {
        scale[half] = half2_mul(d, twice<128>((P.split ? s1 >> 8 * half : s1) ^ 0x80));
        if (P.min) shift[half] = half2_mul(low, twice<0>(s1 >> 8));
      } else {
        const float s = scale_of<T>(s1, s2, half), m = shift_of<T>(s1, s2, half);
        scale[half] = pack_halves(s, s);
        if (has_min(T)) shift[half] = pack_halves(m, m);
      }
    }
  }
  // Weights 4k, 4k + 1 and 4k + 2, 4k + 3 as halves.
  DEVICE V2 halves(int k) const {
    if constexpr (is_float(T)) {
      const Block<T> &b = f[k / 2];
      if (T == F16) return k % 2 ? V2{b.a.z, b.a.w} : V2{b.a.x, b.a.y};
      float v[8];
      floats<T>(b, v);
      return k % 2 ? V2{pack(v[4], v[5]), pack(v[6], v[7])} : V2{pack(v[0], v[1]), pack(v[2], v[3])};
    } else {
      const u32 q = codes<T>(f[0], k) ^ (signed_codes(T) ? 0x80808080u : 0);
      // A byte behind 0x64 is the half 1024 + byte; what is subtracted leaves the weight's integer, exactly.
      constexpr u32 bias = 0x6400 + (signed_codes(T) ? 128 : offset_of(T)), biases = bias | bias << 16;
      const u32 lo = half2_sub(permute_bytes(q, 0x64646464u, 0x4140), biases),
                hi = half2_sub(permute_bytes(q, 0x64646464u, 0x4342), biases), s = scale[k / 4], m = shift[k / 4];
      return has_min(T) ? V2{half2_fma(lo, s, m), half2_fma(hi, s, m)} : V2{half2_mul(lo, s), half2_mul(hi, s)};
    }
  }
};

// Tile::SPLIT warps share rows, each with every SPLIT-th span: warps in a row, or whole warpgroups, which must read the
// same tokens at a time. Which of them this warp is, and of which group.
template <class Tile> DEVICE int part_of() {
  return Tile::WARPGROUPS ? threadIdx.x / 128 % Tile::SPLIT : threadIdx.x / 32 % Tile::SPLIT;
}
template <class Tile> DEVICE int group_of() {
  return Tile::WARPGROUPS ? threadIdx.x / (128 * Tile::SPLIT) * 4 + threadIdx.x / 32 % 4
                          : threadIdx.x / 32 / Tile::SPLIT;
}

// The matrix rows of a warp: Tile::ROWS times 16 of them, SPAN columns at a time, Tile::DEPTH such spans ahead; and
// their products with Tile::TOKENS tokens. A lane has rows lane / 4 + 8 * i of tile m. TOTAL rows: those of one matrix
// of M, or of several in a row.
//
// Where Tile::SCALES, the scales of the block's rows lie in shared memory, copied whole (share); where Tile::RING, so
// do the codes on the way, of a matrix's step in each stage, each of which is read by the lane that copied it.
template <class M, int TOTAL, class Tile> struct Rows {
  static constexpr int TILES = Tile::ROWS, TOKENS = Tile::TOKENS, DEPTH = Tile::DEPTH, T = M::TYPE,
                       BLOCKS = M::COLS / block_of(T), N = 32 / block_of(T), SPANS = padded(M::COLS) / SPAN;
  // Bytes of a row's scales and from one row to the next, so that eight rows meet no bank twice; of a lane's codes.
  static constexpr int BLOCK_ROWS = TILES * 16 * (WARPS / Tile::SPLIT), S1 = BLOCKS * s1_bytes(T),
                       S2 = BLOCKS / 8 * s2_bytes(T), PITCH = S1 | 16, LO = lo_bytes(T), TWO = two_bytes(T),
                       ONE = one_bytes(T), STAGE = TILES * 2 * THREADS * (LO + TWO + ONE);
  static_assert(!Tile::SCALES || (S1 % 16 == 0 && BLOCKS % 8 == 0 && !M::RUN && TOTAL == M::ROWS), "whole copies");
  const u8 *w, *scales1, *scales2;  // the scales of the lane's first row
  u8 *ring;
  u32 block[TILES][2];  // the lane's first of each row, in the tensor
  Piece<T> piece[DEPTH][TILES][2];
  float acc[TILES][TOKENS / 8][4];
  u32 a[2][TILES][4];
  // Tile m begins at row first + 16 * m, counted from matrix `g` on; rows past the last repeat it.
  DEVICE void point(const u8 *weights, int g, int first) {
    w = weights;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = min(first + m * 16 + i * 8 + (int)(threadIdx.x % 32) / 4, TOTAL - 1);
        block[m][i] = (u32)packed_row<M>(g + r / M::ROWS, r % M::ROWS) * BLOCKS + threadIdx.x % 4 * N;
      }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
  }
  // Shared memory from `at` on: the ring, and the scales of the block's rows, of which this warp's first is `first` of
  // matrix g. Returns its end.
  DEVICE u8 *share(u8 *at, int g, int first) {
    constexpr int V1 = BLOCK_ROWS * S1 / 16, V2 = BLOCK_ROWS * S2 / 16, WHOLE = TOTAL % BLOCK_ROWS == 0;
    const int own = group_of<Tile>() * TILES * 16, rows = TOTAL - first + own;
    const u64 blocks = packed_row<M>(g, first - own) * BLOCKS;
    const u8 *from1 = w + s1_at(T, M::BLOCKS) + blocks * s1_bytes(T) + threadIdx.x * 16,
             *from2 = w + s2_at(T, M::BLOCKS) + blocks / 8 * s2_bytes(T) + threadIdx.x * 16;
    ring = at;
    at += Tile::RING ? Tile::STAGES * STAGE : 0;
    u8 *to1 = at, *to2 = at + BLOCK_ROWS * PITCH;
#pragma unroll
    for (int n = 0; n < (V1 + THREADS - 1) / THREADS; n++) {
      const int v = threadIdx.x + n * THREADS, row = v / (S1 / 16);
      if (V1 % THREADS == 0 || v < V1)
        copy_async(to1 + v * 16 + row * (PITCH - S1), from1 + n * THREADS * 16, WHOLE || row < rows);
    }
#pragma unroll
    for (int n = 0; n < (V2 + THREADS - 1) / THREADS; n++) {
      const int v = threadIdx.x + n * THREADS;
      if (V2 % THREADS == 0 || v < V2)
        copy_async(to2 + v * 16, from2 + n * THREADS * 16, WHOLE || (v + 1) * 16 <= rows * S2);
    }
    const int row = own + threadIdx.x % 32 / 4;
    scales1 = to1 + row * PITCH + threadIdx.x % 4 * s1_bytes(T);
    scales2 = to2 + row * S2;
    return to2 + BLOCK_ROWS * S2;
  }
  // Where this lane's codes of row 8 * n lie in a stage of the ring: UNIT bytes, behind BEFORE of each.
  template <int UNIT, int BEFORE> DEVICE u8 *codes(int stage, int n) {
    return ring + stage * STAGE + BEFORE * TILES * 2 * THREADS + (n * THREADS + threadIdx.x) * UNIT;
  }
  DEVICE void copy_codes(int stage, int span) {
    if (span >= SPANS) return;
#pragma unroll
    for (int n = 0; n < TILES * 2; n++) {
      const u64 at = block[n / 2][n % 2] + span * 4;
      if constexpr (LO > 0) copy_async(codes<16, 0>(stage, n), w + at * LO, true);
      if constexpr (LO == 32) copy_async(codes<16, 16>(stage, n), w + at * LO + 16, true);
      if constexpr (TWO > 0) copy_async_few<8>(codes<8, LO>(stage, n), w + two_at(T, M::BLOCKS) + at * 8);
      if constexpr (ONE > 0) copy_async_few<4>(codes<4, LO + TWO>(stage, n), w + one_at(T, M::BLOCKS) + at * 4);
    }
  }
  DEVICE void take_codes(int stage) {
#pragma unroll
    for (int n = 0; n < TILES * 2; n++) {
      Block<T> &f = piece[0][n / 2][n % 2].f[0];
      if constexpr (LO > 0) f.a = *(const V4 *)codes<16, 0>(stage, n);
      if constexpr (LO == 32) f.b = *(const V4 *)codes<16, 16>(stage, n);
      if constexpr (TWO > 0) f.two = *(const V2 *)codes<8, LO>(stage, n);
      if constexpr (ONE > 0) f.one = *(const u32 *)codes<4, LO + TWO>(stage, n);
    }
  }
  DEVICE void load(int slot, int span) {
    if (span >= SPANS) return;
    const int at = span * 4 * N, left = M::COLS % SPAN ? BLOCKS - at - (int)threadIdx.x % 4 * N : N;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) piece[slot][m][i].template load<Tile::SCALES>(w, M::BLOCKS, block[m][i] + at, left);
  }
  DEVICE void start() {  // the first spans
#pragma unroll
    for (int n = 0; n < (Tile::RING ? Tile::STAGES - 1 : DEPTH); n++) {
      const int span = part_of<Tile>() + n * Tile::SPLIT;
      if constexpr (Tile::RING) copy_codes(n, span);
      else load(n, span);
    }
  }
  DEVICE void begin(int slot, int span) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if constexpr (Tile::SCALES)
          fetch_scales<T, InShared>(piece[slot][m][i].f[0], scales1 + span * 4 * s1_bytes(T) + (m * 2 + i) * 8 * PITCH,
              scales2 + span / 2 * s2_bytes(T) + (m * 2 + i) * 8 * S2);
        piece[slot][m][i].begin();
      }
  }
  DEVICE void take(int slot, int k) {  // weights 4k..4k+3 of every lane, for use()
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const V2 top = piece[slot][m][0].halves(k), bottom = piece[slot][m][1].halves(k);
      u32(&to)[4] = a[k & 1][m];
      to[0] = top.x;
      to[1] = bottom.x;
      to[2] = top.y;
      to[3] = bottom.y;
    }
  }
  // The first of each SPLIT warps gets the sums of all of them.
  DEVICE void gather(float *pool) {
    constexpr int SPLIT = Tile::SPLIT;
    constexpr int N = TILES * TOKENS / 2;
    const int part = part_of<Tile>(), slot = group_of<Tile>() * (SPLIT - 1);
    float *from = pool + threadIdx.x % 32, *sums = &acc[0][0][0];
    if (part > 0)
#pragma unroll
      for (int i = 0; i < N; i++) from[((slot + part - 1) * N + i) * 32] = sums[i];
    __syncthreads();
    if (part == 0)
#pragma unroll
      for (int i = 0; i < N; i++)
#pragma unroll
        for (int p = 0; p < SPLIT - 1; p++) sums[i] += from[((slot + p) * N + i) * 32];
    __syncthreads();
  }
  DEVICE void use(int k, int n, u32 b0, u32 b1) {  // times tokens 8n..8n+7
#pragma unroll
    for (int m = 0; m < TILES; m++) mma_f16(acc[m][n], a[k & 1][m], b0, b1);
  }
  template <bool FEW> DEVICE void use(int k, u64 tile) {  // times all tokens, or the first 32
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      if constexpr (FEW) wgmma((float (&)[4][4])acc[m], a[k & 1][m], tile);
      else wgmma(acc[m], a[k & 1][m], tile);
    }
  }
};

// Bytes of shared memory that activations take: what weights have there lies behind them.
template <class Tile> constexpr int ACTIVATIONS = Tile::STAGES * Tile::SPLIT * Tile::TOKENS * SPAN * 2 + 1024;

// Fills rows.acc with the products of a tile: token t is row row_of[t] of x (pitch padded(COLS)), for t < tokens <=
// TOKENS; -1: none. FEW: of 64 only the first 32, of 16 the first 8. SPLIT warps share the rows, each with every
// SPLIT-th span; the first of them has the sums in the end. `pool` holds STAGES * SPLIT spans of all tokens.
// rows.start() comes before.
template <class Tile, int COLS, bool FEW, class... R>
DEVICE void multiply_some(V4 *pool, const u16 *x, const int *row_of, int tokens, R &...rows) {
  constexpr int TOKENS = Tile::TOKENS, SPLIT = Tile::SPLIT, STAGES = Tile::STAGES, DEPTH = Tile::DEPTH;
  constexpr int SPANS = padded(COLS) / SPAN, STEPS = (SPANS + SPLIT - 1) / SPLIT, PLANE = TOKENS * SPAN_VECTORS,
                STAGE = PLANE * SPLIT;
  const int lane = threadIdx.x % 32, part = part_of<Tile>(),
            used = (TOKENS == 8 ? 8 : (tokens + 15) / 16 * 16) * SPAN_VECTORS;
  // A thread copies the same vector of MINE rows in every span, BESIDE spans at a time. Where they come from is known
  // once, since code without loops and divisions is what short products wait for.
  constexpr int MINE = PLANE > THREADS ? PLANE / THREADS : 1, BESIDE = PLANE < THREADS ? THREADS / PLANE : 1;
  static_assert(PLANE * BESIDE == THREADS * MINE, "threads and vectors of a span");
  const int c = threadIdx.x % SPAN_VECTORS, t = threadIdx.x % PLANE / SPAN_VECTORS;
  u32 from[MINE];  // in x; NOWHERE: zeros
  constexpr u32 NOWHERE = ~0u;
#pragma unroll
  for (int n = 0; n < MINE; n++) {
    const int row = row_of[t + n * THREADS / SPAN_VECTORS];
    from[n] = row < 0 ? NOWHERE : (u32)row * padded(COLS) + c * 8;
  }
  // A span is two tiles of 64 values: ptx.cuh, tile_at; so ldmatrix meets no bank twice, either.
  auto fill = [&](int step) {
    V4 *to = pool + step % STAGES * STAGE + (c / 8 * TOKENS + t) * 8 + (c % 8 ^ t % 8);
#pragma unroll
    for (int first = 0; first < SPLIT; first += BESIDE) {
      const int p = first + (BESIDE > 1 ? threadIdx.x / PLANE : 0), span = step * SPLIT + p;
      if (span < SPANS)
#pragma unroll
        for (int n = 0; n < MINE; n++)
          if (MINE == 1 || (int)threadIdx.x + n * THREADS < used)
            copy_async(to + p * PLANE + n * THREADS / SPAN_VECTORS * 8,
                x + (from[n] == NOWHERE ? 0 : from[n]) + span * SPAN, from[n] != NOWHERE);
    }
  };
  if constexpr (Tile::WARPGROUPS) {
    static_assert(!Tile::RING, "codes in registers");
    // Halves of a file are the products' operands as they are loaded, so no load may come while a product reads them.
    constexpr bool OPERANDS = ((R::T == F16) || ...);
    // A step's buffer is filled again two steps later, when nobody's products read it any more.
#pragma unroll
    for (int s = 0; s < STAGES - 2; s++) {
      if (s < STEPS) fill(s);
      copy_commit();
    }
    for (int first = 0; first < STEPS; first += DEPTH)
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        const int step = first + d;
        if (step >= STEPS) break;
        copy_wait<STAGES - 3>();
        fence_tiles();
        __syncthreads();
        if (step + STAGES - 2 < STEPS) fill(step + STAGES - 2);
        copy_commit();
        const int span = step * SPLIT + part;
        if (SPANS % SPLIT && span >= SPANS) continue;
        const u8 *xs = (const u8 *)(pool + step % STAGES * STAGE + part * PLANE);
        (rows.begin(d, span), ...);
#pragma unroll
        for (int k = 0; k < 8; k++) {
          (rows.take(d, k), ...);
          if (k == 7 && !OPERANDS) (rows.load(d, span + DEPTH * SPLIT), ...);  // its registers are free
          wgmma_begin();
          (rows.template use<FEW>(k, tile_at(xs + k / 4 * TOKENS * 128 + k % 4 * 32)), ...);
          wgmma_commit();
          wgmma_wait<1>();  // the one before has read its weights
        }
        if (OPERANDS) {
          wgmma_wait<0>();
          (rows.load(d, span + DEPTH * SPLIT), ...);
        }
      }
    wgmma_wait<0>();
  } else {
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < STEPS) fill(s);
      copy_commit();
    }
    for (int first = 0; first < STEPS; first += DEPTH)
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        const int step = first + d;
        if (step >= STEPS) break;
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < STEPS) {
          fill(step + STAGES - 1);
          if constexpr (Tile::RING)
            (rows.copy_codes((step + STAGES - 1) % STAGES, (step + STAGES - 1) * SPLIT + part), ...);
        }
        copy_commit();
        const int span = step * SPLIT + part;
        if (SPANS % SPLIT && span >= SPANS) continue;
        const V4 *xs = pool + step % STAGES * STAGE + part * PLANE;
        if constexpr (Tile::RING) (rows.take_codes(step % STAGES), ...);
        (rows.begin(d, span), ...);
#pragma unroll
        for (int k = 0; k < 8; k++) {
          (rows.take(d, k), ...);
          if (k == 7 && !Tile::RING) (rows.load(d, span + DEPTH * SPLIT), ...);  // its registers are free
          if constexpr (TOKENS == 8 || FEW) {
            const V2 b = ldmatrix2(xs + (k / 4 * TOKENS + lane % 8) * 8 + ((k % 4 * 2 + lane / 8 % 2) ^ lane % 8));
            (rows.use(k, 0, b.x, b.y), ...);
          } else {
#pragma unroll
            for (int n = 0; n < TOKENS / 16; n++)
              if (n == 0 || n * 16 < tokens) {
                const V4 b = ldmatrix4(xs + (k / 4 * TOKENS + n * 16 + lane / 16 * 8 + lane % 8) * 8 +
                    ((k % 4 * 2 + lane / 8 % 2) ^ lane % 8));
                (rows.use(k, 2 * n, b.x, b.y), ...);
                (rows.use(k, 2 * n + 1, b.z, b.w), ...);
              }
          }
        }
      }
  }
  if (SPLIT > 1) {
    copy_wait<0>();
    __syncthreads();
    (rows.gather((float *)pool), ...);
  }
}

template <class Tile, int COLS, class... R>
DEVICE void multiply(V4 *pool, const u16 *x, const int *row_of, int tokens, R &...rows) {
  pool += (0u - shared_address(pool)) % 1024 / 16;
  // Half of a tile has a function of its own.
  constexpr int HALF = Tile::WARPGROUPS && Tile::TOKENS == 64 ? 32 : Tile::RING && Tile::TOKENS == 16 ? 8 : 0;
  if constexpr (HALF > 0) {
    if (tokens <= HALF) {
      multiply_some<Tile, COLS, true>(pool, x, row_of, tokens, rows...);
      return;
    }
  }
  multiply_some<Tile, COLS, false>(pool, x, row_of, tokens, rows...);
}

// A pair of halves of rows `row` and `row` ^ 1 of one token, from both rows' values of two tokens: lanes of even rows
// get the first token's pair, those of odd rows the second's. `row` is that of lane / 4.
DEVICE u32 pair_of_rows(float first, float second) {
  const bool odd = threadIdx.x / 4 % 2;
  const float other = shfl_xor(odd ? first : second, 4);
  return odd ? pack(other, second) : pack(first, other);
}
