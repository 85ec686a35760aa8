// Decode: x += OUT_SCALE * (sum over the chosen experts of weight * (down @ its part of src + bias) + the shared
// expert's down @ its part). A warp per row. Chooses the experts again, so that their weights are on the way while
// experts_up still runs. TILED: the columns of a verify step, AT_ONCE of them per block, share an expert's rows.
#include "routing.cuh"
#include "tiles.cuh"

struct Args {
  const float *src = nullptr;
  const V4 *src_q = nullptr;  // src where IN_QUANTISED
  const Scale *src_s = nullptr;
  const float *router = nullptr;  // its logits, (columns, experts)
  const float *selection_bias = nullptr;
  float *x = nullptr;
  const u8 *w = nullptr;
  const int *state = nullptr;
  const u8 *shared = nullptr;
  const float *bias = nullptr;  // (experts, rows)
  const float *expert_scale = nullptr;
};

// The part of the row that this warp has of all chosen experts: sum of weight * (down[e] @ part e), a lane's share of
// it.
template <class W, int TOP> struct Experts {
  static constexpr int T = W::TYPE, FF = W::COLS, ROWS = W::ROWS, KB = FF / block_of(T), ALL = KB * TOP,
                       NI = (ALL + 31) / 32, D = NI < 8 ? NI : 8;
  Block<T> f[D];
  DEVICE void issue(const u8 *w, const int *ids, int row, int i) {
    const int j = i * 32 + threadIdx.x % 32;
    if (j < ALL) fetch<T>(f[i % D], w, W::BLOCKS, ((u64)ids[j / KB] * ROWS + row) * KB + j % KB);
  }
  DEVICE void prefetch(const u8 *w, const int *ids, int row) {
#pragma unroll
    for (int i = 0; i < D; i++) issue(w, ids, row, i);
  }
  DEVICE float run(const u8 *w, const int *ids, const float *weights, int row, const Shared &sh, int staged_blocks) {
    float acc = 0;
#pragma unroll
    for (int i = 0; i < NI; i++) {
      const int j = i * 32 + threadIdx.x % 32;
      if (j < ALL) {
        if constexpr (is_float(T)) acc += weights[j / KB] * dot<T>(f[i % D], sh.f + j * 8);
        else acc = fma_rn(weights[j / KB], dot<T>(f[i % D], sh.q[j], sh.q[j + staged_blocks], sh.s[j]), acc);
      }
      if (i + D < NI) issue(w, ids, row, i + D);
    }
    return acc;
  }
};

