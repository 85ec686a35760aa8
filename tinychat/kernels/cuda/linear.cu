// Decode: up to six matrices over one input, normed or not: dst = weight @ input (+ bias), or dst += OUT_SCALE *
// that. Rows of `src` and `dst` are columns of the step.
#include "tiles.cuh"

struct Args {
  const float *src = nullptr;
  const V4 *src_q = nullptr;  // the input where IN_QUANTISED, and for columns of quantised matrices
  const Scale *src_s = nullptr;
  const float *norms = nullptr;  // (columns): what remains of RMSNorm there
  float *dst[6] = {};
  const float *bias[6] = {};
  const int *state = nullptr;
  const float *gain = nullptr;
  const u8 *w[6] = {};
  u64 *cleared = nullptr;  // CLEARED words, which the kernel behind writes
};

template <class P> DEVICE auto put(float *dst, const float *bias) {
  if constexpr (ADD) return Add{dst + P::START, bias, OUT_SCALE, P::PITCH};
  else return Put{dst + P::START, bias, OUT_SCALE, SOFTCAP, P::PITCH};
}

constexpr bool STAGE_FLOATS = FLOATING && NORMED;  // else floating-point matrices read the input where it lies

// Matrix I times the columns of a verify step.
template <int I, class P> DEVICE void tiled(const Args &a, const Shared &sh, int b) {
  using W = typename P::Weight;
  Tiles<W, W, typename P::Spread, COLUMNS, 1, false, P::GRID_BLOCKS> tiles;
  tiles.begin(sh.q, a.w[I], nullptr, b);
  grid_wait();
  const Quantised input{a.src_q, a.src_s};
  tiles.begin(input, b);
  const auto out = put<P>(a.dst[I], a.bias[I]);
  static_assert(!NORMED || !ADD, "one of them is known");
  tiles.run(
      input,
      [&](int column, int row) {
        if constexpr (ADD) return out.before(column, row);
        else return NORMED ? a.norms[column] : 1.f;
      },
      [&](int column, int row, float x, float, float known) {
        if constexpr (ADD) out(column, row, x, known);
        else out(column, row, NORMED ? mul_rn(x, known) : x);
      },
      [](int, bool) {}, b);
}

// The blocks of part I and of those behind it.
template <int I, class P, class... Rest> DEVICE void parts(const Args &a, const Shared &sh, List<P, Rest...>) {
  const int b = (int)blockIdx.x - P::GRID_FIRST;
  if (b >= 0 && b < P::GRID_BLOCKS) {
    if constexpr (TILE && !is_float(P::Weight::TYPE)) tiled<I, P>(a, sh, b);
    else {
      const auto input = activations<IN_QUANTISED>(a, COLS, LAST_TOKEN ? (u64)(a.state[COUNT] - 1) * COLS : 0);
      linear<typename P::Weight, typename P::Spread, P::GRID_BLOCKS, NORMED, QUANTISED && !TILE, STAGE_FLOATS, COLUMNS>(
          a.w[I], 0, b, input, a.gain, EPS, sh, put<P>(a.dst[I], a.bias[I]));
    }
  }
  if constexpr (sizeof...(Rest) > 0) parts<I + 1>(a, sh, List<Rest...>{});
}

DEVICE void run(const Args &a) {
  if (EARLY) grid_launch();
  if constexpr (TILE && !FLOATING) {
    DYNAMIC_SHARED(pool);
    parts<0>(a, Shared{pool, nullptr, nullptr, nullptr}, Parts{});
  } else {
    parts<0>(a, staging < COLS, QUANTISED && !TILE, STAGE_FLOATS, COLUMNS > (a.src), Parts{});
  }
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < CLEARED; i += THREADS) a.cleared[i] = 0;
}
