// Decode: the gated short convolution (kernels/blocks.py, ShortConvolution): a thread per channel.
#include "matvec.cuh"
#include "carried.cuh"

struct Args {
  const float *src = nullptr;  // (columns, 3, CHANNELS): b, c and z
  float *dst = nullptr;        // (columns, CHANNELS), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  float *slots = nullptr;
  const float *conv = nullptr;  // (CHANNELS, TAPS)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  const int i = blockIdx.x * THREADS + threadIdx.x, channel = min(i, CHANNELS - 1), pos = a.state[POS];
  Taps taps;
  taps.load(a.conv + channel * TAPS, carried(a.slots, pos), channel, !pos);
  grid_wait();
  const int count = COLUMNS == 1 ? 1 : a.state[COUNT];
  for (int c = 0; c < count; c++) {  // columns of the step, in order
    const float *src = a.src + c * 3 * CHANNELS + channel;
    const float input = src[0] * src[2 * CHANNELS], y = src[CHANNELS] * taps.run(input);
    taps.take(input);
    if (i >= CHANNELS) continue;
    taps.store(carried(a.slots, pos + c + 1), i);
    if constexpr (OUT_QUANTISED)
      put_block<COLUMNS>(y, a.dst_q, a.dst_s, c, CHANNELS / 32, i / 32);
    else a.dst[c * CHANNELS + i] = y;
  }
}
