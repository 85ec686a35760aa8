// Quantised weights times the C columns of a verify step, in tensor cores, with the bits of single steps (matvec.cuh):
// the product of a block of 32 weights is exact in integers, wherever it is made, and its factors and the order of a
// row's sums are those of Dot. There lane l (of the row's lanes and warps) sums blocks l, l + CLASSES, ... of a row:
// that is class l here. A warp has every CLASS_WARPS-th class, and sums them in the order of Dot's shuffles.
//
// A thread block computes tiles of rows, one after the other: SPAN blocks of all rows of a tile are a stage of a ring
// in shared memory, where they arrive in the background, the first before grid_wait(). The activations come as int8
// blocks (quantise.cu, or whoever made them). Constants of Tiles: RING_SHARED, the bytes of dynamic shared memory;
// TILE: 16 rows of a warp at once; STREAM: a span's activations come with its weights, else all are there before the
// first product.
#include "matvec.cuh"

// The bits of 1.5 * 2^23: those of that float + i, for |i| < 2^22, are MAGIC + i.
constexpr int MAGIC = 0x4B400000;
DEVICE float exact(int magic_and_i) { return unbits((u32)magic_and_i) - 12582912.f; }

// From a row to the next in shared memory: an odd number of 16 bytes, so that eight rows lie in different banks.
DEVICE constexpr int row_pitch(int bytes) { return ((bytes + 15) / 16 | 1) * 16; }
DEVICE constexpr int copy_width(int a, int b) {
  return (a | b) % 16 == 0 ? 16 : (a | b) % 8 == 0 ? 8 : (a | b) % 4 == 0 ? 4 : (a | b) % 2 == 0 ? 2 : 1;
}
template <int BYTES> DEVICE void copy_some(u8 *to, const u8 *from) {
  if constexpr (BYTES == 16) copy_async(to, from, true);
  else if constexpr (BYTES >= 4) copy_async_few<BYTES>(to, from);
  else if constexpr (BYTES == 2) *(u16 *)to = (u16)ldc2(from);
  else *to = *from;
}

// A product has 16 rows and 8 columns; a lane has those of rows lane / 4 and + 8 in two columns. Where there are fewer
// columns each comes several times, and a lane takes one row only.
DEVICE constexpr int own_rows(int columns) { return columns < 8 ? 1 : 2; }
template <int C> DEVICE int own_row(int i) {
  return C < 8 ? (C == 2 ? threadIdx.x % 2 : threadIdx.x / 2 % 2) * 8 : i * 8;
}

