// What a layer carries from token to token (kernels/blocks.py, LayerState): the last inputs of its convolution, (TAPS -
// 1, CHANNELS), and behind them a matrix per head. What it is behind n tokens lies in slot n % SLOTS, so that a step
// leaves those of the last tokens: steps that were enqueued ahead, and drafts, can be for nothing. The slot behind them
// is for the state that a prompt leaves on the way (KEPT). Constants: TAPS, CHANNELS, SLOTS, SLOT_VALUES.

DEVICE float *carried(float *slots, int tokens) { return slots + (u64)(tokens % SLOTS) * SLOT_VALUES; }
DEVICE float *kept_slot(float *slots) { return slots + (u64)SLOTS * SLOT_VALUES; }

DEVICE float silu(float x) { return x * sigmoid(x); }

// Decode: the convolution of one channel. load() comes before grid_wait(), since all of it is older than this step.
struct Taps {
  float before[TAPS - 1], weight[TAPS];
  // `own`: the weights of this channel.
  DEVICE void load(const float *own, const float *tail, int channel, bool fresh) {
#pragma unroll
    for (int j = 0; j < TAPS; j++) weight[j] = unbits(ldc4(own + j));
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++)
      before[j] = fresh ? 0 : *(const volatile float *)(tail + j * CHANNELS + channel);  // past the first-level cache
  }
  DEVICE float run(float input) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) sum += before[j] * weight[j];
    return sum + input * weight[TAPS - 1];
  }
  DEVICE void take(float input) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) before[j] = j < TAPS - 2 ? before[j + 1 < TAPS - 1 ? j + 1 : 0] : input;
  }
  DEVICE void store(float *tail, int channel) const {
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) tail[j * CHANNELS + channel] = before[j];
  }
};

constexpr int TOGETHER = 8;  // tokens that a thread takes in a row
static_assert(TAPS - 1 <= TOGETHER, "only the first of them see the tail");

// Prompts: tokens first .. first + TOGETHER - 1 of the step's `count`, four channels from `channel` on, whose weights
// are at `own`. input(t): theirs at token t; use(t, sums): what becomes of them. The thread that has the first tokens
// moves the tail on if it is the `owner` of the channels, and leaves that behind `kept` tokens.
template <class Input, class Use>
DEVICE void convolve(const float *own, float *slots, int pos, int count, int kept, int first, int channel, bool owner,
    const Input &input, const Use &use) {
  F4 weight[TAPS], x[TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; j++)
    weight[j] = F4{own[j], own[TAPS + j], own[2 * TAPS + j], own[3 * TAPS + j]};
  const float *tail = carried(slots, pos);
  auto at = [&](int t) {
    if (t >= 0) return input(t);
    return pos ? *(const F4 *)(tail + (t + TAPS - 1) * CHANNELS + channel) : F4{0, 0, 0, 0};
  };
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) x[j + 1] = at(first + j - (TAPS - 1));
#pragma unroll
  for (int i = 0; i < TOGETHER; i++) {
    if (first + i >= count) break;
    F4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) x[j] = x[j + 1];
    x[TAPS - 1] = input(first + i);
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
      sum.x += x[j].x * weight[j].x;
      sum.y += x[j].y * weight[j].y;
      sum.z += x[j].z * weight[j].z;
      sum.w += x[j].w * weight[j].w;
    }
    use(first + i, sum);
  }
  if (first == 0 && owner) {  // in order: where both slots are one, a row is read before it is written
    float *next = carried(slots, pos + count);
    for (int j = 0; kept && j < TAPS - 1; j++)
      *(F4 *)(kept_slot(slots) + j * CHANNELS + channel) = at(kept - (TAPS - 1) + j);
    for (int j = 0; j < TAPS - 1; j++) *(F4 *)(next + j * CHANNELS + channel) = at(count - (TAPS - 1) + j);
  }
}
