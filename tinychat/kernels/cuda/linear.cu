// Decode: up to four matrices over one input, normed or not: dst = weight @ input (+ bias), or dst += OUT_SCALE *
// that. Rows of `src` and `dst` are columns of the step. IN_PLACE: int8 blocks that are too many for shared memory.
#include "matvec.cuh"

struct Args {
  const float *src = nullptr;
  const V4 *src_q = nullptr;  // the input where IN_QUANTISED
  const Scale *src_s = nullptr;
  float *dst[4] = {};
  const float *bias[4] = {};
  const int *state = nullptr;
  const float *gain = nullptr;
  const u8 *w[4] = {};
};

template <bool ADDED> DEVICE auto put(float *dst, const float *bias, int rows) {
  if constexpr (ADDED) return Add{dst, bias, OUT_SCALE, rows};
  else return Put{dst, bias, OUT_SCALE, SOFTCAP, rows};
}

constexpr bool STAGE_FLOATS = FLOATING && NORMED;  // else floating-point matrices read the input where it lies

// The blocks of part I and of those behind it.
template <int I, class P, class... Rest> DEVICE void parts(const Args &a, const Shared &sh, List<P, Rest...>) {
  const int b = (int)blockIdx.x - P::GRID_FIRST;
  if (b >= 0 && b < P::GRID_BLOCKS) {
    const auto input =
        activations<IN_QUANTISED, IN_PLACE>(a, COLS, LAST_TOKEN ? (u64)(a.state[COUNT] - 1) * COLS : 0);
    linear<typename P::Weight, typename P::Spread, NORMED, QUANTISED, STAGE_FLOATS, COLUMNS>(
        a.w[I], 0, b, input, a.gain, EPS, sh, put<ADD>(a.dst[I], a.bias[I], P::Weight::ROWS));
  }
  if constexpr (sizeof...(Rest) > 0) parts<I + 1>(a, sh, List<Rest...>{});
}

DEVICE void run(const Args &a) {
  if constexpr (IN_PLACE) {
    __shared__ float red[96 * COLUMNS];
    parts<0>(a, Shared{(V4 *)a.src_q, (Scale *)a.src_s, nullptr, red}, Parts{});
  } else {
    parts<0>(a, staging<COLS, QUANTISED, STAGE_FLOATS, COLUMNS>(a.src), Parts{});
  }
}
