// A head of the gated delta rule (kernels/blocks.py, DeltaRule; KDA where it decays BY_CHANNEL). Its state lies as
// [value][key]; LANES lanes share the keys of one value, a column. Constants: of recurrent.py, _shape.

constexpr int GROUP = 4;   // tokens of a prompt that are taken in at once where the state decays BY_CHANNEL
constexpr int CHUNK = 64;  // and where it does not
constexpr int HALF_KEYS = (KEY_DIM + 15) / 16 * 16;  // of a row of halves
constexpr int LANES = 8, VECTORS = (KEY_DIM + 4 * LANES - 1) / (4 * LANES);  // of four keys, of a lane

DEVICE float dot4(F4 a, F4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
DEVICE float sum_of_lanes(float v) {
#pragma unroll
  for (int m = LANES / 2; m; m >>= 1) v += shfl_xor(v, m);
  return v;
}
DEVICE F4 by(F4 a, F4 b) { return F4{a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float log_decay(float rate, float v) {
  return LOWER_BOUND != 0 ? LOWER_BOUND * sigmoid(rate * v) : rate * (v > 20 ? v : log1pf(expf(v)));
}
DEVICE float decay_of(float rate, float v) { return expf(log_decay(rate, v)); }
DEVICE float gate_of(float v) { return BY_CHANNEL ? sigmoid(v) : silu(v); }
// The convolution's weights of a channel, which is of q, k or v (`part` 0, 1, 2): where BY_CHANNEL, each has its own.
DEVICE const float *taps_of(const float *const *conv, int part, int channel) {
  if (!BY_CHANNEL) return conv[0] + channel * TAPS;
  return (part == 0 ? conv[0] : part == 1 ? conv[1] : conv[2]) + (channel - part * KEY_HEADS * KEY_DIM) * TAPS;
}
// Sums over the lanes of N vectors of N values: lane i of each N gets that of value i.
template <int N> DEVICE float transposed_sum(float (&v)[N]) {
  if constexpr (N == 1) return v[0];
  else {
    float half[N / 2];
    const bool upper = threadIdx.x & N / 2;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float mine = upper ? v[i + N / 2] : v[i], other = upper ? v[i] : v[i + N / 2];
      half[i] = mine + shfl_xor(other, N / 2);
    }
    return transposed_sum(half);
  }
}
// The first key of a lane's vector i, and whether there is one.
DEVICE int first_key(int i) { return (i * LANES + (int)threadIdx.x % LANES) * 4; }
DEVICE bool has_key(int i) { return KEY_DIM % (4 * LANES) == 0 || first_key(i) < KEY_DIM; }

struct Column {
  F4 s[VECTORS];
  DEVICE void load(const float *from, bool there) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const V4 v = there && has_key(i) ? ldc16(from + first_key(i)) : V4{0, 0, 0, 0};
      s[i] = F4{unbits(v.x), unbits(v.y), unbits(v.z), unbits(v.w)};
    }
  }
  DEVICE void store(float *to) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (has_key(i)) *(F4 *)(to + first_key(i)) = s[i];
  }
  // S = diag(decays) * S
  DEVICE void fade(const float *decays) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (has_key(i)) s[i] = by(s[i], *(const F4 *)(decays + first_key(i)));
  }
  // S = decay * S + k * news
  DEVICE void take(const float *k, float decay, float news) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (has_key(i)) {
        const F4 key = *(const F4 *)(k + first_key(i));
        s[i] = F4{decay * s[i].x + key.x * news, decay * s[i].y + key.y * news, decay * s[i].z + key.z * news,
            decay * s[i].w + key.w * news};
      }
  }
};
