// Prompts: the gated delta rule from chunk to chunk, on tensor cores. With what prompt_chunks.cu made of a chunk and the
// state S in front of it, the news are U = solve (V - G K S), the answers G Q S + mixing U, and the state becomes
// G[last] S + K^T U, each token's news decayed to the chunk's last. Half of a block's warps have 16 values of a head each:
// all of it transposed, so that a result's registers are the next product's left operand and S never leaves them. The
// other half copies the next chunk into shared memory.
#include "halves.cuh"
#include "carried.cuh"
#include "delta.cuh"

struct Args {
  float *dst = nullptr;           // (tokens, HEADS, VALUE_DIM)
  const float *mixed = nullptr;   // of prompt_convolve.cu: values alone
  const u16 *halves = nullptr;
  const u16 *solve = nullptr;     // of prompt_chunks.cu, as the next two
  const u16 *mixing = nullptr;
  const float *fading = nullptr;
  float *slots = nullptr;
  const int *state = nullptr;
};

constexpr int VALUES = THREADS / 64 * 16, COPIERS = THREADS / 2;  // of a block
struct Chunk {
  u16 queries[CHUNK][HALF_KEYS + 8], keys[CHUNK][HALF_KEYS + 8], solve[CHUNK][CHUNK + 8], mixing[CHUNK][CHUNK + 8];
  float values[CHUNK][VALUES + 4], fading[2][CHUNK];
};

// A chunk's rows, STRIDE apart in `from`, without the eight or four values that part them in shared memory; zeros past
// the first `rows` of them and the first `columns` of their values.
template <int STRIDE, class T, int PITCH>
DEVICE void copy_rows(T (&to)[CHUNK][PITCH], const T *from, int copier, int rows, int columns = PITCH) {
  constexpr int EACH = 16 / sizeof(T), ROW = PITCH / EACH - 1;
#pragma unroll
  for (int j = 0; j < (CHUNK * ROW + COPIERS - 1) / COPIERS; j++) {
    const int i = copier + j * COPIERS, t = i / ROW, v = i % ROW * EACH;
    if (CHUNK * ROW % COPIERS == 0 || t < CHUNK) copy_async(&to[t][v], from + (u64)t * STRIDE + v, t < rows && v < columns);
  }
}

