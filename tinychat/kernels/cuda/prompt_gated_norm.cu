// Prompts: RMSNorm of each head of the gated delta rule's outputs, times silu of their gate (its sigmoid where BY_CHANNEL), as halves in the order the
// products read. A warp takes a head of a token.
#include "halves.cuh"
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  u16 *dst = nullptr;          // (tokens, padded(HEADS * VALUE_DIM))
  const float *src = nullptr;  // (tokens, HEADS, VALUE_DIM)
  const float *gate = nullptr;
  const float *gain = nullptr;  // (VALUE_DIM)
  const int *state = nullptr;
};

DEVICE void run(const Args &a) {
  constexpr int ROW = HEADS * VALUE_DIM;
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, i = threadIdx.x % 32 * 4, t = blockIdx.y;
  if (t >= a.state[COUNT] || head >= HEADS) return;
  grid_wait();
  u16 *dst = a.dst + (u64)t * padded(ROW);
  const u64 at = (u64)t * ROW + head * VALUE_DIM + i;
  F4 v = {0, 0, 0, 0}, g = v, gain = v;
  if (i < VALUE_DIM) {
    v = *(const F4 *)(a.src + at);
    g = *(const F4 *)(a.gate + at);
    gain = *(const F4 *)(a.gain + i);
  }
  const float r = rsqrt_(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / VALUE_DIM + EPS);
  const int to = place(head * VALUE_DIM + i);
  if (i < VALUE_DIM) {
    *(u32 *)(dst + to) = pack(v.x * r * gain.x * gate_of(g.x), v.y * r * gain.y * gate_of(g.y));
    *(u32 *)(dst + to + 8) = pack(v.z * r * gain.z * gate_of(g.z), v.w * r * gain.w * gate_of(g.w));
  }
  if (head == HEADS - 1 && ROW + i < padded(ROW))
    *(u32 *)(dst + place(ROW + i)) = *(u32 *)(dst + place(ROW + i) + 8) = 0;
}