// C columns from blockIdx.y * C on, and 16 rows. An expert's dots with the columns that chose it, block by block, are kept
// until all are there: a single step adds them up in the order of a column's choice.
template <int C> struct Together {
  static constexpr int TOP = Choice::CHOSEN, FF = Weight::COLS, ROWS = Weight::ROWS, SHARED_FF = SharedDown::COLS,
                       SIZE = TOP * FF + SHARED_FF, KB = FF / 32, SHARED_KB = SHARED_FF / 32, ALL = TOP * KB;
  using Rows = Span<Weight, 16, KB, C>;
  using SharedRows = Span<SharedDown, 16, SHARED_FF ? SHARED_KB : 1, C>;
  // Dots of a row, and of a column; of the shared expert both factors of each.
  static constexpr int ROW = ALL | 1, COLUMN = 16 * ROW + 4, SHARED_ROW = SHARED_KB | 1;
  static constexpr int DOTS = 4 * C * COLUMN, PAIRS = 8 * C * 16 * SHARED_ROW;
  static constexpr int KEPT = ((DOTS > PAIRS ? DOTS : PAIRS) + 15) / 16 * 16;
  static constexpr int INPUT_AT = Rows::BYTES > SharedRows::BYTES ? Rows::BYTES : SharedRows::BYTES,
                       LONGEST = KB > SHARED_KB ? KB : SHARED_KB, STAGE = INPUT_AT + LONGEST * C * 40;
  static constexpr int FIT = (RING_SHARED - KEPT) / STAGE, STAGES = FIT < 8 ? FIT : 8;
  static_assert(STAGES >= 2, "too little shared memory");

  const Args &a;
  u8 *pool;
  const Chosen<Choice, C> &chosen;
  float *shared_sums;  // (C, 16)
  int row, from;       // first row and column

  DEVICE u8 *stage(int i) const { return pool + KEPT + i % STAGES * STAGE; }
  // Stage `i` is expert i of those chosen, behind the shared one where there is one.
  static constexpr int FIRST = SHARED_FF > 0 ? 1 : 0;
  DEVICE void weights(int i) const {
    if (i < FIRST) {
      if constexpr (SHARED_FF > 0) SharedRows::copy(stage(i), a.shared, SharedDown::START + row, ROWS - 1 - row, 0);
    } else if (i < FIRST + chosen.count)
      Rows::copy(stage(i), a.w, (u64)chosen.experts[i - FIRST] * ROWS + row, ROWS - 1 - row, 0);
  }
  template <int BLOCKS> DEVICE void input(V4 *to, int which) const {
    u8 *scales = (u8 *)(to + BLOCKS * C * 2);
    for (int i = threadIdx.x; i < BLOCKS * C * 2; i += THREADS) {
      const int c = i / (BLOCKS * 2), half = i / BLOCKS % 2, block = i % BLOCKS, slot = slot_of(which, c);
      if (slot >= 0)
        copy_async(to + (block * 2 + half) * C + c,
            a.src_q + (u64)(from + c) * (SIZE / 16) + half * (SIZE / 32) + slot * KB + block, true);
    }
    for (int i = threadIdx.x; i < BLOCKS * C; i += THREADS) {
      const int c = i / BLOCKS, block = i % BLOCKS, slot = slot_of(which, c);
      if (slot >= 0)
        copy_async_few<8>(scales + (block * C + c) * 8, a.src_s + (u64)(from + c) * (SIZE / 32) + slot * KB + block);
    }
  }
  DEVICE int slot_of(int which, int column) const { return which < 0 ? TOP : chosen.slots[which][column]; }
  DEVICE void input(int i) const {
    if (i < FIRST) {
      if constexpr (SHARED_FF > 0) input<SHARED_KB>((V4 *)(stage(i) + INPUT_AT), -1);
    } else if (i < FIRST + chosen.count) input<KB>((V4 *)(stage(i) + INPUT_AT), i - FIRST);
  }
  // keep(column, row, block, term) for each product of stage `i`.
  template <class R, int BLOCKS, class Keep> DEVICE void multiply(int i, const Keep &keep) const {
    const int lane = threadIdx.x % 32;
    const V4 *q = (const V4 *)(stage(i) + INPUT_AT);
    for (int block = threadIdx.x / 32; block < BLOCKS; block += WARPS) {
      u32 b[2];
      Scale s[2];
      F2 terms[2 * R::OWN];
      Columns<C>(q, (const Scale *)(q + BLOCKS * C * 2), block, 0).get(b, s, 0);
      R::products(terms, R::fragment(stage(i), lane / 4, block), b[0], b[1], s);
#pragma unroll
      for (int e = 0; e < 2 * R::OWN; e++)
        keep(lane % 4 * 2 % C + e % 2, lane / 4 + own_row<C>(e / 2), block, terms[e]);
    }
  }
  DEVICE void run(int columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = FIRST + chosen.count;
    float *dots = (float *)pool;
    F2 *pairs = (F2 *)pool;
    for (int i = 0; i < STAGES - 1; i++) weights(i);
    grid_wait();
    for (int i = 0; i < STAGES - 1; i++) {
      input(i);
      copy_commit();
    }
    for (int i = 0; i < all; i++) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      weights(i + STAGES - 1);
      input(i + STAGES - 1);
      copy_commit();
      if (i >= FIRST) {
        const signed char *slots = chosen.slots[i - FIRST];
        multiply<Rows, KB>(i, [&](int c, int r, int block, const F2 &t) {
          if (slots[c] >= 0) dots[c * COLUMN + r * ROW + slots[c] * KB + block] = mul_rn(t.x, t.y);
        });
      } else if constexpr (SHARED_FF > 0) {
        multiply<SharedRows, SHARED_KB>(
            i, [&](int c, int r, int block, const F2 &t) { pairs[(c * 16 + r) * SHARED_ROW + block] = t; });
        __syncthreads();
        for (int j = warp; j < C * 16; j += WARPS) {
          float sum = 0;
          for (int k = lane; k < SHARED_KB; k += 32) {
            const F2 t = pairs[j * SHARED_ROW + k];
            sum = fma_rn(t.x, t.y, sum);
          }
          sum = warp_sum(sum);
          if (lane == 0) shared_sums[j] = sum;
        }
        __syncthreads();
      }
    }
    __syncthreads();
    for (int j = warp; j < columns * 16; j += WARPS) {
      const int c = j / 16, r = j % 16;
      float part = 0;
#pragma unroll
      for (int k = lane; k < ALL; k += 32) part = fma_rn(chosen.weights[c][k / KB], dots[c * COLUMN + r * ROW + k], part);
      if (row + r >= ROWS) continue;
      if (a.bias)
        for (int k = lane; k < TOP; k += 32)
          part = fma_rn(chosen.weights[c][k], a.bias[(u64)chosen.ids[c][k] * ROWS + row + r], part);
      float sum = warp_sum(part);
      if (SHARED_FF > 0) sum += shared_sums[j];
      float &x = a.x[(u64)(from + c) * ROWS + row + r];
      if (lane == 0) x = fma_rn(OUT_SCALE, sum, ADD ? x : 0);
    }
  }
};
template <int C> DEVICE void tiled(const Args &a) {
  DYNAMIC_SHARED(pool);
  __shared__ Chosen<Choice, C> chosen;
  __shared__ float shared_sums[C * 16];
  const int from = blockIdx.y * C, columns = min(a.state[COUNT] - from, C);
  if (columns <= 0) return;
  chosen.decide(a.router + from * Choice::EXPERTS, a.selection_bias, a.expert_scale, columns);
  Together<C>{a, (u8 *)pool, chosen, shared_sums, (int)blockIdx.x * 16, from}.run(columns);
}

