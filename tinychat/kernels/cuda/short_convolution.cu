// Decode: the gated short convolution (kernels/blocks.py, ShortConvolution): a thread per channel.
#include "matvec.cuh"
#include "carried.cuh"

struct Args {
  const float *src = nullptr;  // (3, CHANNELS): b, c and z
  float *dst = nullptr;        // (CHANNELS), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  float *slots = nullptr;
  const float *conv = nullptr;  // (CHANNELS, TAPS)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  const int i = blockIdx.x * THREADS + threadIdx.x, channel = min(i, CHANNELS - 1), pos = a.state[POS];
  Taps taps;
  taps.load(a.conv, carried(a.slots, pos), channel, !pos);
  grid_wait();
  const float input = a.src[channel] * a.src[2 * CHANNELS + channel], y = a.src[CHANNELS + channel] * taps.run(input);
  if (i < CHANNELS) taps.store(carried(a.slots, pos + 1), i, input);
  if constexpr (OUT_QUANTISED) {
    if (i < CHANNELS) put_block(y, a.dst_q, a.dst_s, CHANNELS / 32, i / 32);
  } else if (i < CHANNELS) a.dst[i] = y;
}
