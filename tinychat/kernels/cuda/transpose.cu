// At load: a legacy kv_b's K part, (COLS, ROWS) per head, as rows of halves: dst[g][r][c] = row c, column r of matrix
// g.

struct Args {
  u16 *dst = nullptr;
  const u8 *w = nullptr;
};

DEVICE void run(const Args &a) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= TOTAL) return;
  const int c = i % Weight::COLS, r = i / Weight::COLS % Weight::ROWS, g = i / Weight::COLS / Weight::ROWS;
  a.dst[i] = float_to_half(
      weight_at<Weight::TYPE>(a.w, Weight::BLOCKS, ((u64)g * Weight::STRIDE + Weight::START + c) * Weight::ROWS + r));
}
