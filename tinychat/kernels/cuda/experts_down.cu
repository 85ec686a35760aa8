// Decode: x += OUT_SCALE * (sum over the chosen experts of weight * (down @ its part of src + bias) + the shared
// expert's down @ its part). A warp per row, for TOGETHER columns of a step, one after the other: the weights of the next
// column are on their way meanwhile. Takes the choice that experts_up has left, or chooses again where it has not yet, so
// that the experts' weights are on the way while experts_up still runs.
#include "matvec.cuh"
#include "routing.cuh"

struct Args {
  const float *src = nullptr;
  const V4 *src_q = nullptr;  // src where IN_QUANTISED
  const Scale *src_s = nullptr;
  const u64 *choice = nullptr;    // (columns, chosen)
  const float *router = nullptr;  // its logits, (columns, experts)
  const float *selection_bias = nullptr;
  float *x = nullptr;
  const u8 *w = nullptr;
  const int *state = nullptr;
  const u8 *shared = nullptr;
  const float *bias = nullptr;  // (experts, rows)
  const float *expert_scale = nullptr;
  const float *shared_scale = nullptr;  // (columns): the shared expert counts its sigmoid times, where there is one
};

// The part of the row that this warp has of all chosen experts: sum of weight * (down[e] @ part e), a lane's share of
// it.
template <class W, int TOP> struct Experts {
  static constexpr int T = W::TYPE, FF = W::COLS, ROWS = W::ROWS, KB = FF / block_of(T), ALL = KB * TOP,
                       NI = (ALL + 31) / 32, D = NI < 10 ? NI : 8;
  Block<T> f[D];
  DEVICE void issue(const u8 *w, const int *ids, int row, int i) {
    const int j = i * 32 + threadIdx.x % 32;
    if (j < ALL) fetch<T>(f[i % D], w, W::BLOCKS, ((u64)ids[j / KB] * ROWS + row) * KB + j % KB);
  }
  DEVICE void prefetch(const u8 *w, const int *ids, int row) {
#pragma unroll
    for (int i = 0; i < D; i++) issue(w, ids, row, i);
  }
  // Of staged column `column`, whose columns have `staged` values.
  DEVICE float run(
      const u8 *w, const int *ids, const float *weights, int row, const Shared &sh, int column, int staged) {
    const int plane = staged / 32, first = 2 * column * plane;
    float acc = 0;
#pragma unroll
    for (int i = 0; i < NI; i++) {
      const int j = i * 32 + threadIdx.x % 32;
      if (j < ALL) {
        float part;
        if constexpr (is_float(T)) part = dot<T>(f[i % D], sh.f + column * staged + j * 8);
        else part = dot<T>(f[i % D], sh.q[first + j], sh.q[first + plane + j], sh.s[column * plane + j]);
        acc = fma_rn(weights[j / KB], part, acc);
      }
      if (i + D < NI) issue(w, ids, row, i + D);
    }
    return acc;
  }
};

DEVICE void run(Args a) {
  constexpr int TOP = Choice::CHOSEN, FF = Weight::COLS, ROWS = Weight::ROWS, SHARED_FF = SharedDown::COLS,
                SIZE = TOP * FF + SHARED_FF;
  const int column = COLUMNS == 1 ? 0 : blockIdx.y * TOGETHER;  // the block's first
  const int count = COLUMNS == 1 ? 1 : min(a.state[COUNT] - column, TOGETHER);
  if (COLUMNS > TOGETHER && count <= 0) return;
  a.x += column * ROWS;
  a.router += column * Choice::EXPERTS;
  if constexpr (IN_QUANTISED) {
    a.src_q += column * SIZE / 16;
    a.src_s += column * SIZE / 32;
  } else a.src += column * SIZE;
  const Shared sh = staging<SIZE, QUANTISED, false, TOGETHER>(a.src);
  __shared__ int ids[TOGETHER][TOP];
  __shared__ float weights[TOGETHER][TOP];
  const int warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp, r = row < ROWS ? row : ROWS - 1;
  Dot<SharedDown::TYPE, SHARED_FF ? SHARED_FF : 32, 32, 1, 1, SHARED_DEPTH, TOGETHER> shared;
  if constexpr (SHARED_FF > 0) {
    shared.row[0] = SharedDown::START + r;
    shared.point(a.shared, SharedDown::BLOCKS);
  }
  static_assert(TOGETHER <= WARPS, "a warp chooses the experts of a column");
  // Whether or not there are so many columns: the number is not waited for.
  if (warp < TOGETHER && !take<Choice>(a.choice + (column + warp) * TOP, ids[warp], weights[warp])) {
    SelectionBias<Choice> bias;
    bias.load(a.selection_bias);
    choose<true>(a.router + warp * Choice::EXPERTS, bias, ids[warp], weights[warp]);
    weigh<Choice>(a.expert_scale, ids[warp], weights[warp]);
  }
  __syncthreads();
  if constexpr (SHARED_FF > 0) shared.prefetch();  // behind the choice, which would wait for it
  Experts<Weight, TOP> experts[TOGETHER > 1 ? 2 : 1];
  experts[0].prefetch(a.w, ids[0], r);
  float before[TOGETHER];  // volatile: past the first-level cache
#pragma unroll
  for (int c = 0; c < TOGETHER; c++)
    before[c] = ADD && c < count && threadIdx.x % 32 == 0 ? *(const volatile float *)(a.x + c * ROWS + r) : 0;
  grid_wait();
  if constexpr (IN_QUANTISED && TOGETHER > 1) {
    for (int i = threadIdx.x; i < count * SIZE / 16; i += THREADS) copy_async(sh.q + i, a.src_q + i, true);
    for (int i = threadIdx.x; i < count * SIZE / 32; i += THREADS) copy_async_few<8>(sh.s + i, a.src_s + i);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
  } else {
    Stage<SIZE, false, QUANTISED, false, TOGETHER> stage;
    stage.finish(activations<IN_QUANTISED>(a, SIZE), sh);
  }
#pragma unroll
  for (int c = 0; c < TOGETHER; c++) {
    if (c >= count) break;
    if (c + 1 < count) experts[(c + 1) % 2].prefetch(a.w, ids[c + 1], r);
    float part = experts[c % 2].run(a.w, ids[c], weights[c], r, sh, c, SIZE);
    if (a.bias)
      for (int k = threadIdx.x % 32; k < TOP; k += 32)
        part = fma_rn(weights[c][k], a.bias[(u64)ids[c][k] * ROWS + r], part);
    float acc = warp_sum(part);
    if (SHARED_FF > 0 && c == 0) shared.run(sh, SIZE, TOP * FF);
    if (SHARED_FF > 0)
      acc = fma_rn(a.shared_scale ? sigmoid(a.shared_scale[column + c]) : 1.f, shared.acc[c][0], acc);
    if (threadIdx.x % 32 == 0 && row < ROWS) a.x[c * ROWS + r] = fma_rn(OUT_SCALE, acc, before[c]);
  }
}
