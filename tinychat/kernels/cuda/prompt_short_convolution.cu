// Prompts: the gated short convolution (kernels/blocks.py, ShortConvolution) as halves in the order the products read.
// A thread takes four channels of TOGETHER tokens.
#include "halves.cuh"
#include "carried.cuh"

struct Args {
  u16 *dst = nullptr;          // (tokens, padded(CHANNELS))
  const float *src = nullptr;  // (tokens, 3, CHANNELS): b, c and z
  float *slots = nullptr;
  const float *conv = nullptr;  // (CHANNELS, TAPS)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  const int channel = (blockIdx.x * THREADS + threadIdx.x) * 4, first = blockIdx.y * TOGETHER;
  const int count = a.state[COUNT], pos = a.state[POS];
  grid_wait();
  if (first >= count || channel >= padded(CHANNELS)) return;
  auto put = [&](int t, F4 v) {
    u16 *dst = a.dst + (u64)t * padded(CHANNELS) + place(channel);
    *(u32 *)dst = pack(v.x, v.y);
    *(u32 *)(dst + 8) = pack(v.z, v.w);
  };
  if (channel >= CHANNELS) {
    for (int t = first; t < min(first + TOGETHER, count); t++) put(t, F4{0, 0, 0, 0});
    return;
  }
  auto part = [&](int t, int n) { return *(const F4 *)(a.src + ((u64)t * 3 + n) * CHANNELS + channel); };
  convolve(
      a.conv + channel * TAPS, a.slots, pos, count, a.state[KEPT], first, channel, true,
      [&](int t) {
        const F4 b = part(t, 0), z = part(t, 2);
        return F4{b.x * z.x, b.y * z.y, b.z * z.z, b.w * z.w};
      },
      [&](int t, F4 sum) {
        const F4 c = part(t, 1);
        put(t, F4{c.x * sum.x, c.y * sum.y, c.z * sum.z, c.w * sum.w});
      });
}