DEVICE void run(Args a) {
  if constexpr (TILED) return tiled<AT_ONCE>(a);
  constexpr int TOP = Choice::CHOSEN, FF = Weight::COLS, ROWS = Weight::ROWS, SHARED_FF = SharedDown::COLS,
                SIZE = TOP * FF + SHARED_FF;
  const int column = COLUMNS == 1 ? 0 : blockIdx.y;
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.x += column * ROWS;
  a.router += column * Choice::EXPERTS;
  if constexpr (IN_QUANTISED) {
    a.src_q += column * SIZE / 16;
    a.src_s += column * SIZE / 32;
  } else a.src += column * SIZE;
  const Shared sh = staging<SIZE, QUANTISED, false, 1>(a.src);
  __shared__ int ids[TOP];
  __shared__ float weights[TOP];
  const int row = blockIdx.x * WARPS + threadIdx.x / 32, r = row < ROWS ? row : ROWS - 1;
  Dot<SharedDown::TYPE, SHARED_FF ? SHARED_FF : 32, 32, 1, 1, SHARED_DEPTH, 1> shared;
  if constexpr (SHARED_FF > 0) {
    shared.row[0] = SharedDown::START + r;
    shared.point(a.shared, SharedDown::BLOCKS);
    shared.prefetch();
  }
  if (threadIdx.x < 32) choose<Choice>(a.router, a.selection_bias, a.expert_scale, ids, weights);
  __syncthreads();
  Experts<Weight, TOP> experts;
  experts.prefetch(a.w, ids, r);
  grid_wait();
  Stage<SIZE, false, QUANTISED, false, 1> stage;
  stage.finish(activations<IN_QUANTISED>(a, SIZE), sh);
  float part = experts.run(a.w, ids, weights, r, sh, SIZE / 32);
  if (a.bias)
    for (int k = threadIdx.x % 32; k < TOP; k += 32) part = fma_rn(weights[k], a.bias[(u64)ids[k] * ROWS + r], part);
  float acc = warp_sum(part);
  if constexpr (SHARED_FF > 0) {
    shared.run(sh, SIZE, TOP * FF);
    if (threadIdx.x % 32 == 0) acc += shared.acc[0][0];
  }
  if (threadIdx.x % 32 == 0 && row < ROWS) a.x[row] = fma_rn(OUT_SCALE, acc, ADD ? a.x[row] : 0);
}