// SPAN blocks of R rows of W, plane by plane.
template <class W, int R, int SPAN, int C> struct Span {
  static constexpr int T = W::TYPE, KB = W::COLS / 32, OWN = own_rows(C);
  static DEVICE constexpr int plane(int bytes) { return bytes ? row_pitch(bytes) : 0; }  // from a row to the next
  static constexpr int LO = plane(SPAN * lo_bytes(T)), TWO = plane(SPAN * two_bytes(T)),
                       ONE = plane(SPAN * one_bytes(T)), S1 = plane(SPAN * s1_bytes(T)),
                       S2 = plane((SPAN + 7) / 8 * s2_bytes(T));
  static constexpr int TWO_AT = R * LO, ONE_AT = TWO_AT + R * TWO, S1_AT = ONE_AT + R * ONE, S2_AT = S1_AT + R * S1,
                       BYTES = S2_AT + R * S2;
  static_assert(s2_bytes(T) == 0 || SPAN % 8 == 0 || SPAN == KB, "a span begins with 256 weights");

  // `bytes` bytes of each row from `row` of the matrix on, ROW bytes from one to the next in the tensor; rows behind
  // the matrix's last are that one.
  template <int ROW, int PART, int PITCH> static DEVICE void copy_rows(u8 *to, const u8 *from, int row, int bytes) {
    constexpr int WIDTH = copy_width(ROW, PART), EACH = PART / WIDTH;
    const auto of = [&](int r) { return from + packed_row<W>(0, min(row + r, W::ROWS - 1)) * ROW; };
    if constexpr (THREADS % EACH == 0) {  // a thread has the same part of every row that it copies
      constexpr int STEP = THREADS / EACH;
      const int first = threadIdx.x / EACH, c = threadIdx.x % EACH * WIDTH;
      to += first * PITCH + c;
      if (c >= bytes) return;
      if (!W::RUN && (W::ROWS % R == 0 || row + R <= W::ROWS)) {
        from += packed_row<W>(0, row) * ROW + first * ROW + c;
#pragma unroll
        for (int r = 0; r < R; r += STEP)
          if (R % STEP == 0 || first + r < R) copy_some<WIDTH>(to + r * PITCH, from + r * ROW);
      } else
#pragma unroll 1
        for (int r = first; r < R; r += STEP, to += STEP * PITCH) copy_some<WIDTH>(to, of(r) + c);
    } else
#pragma unroll 1
      for (int at = threadIdx.x; at < R * EACH; at += THREADS) {
        const int r = at / EACH, c = at % EACH * WIDTH;
        if (c < bytes) copy_some<WIDTH>(to + r * PITCH + c, of(r) + c);
      }
  }
  // Blocks of the span that begins with block `first`.
  static DEVICE int blocks_of(int first) { return KB % SPAN == 0 || KB - first >= SPAN ? SPAN : KB - first; }
  // Blocks `first` and on of rows `row` and on of the matrix.
  static DEVICE void copy(u8 *to, const u8 *w, int row, int first) {
    const int all = blocks_of(first);
    copy_plane<lo_bytes(T), LO>(to, w, row, first, all);
    copy_plane<two_bytes(T), TWO>(to + TWO_AT, w + two_at(T, W::BLOCKS), row, first, all);
    copy_plane<one_bytes(T), ONE>(to + ONE_AT, w + one_at(T, W::BLOCKS), row, first, all);
    copy_plane<s1_bytes(T), S1>(to + S1_AT, w + s1_at(T, W::BLOCKS), row, first, all);
    copy_plane<s2_bytes(T), S2, 8>(to + S2_AT, w + s2_at(T, W::BLOCKS), row, first, all);
  }
  // A plane with UNIT bytes of PER blocks.
  template <int UNIT, int PITCH, int PER = 1>
  static DEVICE void copy_plane(u8 *to, const u8 *plane, int row, int first, int all) {
    if constexpr (UNIT > 0)
      copy_rows<KB / PER * UNIT, SPAN / PER * UNIT, PITCH>(to, plane + first / PER * UNIT, row, all / PER * UNIT);
  }

  // Of a block of 16 rows, what a lane gives to the product (rows lane / 4 and + 8) and to the scaling.
  struct Fragment {
    u32 codes[4], s1[OWN], s2[OWN];
  };
  static DEVICE Fragment fragment(const u8 *from, int row, int block) {
    Fragment f;
    const int word = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      Block<T> of{};  // its words in every place
      if (lo_bytes(T)) {
        const u8 *lo = from + r * LO + block * lo_bytes(T) + word * 4;
        const u32 first = *(const u32 *)lo;
        of.a = V4{first, first, first, first};
        if (lo_bytes(T) == 32) {
          const u32 second = *(const u32 *)(lo + 16);
          of.b = V4{second, second, second, second};
        }
      }
      if (two_bytes(T)) of.two = *(const V2 *)(from + TWO_AT + r * TWO + block * 8);
      if (one_bytes(T)) of.one = *(const u32 *)(from + ONE_AT + r * ONE + block * 4);
      f.codes[h] = codes<T>(of, word);
      f.codes[2 + h] = codes<T>(of, word + 4);
    }
#pragma unroll
    for (int h = 0; h < OWN; h++) {
      const int r = row + own_row<C>(h);
      const u8 *s = from + S1_AT + r * S1 + block * s1_bytes(T),
               *both = from + S2_AT + r * S2 + block / 8 * s2_bytes(T);
      f.s1[h] = f.s2[h] = 0;
      if (s1_bytes(T) == 1) f.s1[h] = *s;
      if (s1_bytes(T) == 2) f.s1[h] = *(const u16 *)s;
      if (s1_bytes(T) == 4) f.s1[h] = *(const u32 *)s;
      if (s2_bytes(T) == 2) f.s2[h] = *(const u16 *)both;
      if (s2_bytes(T) == 4) f.s2[h] = *(const u32 *)both;
    }
    return f;
  }
  // What the block adds to the sums of this lane's rows, two columns each. b: its codes of column lane / 4, s: the
  // scales of its own columns.
  static DEVICE void products(F2 (&terms)[2 * OWN], const Fragment &f, u32 b0, u32 b1, const Scale (&s)[2]) {
    constexpr bool SPLIT = planes(T).split;
    constexpr u32 LESS = (u32)(-offset_of(T)) & 255;
    // Integers that begin with MAGIC: of two columns, each in two rows; of 32 weights, or of the first and the
    // second 16.
    int product[2][4], sum[2][2];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int half = 0; half <= SPLIT; half++) {
        const u32 of = SPLIT ? 1 << 8 * half : 0x0101;  // times the sums of the first and the second 16 codes
        product[half][c] = product[half][2 + c] = offset_of(T) ? dp2a(s[c].sums, LESS * of, MAGIC) : MAGIC;
        if (has_min(T)) sum[half][c] = dp2a(s[c].sums, of, MAGIC);
      }
    if constexpr (SPLIT) {
      mma_s8_k16(product[0], f.codes[0], f.codes[1], b0);
      mma_s8_k16(product[1], f.codes[2], f.codes[3], b1);
    } else mma_s8_k32(product[0], f.codes, b0, b1);
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++) {
      const bool lower = OWN == 1 && own_row<C>(0);  // then this lane's are the last two
      float products[2] = {}, sums[2] = {};
#pragma unroll
      for (int half = 0; half <= SPLIT; half++) {
        products[half] = exact(lower ? product[half][2 + i % 2] : product[half][i]);
        if (has_min(T)) sums[half] = exact(sum[half][i % 2]);
      }
      terms[i] = term<T>(s[i % 2].d, Scales<T>(f.s1[i / 2], f.s2[i / 2]), products, sums);
    }
  }
  static DEVICE void add(float (&sums)[2 * OWN], const Fragment &f, u32 b0, u32 b1, const Scale (&s)[2]) {
    F2 terms[2 * OWN];
    products(terms, f, b0, b1, s);
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++) sums[i] = fma_rn(terms[i].x, terms[i].y, sums[i]);
  }
};