// Rows 16 * n and on of a matrix of halves as right operands: of columns k .. k + 15, which are summed over.
template <int PITCH> DEVICE V4 rows_of(const u16 (&m)[CHUNK][PITCH], int n, int k) {
  const int lane = threadIdx.x % 32;
  return ldmatrix4(&m[n * 16 + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
}
// Results of 16 columns as the left operand of a product that sums over them.
DEVICE void left_of(u32 (&to)[4], const float (&low)[4], const float (&high)[4]) {
  to[0] = pack(low[0], low[1]);
  to[1] = pack(low[2], low[3]);
  to[2] = pack(high[0], high[1]);
  to[3] = pack(high[2], high[3]);
}

constexpr int TILES = CHUNK / 8;
// to (values, tokens) += from * m^T, where m (tokens, tokens) is lower triangular: what each token and those before it
// give.
template <int PITCH>
DEVICE void add_earlier(float (&to)[TILES][4], const float (&from)[TILES][4], const u16 (&m)[CHUNK][PITCH]) {
#pragma unroll
  for (int k = 0; k < CHUNK / 16; k++) {
    u32 left[4];
    left_of(left, from[2 * k], from[2 * k + 1]);
#pragma unroll
    for (int n = k; n < CHUNK / 16; n++) {
      const V4 b = rows_of(m, n, k * 16);
      mma_f16(to[2 * n], left, b.x, b.y);
      mma_f16(to[2 * n + 1], left, b.z, b.w);
    }
  }
}

struct Values {  // what a warp does: 16 values of a head
  float s[HALF_KEYS / 8][4];  // (values, keys)
  // `out`: this lane's first value of the chunk's first token; `mine`: the warp's first value in the block.
  DEVICE void take(const Chunk &c, int mine, float *out, int tokens, bool low, bool high) {
    constexpr int ROW = HEADS * VALUE_DIM;
    const int lane = threadIdx.x % 32, value = mine + lane / 4, token = lane % 4 * 2;
    float held[TILES][4] = {}, answer[TILES][4] = {};
#pragma unroll
    for (int k = 0; k < HALF_KEYS / 16; k++) {
      u32 left[4];
      left_of(left, s[2 * k], s[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < CHUNK / 16; n++) {
        const V4 key = rows_of(c.keys, n, k * 16), query = rows_of(c.queries, n, k * 16);
        mma_f16(held[2 * n], left, key.x, key.y);
        mma_f16(held[2 * n + 1], left, key.z, key.w);
        mma_f16(answer[2 * n], left, query.x, query.y);
        mma_f16(answer[2 * n + 1], left, query.z, query.w);
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int t = n * 8 + token + i % 2;
        const float decay = c.fading[0][t];
        held[n][i] = c.values[t][value + i / 2 * 8] - decay * held[n][i];
        answer[n][i] *= decay;
      }
    float news[TILES][4] = {};
    add_earlier(news, held, c.solve);
    add_earlier(answer, news, c.mixing);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int t = n * 8 + token + i % 2;
        if (t < tokens && (i < 2 ? low : high)) out[(u64)t * ROW + i / 2 * 8] = answer[n][i];
        news[n][i] *= c.fading[1][t];
      }
    const float decay = c.fading[0][CHUNK - 1];
#pragma unroll
    for (int n = 0; n < HALF_KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= decay;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {
      u32 left[4];
      left_of(left, news[2 * k], news[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < HALF_KEYS / 16; n++) {
        const V4 b = ldmatrix4_trans(&c.keys[k * 16 + lane % 16][n * 16 + lane / 16 * 8]);
        mma_f16(s[2 * n], left, b.x, b.y);
        mma_f16(s[2 * n + 1], left, b.z, b.w);
      }
    }
  }
};

DEVICE void run(const Args &a) {
  DYNAMIC_SHARED(pool);
  Chunk *chunks = (Chunk *)pool;
  const int head = blockIdx.y, key_head = GROUPED ? head / (HEADS / KEY_HEADS) : head % KEY_HEADS;
  const int count = a.state[COUNT], pos = a.state[POS], first_value = blockIdx.x * VALUES, lane = threadIdx.x % 32;
  const int copier = (int)threadIdx.x - COPIERS, mine = threadIdx.x / 32 * 16, value = first_value + mine + lane / 4;
  const bool low = copier < 0 && value < VALUE_DIM, high = copier < 0 && value + 8 < VALUE_DIM;
  const u64 at = (TAPS - 1) * CHANNELS + ((u64)head * VALUE_DIM + value) * KEY_DIM + lane % 4 * 2;
  auto fill = [&](int chunk) {  // zeros behind the last token
    Chunk &to = chunks[chunk % STAGES];
    const int first = chunk * CHUNK, tokens = count - first;
    const u64 own = (u64)chunk * HEADS + head;
    const u16 *keys = a.halves + ((u64)first * 2 * KEY_HEADS + key_head) * HALF_KEYS;
    copy_rows<2 * KEY_HEADS * HALF_KEYS>(to.queries, keys, copier, tokens);
    copy_rows<2 * KEY_HEADS * HALF_KEYS>(to.keys, keys + KEY_HEADS * HALF_KEYS, copier, tokens);
    copy_rows<CHUNK>(to.solve, a.solve + own * CHUNK * CHUNK, copier, CHUNK);
    copy_rows<CHUNK>(to.mixing, a.mixing + own * CHUNK * CHUNK, copier, CHUNK);
    const float *values = a.mixed + ((u64)first * HEADS + head) * VALUE_DIM + first_value;
    copy_rows<HEADS * VALUE_DIM>(to.values, values, copier, tokens, VALUE_DIM - first_value);
    for (int i = copier; i < 2 * CHUNK / 4; i += COPIERS)
      copy_async(&to.fading[0][0] + i * 4, a.fading + own * 2 * CHUNK + i * 4, true);
    copy_commit();
  };
  grid_wait();
  Values values;
  const float *from = carried(a.slots, pos) + at;
#pragma unroll
  for (int n = 0; n < HALF_KEYS / 8; n++) {
    const bool there = pos && n * 8 + lane % 4 * 2 < KEY_DIM;
    const F2 zero = {0, 0}, one = low && there ? *(const F2 *)(from + n * 8) : zero,
             two = high && there ? *(const F2 *)(from + 8 * KEY_DIM + n * 8) : zero;
    values.s[n][0] = one.x;
    values.s[n][1] = one.y;
    values.s[n][2] = two.x;
    values.s[n][3] = two.y;
  }
  auto store = [&](float *to) {
#pragma unroll
    for (int n = 0; n < HALF_KEYS / 8; n++)
      if (n * 8 + lane % 4 * 2 < KEY_DIM) {
        if (low) *(F2 *)(to + n * 8) = F2{values.s[n][0], values.s[n][1]};
        if (high) *(F2 *)(to + 8 * KEY_DIM + n * 8) = F2{values.s[n][2], values.s[n][3]};
      }
  };
  if (copier >= 0) fill(0);
  for (int chunk = 0; chunk * CHUNK < count; chunk++) {
    if (copier >= 0) copy_wait<0>();
    __syncthreads();
    if (copier < 0)
      values.take(chunks[chunk % STAGES], mine, a.dst + ((u64)chunk * CHUNK * HEADS + head) * VALUE_DIM + value,
          count - chunk * CHUNK, low, high);
    if ((chunk + 1) * CHUNK == a.state[KEPT]) store(kept_slot(a.slots) + at);
    if (STAGES == 1) __syncthreads();
    if (copier >= 0 && (chunk + 1) * CHUNK < count) fill(chunk + 1);
  }
  store(carried(a.slots, pos + count) + at);
}
