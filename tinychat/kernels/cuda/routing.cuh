// The choice of experts from router logits, by one warp: ids and weights (CHOSEN each, in shared memory). See
// kernels/ops.py, Route.

// A lane's part of what is added to the scores that experts are chosen by. It is loaded early: each step reads it from
// memory, which takes longer than the rest of the choice.
template <class C> struct SelectionBias {
  static constexpr int N = (C::EXPERTS + 31) / 32;
  float of[N];
  bool none;
  DEVICE void load(const float *bias) {
    none = !bias;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int e = threadIdx.x % 32 + 32 * i;
      of[i] = bias && e < C::EXPERTS ? unbits(ldc4(bias + e)) : 0;
    }
  }
};

// The ids; `weights`, where they are asked for, are what weigh() makes of it.
template <bool WEIGHTS, class C>
DEVICE void choose(const float *logits, const SelectionBias<C> &bias, int *ids, float *weights) {
  constexpr int N = (C::EXPERTS + 31) / 32;
  const int lane = threadIdx.x % 32;
  float p[N], score[N];
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int e = lane + 32 * i;
    // volatile: past the first-level cache
    p[i] = e < C::EXPERTS ? *(const volatile float *)(logits + e) * C::LOGIT_SCALE : -INFINITY;
    top = fmaxf(top, p[i]);
  }
  warp_sync();  // else a load would wait for what is computed of the one before
  // Chances are in the order of logits: without a bias they are not needed to choose by.
  const bool by_logits = bias.none && C::GROUPS <= 1;
#pragma unroll
  for (int i = 0; i < N; i++) score[i] = p[i];
  if (by_logits && !WEIGHTS) {
  } else if (C::GATING == SOFTMAX) {
    top = warp_max(top);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      p[i] = lane + 32 * i < C::EXPERTS ? expf(p[i] - top) : 0;
      sum += p[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; i++) p[i] /= sum;
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int e = lane + 32 * i;
    if (by_logits && !WEIGHTS) continue;
    if (C::GATING == SIGMOID) p[i] = sigmoid(p[i]);
    if (C::GATING == SQRT_SOFTPLUS) p[i] = sqrtf(p[i] > 20 ? p[i] : log1pf(expf(p[i])));
    if (!by_logits) score[i] = e < C::EXPERTS ? p[i] + bias.of[i] : -INFINITY;
  }
  if (C::GROUPS > 1) {  // only the best groups stay
    constexpr int PER = C::EXPERTS / C::GROUPS;
    float group = -INFINITY;  // of group `lane`
    for (int g = 0; g < C::GROUPS; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (int j = 0; j < PER; j++) {
        const int e = g * PER + j;
        float mine = 0;
#pragma unroll
        for (int i = 0; i < N; i++) mine = e / 32 == i ? score[i] : mine;
        const float v = shfl(mine, e % 32);
        second = fmaxf(second, fminf(first, v));
        first = fmaxf(first, v);
      }
      if (lane == g) group = PER > 1 ? first + second : first;
    }
    int rank = 0;
    for (int g = 0; g < C::GROUPS; g++) {
      const float v = shfl(group, g);
      rank += v > group || (v == group && g < lane);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int e = lane + 32 * i, r = shfl(rank, e < C::EXPERTS ? e / PER : 0);
      if (e < C::EXPERTS && r >= C::GROUPS_USED) score[i] = -INFINITY;
    }
  }
  for (int k = lane; k < C::CHOSEN; k += 32) {  // what stays where logits are not numbers
    ids[k] = k;
    if (WEIGHTS) weights[k] = 0;
  }
  warp_sync();
  u32 key[N];  // sorts as the score does; 0: not to be chosen
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = lane + 32 * i < C::EXPERTS ? key_of(score[i]) : 0;
  for (int k = 0; k < C::CHOSEN; k++) {
    u32 best = 0, id = ~0u;
#pragma unroll
    for (int i = N - 1; i >= 0; i--)
      if (key[i] >= best) {
        best = key[i];
        id = lane + 32 * i;
      }
    const u32 most = warp_most(best);
    id = warp_least(best == most ? id : ~0u);
    if (most == 0) break;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (id == lane + 32 * i) {
        ids[k] = id;
        if (WEIGHTS) weights[k] = p[i];
        key[i] = 0;
      }
  }
  warp_sync();
}

template <class C> DEVICE void weigh(const float *expert_scale, const int *ids, float *weights) {
  const int lane = threadIdx.x % 32;
  constexpr int M = (C::CHOSEN + 31) / 32;  // weights of a lane
  float w[M], top_w = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < M; i++) {
    w[i] = lane + 32 * i < C::CHOSEN ? weights[lane + 32 * i] : C::GATING == SOFTMAX_WEIGHT ? -INFINITY : 0;
    top_w = fmaxf(top_w, w[i]);
  }
  if (C::GATING == SOFTMAX_WEIGHT) top_w = warp_max(top_w);
#pragma unroll
  for (int i = 0; i < M; i++) {
    if (C::GATING == SOFTMAX_WEIGHT) w[i] = lane + 32 * i < C::CHOSEN ? expf(w[i] - top_w) : 0;
    sum += w[i];
  }
  float norm = 1;
  if (C::GATING == SOFTMAX_WEIGHT) norm = warp_sum(sum);
  else if (C::NORMALIZE) norm = fmaxf(warp_sum(sum), C::MIN_WEIGHT_SUM);
  warp_sync();
#pragma unroll
  for (int i = 0; i < M; i++)
    if (lane + 32 * i < C::CHOSEN) {
      const float own = expert_scale ? expert_scale[ids[lane + 32 * i]] : 1;
      weights[lane + 32 * i] = w[i] / norm * C::SCALE * own;
    }
  warp_sync();
}

// The choice as a word per expert, which is 0 where nobody has chosen: what one block leaves for others that may read it
// before it is there. A word is written and read at once.
template <class C> DEVICE void leave(u64 *choice, const int *ids, const float *weights) {
  for (int k = threadIdx.x % 32; k < C::CHOSEN; k += 32) choice[k] = (u64)bits(weights[k]) << 32 | (u32)(ids[k] + 1);
}
template <class C> DEVICE bool take(const u64 *choice, int *ids, float *weights) {
  u32 least = ~0u;
  for (int k = threadIdx.x % 32; k < C::CHOSEN; k += 32) {
    const u64 v = *(const volatile u64 *)(choice + k);
    least = (u32)v < least ? (u32)v : least;
    ids[k] = (u32)v - 1;
    weights[k] = unbits(v >> 32);
  }
  warp_sync();
  return warp_least(least) > 0;
}