// A lane's codes of column `first` + lane / 4 in a block, and the scales of its own columns; where there are fewer than
// 8, each comes several times.
template <int C> struct Columns {
  const u8 *codes, *scales;
  DEVICE Columns(const V4 *q, const Scale *s, int block, int first) {
    const u32 lane = threadIdx.x % 32;
    codes = (const u8 *)(q + block * 2 * C) + (first + lane / 4) % C * 16 + lane % 4 * 4;
    scales = (const u8 *)(s + block * C) + (first + lane % 4 * 2) % C * 8;
  }
  DEVICE void get(u32 (&b)[2], Scale (&s)[2], int block) const {  // behind the first
    b[0] = *(const u32 *)(codes + block * C * 32);
    b[1] = *(const u32 *)(codes + block * C * 32 + C * 16);
    const V4 v = *(const V4 *)(scales + block * C * 8);
    s[0] = Scale{unbits(v.x), (int)v.y};
    s[1] = Scale{unbits(v.z), (int)v.w};
  }
};

// Rows of A, and of B where PAIR, times C columns, by BLOCKS thread blocks. S: the spread of a single step. UNIT tiles
// (one or two) belong together.
template <class A, class B, class S, int C, int UNIT, bool PAIR, int BLOCKS> struct Tiles {
  static constexpr int ROWS = A::ROWS, KB = A::COLS / 32, CLASSES = S::LANES * S::SPLIT;
  static constexpr int CLASS_WARPS = CLASSES < WARPS ? CLASSES : WARPS, GROUPS = WARPS / CLASS_WARPS;
  static constexpr int MINE = CLASSES / CLASS_WARPS, NI = (KB + CLASSES - 1) / CLASSES;  // classes of a warp
  static constexpr int R = 16 * TILE * GROUPS, M = PAIR ? 2 * TILE : TILE, N = (C + 7) / 8;
  static constexpr int FEW = CLASSES < 32 ? 32 / CLASSES : 1, SPAN = CLASSES * (NI < FEW ? NI : FEW);
  static constexpr int SPANS = (KB + SPAN - 1) / SPAN;
  using SpanA = Span<A, R, SPAN, C>;
  using SpanB = Span<B, R, SPAN, C>;
  static constexpr int OWN = own_rows(C), PADDED = C < 8 ? C : 8 * N;  // columns of the partial sums
  static constexpr int INPUT = SPAN * C * 40, INPUT_AT = SpanA::BYTES + (PAIR ? SpanB::BYTES : 0),
                       STAGE = INPUT_AT + (STREAM ? (INPUT + 15) / 16 * 16 : 0);
  static constexpr int COLUMN = 16 * M * GROUPS + 4;  // values of a column among the partial sums
  static constexpr int SUMS = 4 * WARPS / GROUPS * S::SPLIT * PADDED * COLUMN;
  static constexpr int STAGED = STREAM ? 0 : C * KB * 40, SUMS_AT = (STAGED + 15) / 16 * 16, RING_AT = SUMS_AT + SUMS;
  static constexpr int FIT = (RING_SHARED - RING_AT) / STAGE, STAGES = FIT < 8 ? FIT : 8;
  static_assert(STAGES >= 2, "too little shared memory");

  static constexpr int ALL = (ROWS + R * UNIT - 1) / (R * UNIT) * UNIT;  // tiles
  // Over the tiles of a block, and the spans of each. The first blocks have one tile more than the others, so that
  // those which come to their multiprocessors have one less. Where two tiles belong together, blocks of an odd number
  // begin with one whose other half a neighbour has (`half`).
  struct Cursor {
    static constexpr int FEW = ALL / BLOCKS, LONG = ALL % BLOCKS;  // tiles of most blocks, and how many have one more
    int tile, behind, left, span = 0;
    bool half = false;
    DEVICE Cursor(int block) {
      const bool is_long = block < LONG;
      const int of = is_long ? block : block - LONG, first = is_long ? 0 : LONG * (FEW + 1);
      left = FEW + is_long;
      half = UNIT == 2 && left % 2;
      tile = half ? first + (of | 1) * left - (of % 2 == 0) : first + of * left;
      behind = half && of % 2 == 0 ? first + of * left : tile + 1;
    }
    DEVICE void next() {
      if (++span < SPANS) return;
      span = 0;
      tile = behind++;
      left--;
      half = false;
    }
  };

  u8 *pool;
  const u8 *a, *b;
  Cursor ahead{0};
  int slot = 0;  // of the stage that comes next

  DEVICE u8 *stage(int i) const { return pool + RING_AT + i * STAGE; }
  DEVICE void weights(const Cursor &c, int i) const {
    if (c.left <= 0) return;
    SpanA::copy(stage(i), a, c.tile * R, c.span * SPAN);
    if constexpr (PAIR) SpanB::copy(stage(i) + SpanA::BYTES, b, c.tile * R, c.span * SPAN);
  }
  // A thread's vectors of SIZE blocks of every column, `all` of them from `first` on: codes, and behind SIZE blocks of
  // them scales.
  template <int SIZE> struct Input {
    static constexpr int CODES = SIZE * C * 2, ALL = CODES + SIZE * C / 2, EACH = (ALL + THREADS - 1) / THREADS;
    static_assert(SIZE * C % 2 == 0, "scales in vectors");
    template <class Copy> static DEVICE void each(const Quantised &src, int first, int all, const Copy &copy) {
      const V4 *q = src.q + first * C * 2, *s = (const V4 *)(src.s + first * C);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = threadIdx.x + i * THREADS;
        const bool code = (i + 1) * THREADS <= CODES || (i * THREADS < CODES && at < CODES);
        const int in = code ? at : at - CODES;
        if (KB % SIZE == 0 ? (i + 1) * THREADS <= ALL || at < ALL : in < (code ? all * C * 2 : all * C / 2))
          copy(i, at, code ? q + in : s + in);
      }
    }
  };
  DEVICE void input(const Quantised &src, const Cursor &c, int i) const {
    if (c.left <= 0) return;
    V4 *to = (V4 *)(stage(i) + INPUT_AT);
    Input<SPAN>::each(src, c.span * SPAN, SpanA::blocks_of(c.span * SPAN),
        [&](int, int at, const V4 *from) { copy_async(to + at, from, true); });
  }
  // The weights of the first stages are on their way.
  DEVICE void begin(V4 *shared, const u8 *wa, const u8 *wb, int block) {
    pool = (u8 *)shared;
    a = wa;
    b = wb;
    ahead = Cursor(block);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      weights(ahead, i);
      copy_commit();
      ahead.next();
    }
  }
  // Behind grid_wait(). Through registers: copies in the background would come behind all weights that are on the way.
  DEVICE void begin(const Quantised &src, int block) {
    using In = Input<STREAM ? SPAN : KB>;
    constexpr int TIMES = STREAM ? STAGES - 1 : 1, AT_ONCE = In::EACH > 8 ? 1 : 8 / In::EACH;
    Cursor c(block);
#pragma unroll
    for (int first = 0; first < TIMES; first += AT_ONCE) {
      V4 v[AT_ONCE][In::EACH];
      Cursor loaded = c;
#pragma unroll
      for (int n = 0; n < AT_ONCE && first + n < TIMES; n++, loaded.next())
        if (loaded.left > 0)
          In::each(src, loaded.span * SPAN, STREAM ? SpanA::blocks_of(loaded.span * SPAN) : KB,
              [&](int i, int, const V4 *from) { v[n][i] = *from; });
#pragma unroll
      for (int n = 0; n < AT_ONCE && first + n < TIMES; n++, c.next()) {
        V4 *to = (V4 *)(STREAM ? stage(first + n) + INPUT_AT : pool);
        if (c.left > 0)
          In::each(src, c.span * SPAN, STREAM ? SpanA::blocks_of(c.span * SPAN) : KB,
              [&](int i, int at, const V4 *) { to[at] = v[n][i]; });
      }
    }
  }
  static constexpr int OUT = 16 * TILE * GROUPS,
                       EACH = (OUT * C + THREADS - 1) / THREADS;  // results: of a tile, a thread
  // use(number, column, row of the matrix, row of the tile) for each of a thread's results.
  template <class Use> static DEVICE void results(int tile, const Use &use) {
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = threadIdx.x + n * THREADS, row = tile * R + i % OUT;
      if (((n + 1) * THREADS <= OUT * C || i < OUT * C) && row < ROWS) use(n, i / OUT, row, i % OUT);
    }
  }
  // put(column, row, sums of the row of A and B, known(column, row)), the last of which is loaded ahead; done(first
  // row, half) behind a unit's last tile and behind half of one.
  template <class Known, class Put, class Done>
  DEVICE void run(const Quantised &src, const Known &known, const Put &put, const Done &done, int block) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (Cursor at(block); at.left > 0;) {
      float sums[MINE][M][N][2 * OWN] = {}, before[EACH];
      results(at.tile, [&](int n, int column, int row, int) { before[n] = known(column, row); });
#pragma unroll 1
      for (int s = 0; s < SPANS; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        const int free = slot ? slot - 1 : STAGES - 1;
        weights(ahead, free);
        if constexpr (STREAM) input(src, ahead, free);
        copy_commit();
        ahead.next();
        multiply(sums, stage(slot), s, warp, lane);
        slot = slot + 1 < STAGES ? slot + 1 : 0;
      }
      store(sums, warp, lane);
      __syncthreads();
      results(at.tile, [&](int n, int column, int row, int r) {
        put(column, row, sum(r, column), PAIR ? sum(OUT + r, column) : 0, before[n]);
      });
      if (at.half || at.tile % UNIT == UNIT - 1) done(at.tile * R, at.half);
      for (int s = 0; s < SPANS; s++) at.next();
    }
  }

 private:
  DEVICE void multiply(float (&sums)[MINE][M][N][2 * OWN], const u8 *from, int span, int warp, int lane) const {
    const int row = warp / CLASS_WARPS * TILE * 16 + lane / 4;
    const V4 *q = STREAM ? (const V4 *)(from + INPUT_AT) : (const V4 *)pool + span * SPAN * C * 2;
    const Scale *scales = STREAM ? (const Scale *)(from + INPUT_AT + SPAN * C * 32)
                                 : (const Scale *)(pool + KB * C * 32) + span * SPAN * C;
#pragma unroll
    for (int i = 0; i < SPAN / CLASSES; i++)
#pragma unroll
      for (int c = 0; c < MINE; c++) {
        const int block = i * CLASSES + c * CLASS_WARPS + warp % CLASS_WARPS;  // in the span
        if (KB % SPAN == 0 || span * SPAN + block < KB) {
          u32 b[N][2];
          Scale s[N][2];
#pragma unroll
          for (int n = 0; n < N; n++) {
            Columns<C>(q, scales, warp % CLASS_WARPS, n * 8).get(b[n], s[n], i * CLASSES + c * CLASS_WARPS);
          }
#pragma unroll
          for (int m = 0; m < TILE; m++) {
            const auto f = SpanA::fragment(from, row + m * 16, block);
#pragma unroll
            for (int n = 0; n < N; n++) SpanA::add(sums[c][m][n], f, b[n][0], b[n][1], s[n]);
            if constexpr (PAIR) {
              const auto g = SpanB::fragment(from + SpanA::BYTES, row + m * 16, block);
#pragma unroll
              for (int n = 0; n < N; n++) SpanB::add(sums[c][TILE + m][n], g, b[n][0], b[n][1], s[n]);
            }
          }
        }
      }
  }
  DEVICE float *partial(int split, int class_warp, int column) const {
    return (float *)(pool + SUMS_AT) + ((split * CLASS_WARPS + class_warp) * PADDED + column) * COLUMN;
  }
  // A warp's sums, one of its classes of each split.
  DEVICE void store(float (&sums)[MINE][M][N][2 * OWN], int warp, int lane) const {
    constexpr int EACH = S::LANES / CLASS_WARPS;  // classes of a warp among those of a split
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2 * OWN; i++)
#pragma unroll
          for (int split = 0; split < S::SPLIT; split++) {
#pragma unroll
            for (int by = EACH / 2; by; by /= 2)
#pragma unroll
              for (int c = 0; c < by; c++) sums[split * EACH + c][m][n][i] += sums[split * EACH + c + by][m][n][i];
            const int row =
                (m / TILE * GROUPS + warp / CLASS_WARPS) * TILE * 16 + m % TILE * 16 + lane / 4 + own_row<C>(i / 2);
            partial(split, warp % CLASS_WARPS, n * 8 + lane % 4 * 2 % C + i % 2)[row] = sums[split * EACH][m][n][i];
          }
  }
  // What the warps of classes w, w + BY, ... have, in the order of shuffles by CLASS_WARPS / 2, ..., BY lanes.
  template <int BY> DEVICE float tree(const float *first) const {
    if constexpr (BY == CLASS_WARPS) return *first;
    else return tree<BY * 2>(first) + tree<BY * 2>(first + BY * (partial(0, 1, 0) - partial(0, 0, 0)));
  }
  DEVICE float sum(int row, int column) const {
    float all = 0;
#pragma unroll
    for (int split = 0; split < S::SPLIT; split++) {
      const float part = tree<1>(partial(split, 0, column) + row);
      all = S::SPLIT == 1 ? part : all + part;
    }
    return all;
  }
};
