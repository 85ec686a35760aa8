// Decode: x += OUT_SCALE * (sum over the chosen experts of weight * (down @ its part of src + bias) + the shared
// expert's down @ its part). A warp per row of a column. Chooses the experts again, so that their weights are on the way while experts_up still
// runs.
#include "matvec.cuh"
#include "routing.cuh"

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
  int *routes = nullptr;  // (ROUTE_SLOTS, ROUTES): the layer's place in the first, for the chosen experts of a token
  const float *shared_scale = nullptr;  // (columns): the shared expert counts its sigmoid times, where there is one
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
        else acc += weights[j / KB] * dot<T>(f[i % D], sh.q[j], sh.q[j + staged_blocks], sh.s[j]);
      }
      if (i + D < NI) issue(w, ids, row, i + D);
    }
    return acc;
  }
};

DEVICE void run(Args a) {
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
  if (blockIdx.x == 0)
    for (int k = threadIdx.x; k < TOP; k += THREADS)
      a.routes[(a.state[POS] + column) % ROUTE_SLOTS * ROUTES + k] = ids[k];
  Experts<Weight, TOP> experts;
  experts.prefetch(a.w, ids, r);
  grid_wait();
  Stage<SIZE, false, QUANTISED, false, 1> stage;
  stage.finish(activations<IN_QUANTISED>(a, SIZE), sh);
  float part = experts.run(a.w, ids, weights, r, sh, SIZE / 32);
  if (a.bias)
    for (int k = threadIdx.x % 32; k < TOP; k += 32) part += weights[k] * a.bias[(u64)ids[k] * ROWS + r];
  float acc = warp_sum(part);
  if constexpr (SHARED_FF > 0) {
    shared.run(sh, SIZE, TOP * FF);
    const float counts = a.shared_scale ? 1.f / (1.f + expf(-a.shared_scale[column])) : 1;
    if (threadIdx.x % 32 == 0) acc += counts * shared.acc[0][0];
  }
  if (threadIdx.x % 32 == 0 && row < ROWS) a.x[row] = (ADD ? a.x[row] : 0) + OUT_SCALE * acc;
}
