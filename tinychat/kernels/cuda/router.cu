// Prompts: router logits and choice of experts for TOKENS tokens per cluster of CLUSTER blocks, which share the experts;
// float32 all through. And the tokens' normed values as halves.
#include "halves.cuh"
#include "routing.cuh"

struct Args {
  int *ids = nullptr;        // (tokens, chosen)
  float *weights = nullptr;  // (tokens, chosen)
  u16 *normed = nullptr;     // (tokens, padded(columns)), in the order the products read
  const u8 *w = nullptr;
  const float *x = nullptr;
  const float *gain = nullptr;
  const float *selection_bias = nullptr;
  const float *router_bias = nullptr;
  const float *expert_scale = nullptr;
  const int *state = nullptr;
  float *counts = nullptr;  // (tokens): how often the shared expert counts, where there is a
  const float *shared_scale = nullptr;  // (columns)
  int *routes = nullptr;  // as in experts_down.cu, of the last token
};

constexpr int NORMING = WARPS / TOKENS;  // warps of a token
constexpr int TOGETHER = 4;  // experts of a warp at a time
constexpr int EXPERTS = Choice::EXPERTS, MINE = (EXPERTS + CLUSTER - 1) / CLUSTER;  // experts; those of a block
constexpr int GROUPS = (MINE + TOGETHER - 1) / TOGETHER;  // PARTS warps share experts, each with a part of the columns
constexpr int BLOCKS = Weight::COLS / 8, STEPS = (BLOCKS + 32 * PARTS - 1) / (32 * PARTS), DEPTH = STEPS < 2 ? 1 : 2;

struct Memory {
  alignas(16) float xn[TOKENS][Weight::COLS];
  float red[TOKENS][NORMING], logits[TOKENS][PARTS][EXPERTS], weights[TOKENS][Choice::CHOSEN];
  int ids[TOKENS][Choice::CHOSEN];
};

// The sums of a warp's experts over its part of the columns; weights of the first of them are on their way early.
struct Sums {
  Block<Weight::TYPE> f[DEPTH][TOGETHER];
  const u8 *w;
  int first, part;  // expert
  DEVICE void issue(int slot, int step) {
    const int j = (step * PARTS + part) * 32 + threadIdx.x % 32;
    if (j < BLOCKS)
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        fetch<Weight::TYPE>(f[slot][i], w, Weight::BLOCKS, (u64)min(first + i, EXPERTS - 1) * BLOCKS + j);
  }
  DEVICE void begin(const u8 *weights, int expert, int of) {
    w = weights;
    first = expert;
    part = of;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) issue(d, d);
  }
  DEVICE void run(const Memory &m, float (&acc)[TOGETHER][TOKENS]) {
    for (int step = 0; step < STEPS; step += DEPTH)
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        const int j = ((step + d) * PARTS + part) * 32 + threadIdx.x % 32;
        if (j < BLOCKS)
#pragma unroll
          for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) acc[i][t] += dot<Weight::TYPE>(f[d][i], m.xn[t] + j * 8);
        issue(d, step + d + DEPTH);
      }
  }
};

DEVICE void run(const Args &a) {
  constexpr int COLS = Weight::COLS;
  static_assert(CLUSTER == 1 || TOKENS == CLUSTER, "a block chooses a token's experts");
  CLUSTER_SHARED(Memory, m);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = CLUSTER > 1 ? cluster_rank() : 0,
            first = blockIdx.x / CLUSTER * TOKENS, count = a.state[COUNT];
  if (first >= count) return;
  if (CLUSTER > 1) cluster_arrive_relaxed();  // waited for before the first write into another block's memory
  Sums sums;
  sums.begin(a.w, rank * MINE + warp % GROUPS * TOGETHER, warp / GROUPS);
  SelectionBias<Choice> bias;
  bias.load(a.selection_bias);
  grid_wait();
  const int normed_token = warp / NORMING, mine = warp % NORMING * 128 + lane * 4;
  const u64 row = min(first + normed_token, count - 1);
  const float *src = a.x + row * COLS;
  float ss = 0;
#pragma unroll 4
  for (int i = mine; i < COLS; i += 128 * NORMING) {
    const F4 v = *(const F4 *)(src + i);
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  ss = warp_sum(ss);
  if (lane == 0 && normed_token < TOKENS) m.red[normed_token][warp % NORMING] = ss;
  __syncthreads();
  if (normed_token < TOKENS) {
    ss = 0;
#pragma unroll
    for (int i = 0; i < NORMING; i++) ss += m.red[normed_token][i];
    const float r = rsqrt_(ss / COLS + EPS);
    u16 *normed = a.normed + row * padded(COLS);
#pragma unroll 4
    for (int i = mine; i < padded(COLS); i += 128 * NORMING) {
      F4 v = {0, 0, 0, 0};
      if (i < COLS) {
        const F4 x = *(const F4 *)(src + i), g = *(const F4 *)(a.gain + i);
        v = F4{x.x * r * g.x, x.y * r * g.y, x.z * r * g.z, x.w * r * g.w};
        *(F4 *)(m.xn[normed_token] + i) = v;
      }
      if (CLUSTER > 1 && normed_token != rank) continue;
      *(u32 *)(normed + place(i)) = pack(v.x, v.y);
      *(u32 *)(normed + place(i) + 8) = pack(v.z, v.w);
    }
  }
  __syncthreads();
  const auto chooses = [&](int t) { return t < TOKENS && first + t < count && (CLUSTER == 1 || t == rank); };
  if (a.shared_scale && chooses(warp)) {
    float acc = 0;
    for (int i = lane; i < COLS; i += 32) acc += m.xn[warp][i] * a.shared_scale[i];
    acc = warp_sum(acc);
    if (lane == 0) a.counts[first + warp] = sigmoid(acc);
  }
  if (CLUSTER > 1) cluster_wait();
  const int part = warp / GROUPS;
  if (part < PARTS)
    for (int e = rank * MINE + warp % GROUPS * TOGETHER; e < min(rank * MINE + MINE, EXPERTS); e += WARPS * TOGETHER) {
      float acc[TOGETHER][TOKENS] = {};
      if (e >= rank * MINE + WARPS * TOGETHER) sums.begin(a.w, e, part);
      sums.run(m, acc);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
          const float v = warp_sum(acc[i][t]);
          if (lane || e + i >= min(rank * MINE + MINE, EXPERTS)) continue;
          (CLUSTER > 1 ? peer(m.logits[t][part], t) : m.logits[t][part])[e + i] =
              a.router_bias && part == 0 ? v + a.router_bias[e + i] : v;
        }
    }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else __syncthreads();
  if (chooses(warp)) {
    if (PARTS > 1)
      for (int e = lane; e < EXPERTS; e += 32) {
        float sum = m.logits[warp][0][e];
#pragma unroll
        for (int p = 1; p < PARTS; p++) sum += m.logits[warp][p][e];
        m.logits[warp][0][e] = sum;
      }
    warp_sync();
    choose<true>(m.logits[warp][0], bias, m.ids[warp], m.weights[warp]);
    weigh<Choice>(a.expert_scale, m.ids[warp], m.weights[warp]);
    for (int k = lane; k < Choice::CHOSEN; k += 32) {
      a.ids[(first + warp) * Choice::CHOSEN + k] = m.ids[warp][k];
      a.weights[(first + warp) * Choice::CHOSEN + k] = m.weights[warp][k];
      if (a.routes && first + warp == count - 1)
        a.routes[(a.state[POS] + first + warp) % ROUTE_SLOTS * ROUTES + k] = m.ids[warp][k];
    }
  }
}
