// MLA, decode behind few keys, in one kernel: a cluster of CLUSTER blocks per head makes the head's query (from q_a
// through q_b, where the model has it), absorbs W_k_b, attends, and multiplies by W_v_b. Each block computes a part of
// every product's rows and has every CLUSTER-th key; vectors go through distributed shared memory. A block's weights
// are on their way into shared memory before grid_wait(). A step of several columns runs through the same phases, each
// for all of them: weights and keys are read once, and a column's sums have the order that they have alone.
#include "latent.cuh"
#include "matvec.cuh"

constexpr int HEAD = NOPE + ROPE_DIMS, ROW = KV_LORA + ROPE_DIMS;
constexpr int AT_ONCE = COLUMNS < 4 ? COLUMNS : 4;      // columns whose sums are in registers
constexpr int NEW = (COLUMNS + CLUSTER - 1) / CLUSTER;  // keys of this step that a block has, at most
constexpr bool LOW_RANK = Query::COLS > 0;              // q comes from q_a through q_b
constexpr int LONGEST = Query::COLS > KV_LORA ? Query::COLS : KV_LORA > NOPE ? KV_LORA : NOPE;
constexpr int PAIRS = (ROW / 2 + 31) / 32;            // of a cache row's values, per lane
constexpr int VALUE_PAIRS = (KV_LORA / 2 + 31) / 32;  // of those that are values as well

// N rows of matrices M in shared memory, in planes like the tensor's (quants.cuh). LANES lanes share a row.
template <class M, int N, int LANES> struct Rows {
  static constexpr int T = M::TYPE, KB = M::COLS / 32, BLOCKS = N * KB;
  static constexpr u64 BYTES = s2_at(T, BLOCKS) + align16(BLOCKS / 8 * s2_bytes(T));
  alignas(16) u8 planes[BYTES ? BYTES : 16];

  static DEVICE void copy_plane(u8 *to, const u8 *from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) copy_async(to + i, from + i, true);
  }
  // Row `first` of the tensor and those behind it, in the background.
  DEVICE void copy(const u8 *w, u64 first) {
    const u64 at = first * KB;
    copy_plane(planes, w + at * lo_bytes(T), BLOCKS * lo_bytes(T));
    copy_plane(planes + two_at(T, BLOCKS), w + two_at(T, M::BLOCKS) + at * two_bytes(T), BLOCKS * two_bytes(T));
    copy_plane(planes + one_at(T, BLOCKS), w + one_at(T, M::BLOCKS) + at * one_bytes(T), BLOCKS * one_bytes(T));
    copy_plane(planes + s1_at(T, BLOCKS), w + s1_at(T, M::BLOCKS) + at * s1_bytes(T), BLOCKS * s1_bytes(T));
    copy_plane(planes + s2_at(T, BLOCKS), w + s2_at(T, M::BLOCKS) + at / 8 * s2_bytes(T), BLOCKS / 8 * s2_bytes(T));
  }
  // put(column, row, lane of the row, value), by all lanes of each row.
  template <class Put> DEVICE void multiply(const Shared &sh, const Put &put) const {
    static_assert(N * LANES <= THREADS, "a thread has one row");
    const int row = threadIdx.x / LANES, sub = threadIdx.x % LANES;
#pragma unroll 1
    for (int first = 0; first < COLUMNS; first += AT_ONCE) {
      float sum[AT_ONCE] = {};
      if (row < N)
#pragma unroll
        for (int k = sub; k < KB; k += LANES) {
          Block<T> f;
          fetch<T, InShared>(f, planes, BLOCKS, row * KB + k);
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            const int c = first + i;
            sum[i] = added<T>(sum[i], f, sh.q[c * 2 * KB + k], sh.q[(c * 2 + 1) * KB + k], sh.s[c * KB + k]);
          }
        }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        for (int m = LANES / 2; m; m >>= 1) sum[i] += shfl_xor(sum[i], m);
        if (row < N) put(first + i, row, sub, sum[i]);
      }
    }
  }
};
using QueryRows = Rows<Query, LOW_RANK ? HEAD / CLUSTER : 0, QUERY_LANES>;
using LatentRows = Rows<Absorb, KV_LORA / CLUSTER, LATENT_LANES>;
using ValueRows = Rows<Value, Value::ROWS / CLUSTER, VALUE_LANES>;

struct Memory {  // a block's; of each column:
  V4 codes[COLUMNS * LONGEST / 16];
  Scale scales[COLUMNS * LONGEST / 32];
  alignas(16) float q[COLUMNS][HEAD];  // of the head, unscaled
  // absorbed, then rotated; scaled. Then, in KV_LORA values, attention over this block's keys, not normalised
  alignas(16) float query[COLUMNS][ROW];
  float part_max[COLUMNS], part_sum[COLUMNS];  // log2, sum of the weights
  float red[COLUMNS * 32], results[COLUMNS][Value::ROWS / CLUSTER];
  float warp_maxima[AT_ONCE][WARPS], warp_sums[AT_ONCE][WARPS], warp_weights[AT_ONCE][WARPS];
  float row_red[NEW][WARPS];
  alignas(16) u16 row[NEW][ROW];  // cache rows of this step's keys, of every CLUSTER-th
  ValueRows value;
  union {
    struct {
      QueryRows query;
      LatentRows latent;
    } rows;
    float sums[AT_ONCE][WARPS][KV_LORA];  // of each warp's keys; when the rows have been used
  };
};
static_assert(sizeof(Memory) <= SHARED, "the shared memory asked for is too small");

struct Args {
  const float *x = nullptr;  // (columns, Query::COLS): q_a, where LOW_RANK
  const float *x_gain = nullptr;
  const float *q = nullptr;   // (columns, heads, nope + rope_dims), else
  const float *kv = nullptr;  // (columns, kv_lora + rope_dims)
  const float *kv_gain = nullptr;
  u16 *cache = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  const int *state = nullptr;
  const u8 *w_query = nullptr;
  const u8 *w_absorb = nullptr;
  const u8 *w_value = nullptr;
  float *dst = nullptr;  // (columns, heads, rows of Value), or:
  u32 *dst_q = nullptr;
  Scale *dst_s = nullptr;
};

// Attention of `count` columns from column `column` on, whose position is `pos`, over every CLUSTER-th key from `rank`
// on, those from `known` on in `row`: `query` becomes that, `part_max` and `part_sum`. A warp takes KEYS keys at a time
// and keeps its lanes' part of the weighted sums of values in registers.
DEVICE void attend(Memory &m, const u16 *cache, int known, int column, int pos, int count, int rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto keys = [&](int c) { return pos + c < rank ? 0 : (pos + c - rank) / CLUSTER + 1; };  // of column c
  const int most = keys(count - 1);
  float best[AT_ONCE], total[AT_ONCE], sum[AT_ONCE][2 * VALUE_PAIRS];
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    best[c] = -1e30f;
    total[c] = 0;
#pragma unroll
    for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[c][i] = 0;
  }
  for (int first = warp; first < most; first += WARPS * KEYS) {
    u32 v[KEYS][PAIRS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const int i = first + j * WARPS, key = rank + i * CLUSTER;
      const u32 *row = (const u32 *)(key >= known ? m.row[(key - known) / CLUSTER] : cache + (u64)key * ROW);
#pragma unroll
      for (int p = 0; p < PAIRS; p++) v[j][p] = i < most && p * 32 + lane < ROW / 2 ? row[p * 32 + lane] : 0;
    }
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
      const int mine = COLUMNS == 1 ? most : keys(c);
      if (COLUMNS > 1 && (c >= count || first >= mine)) continue;
      float s[KEYS];
#pragma unroll
      for (int j = 0; j < KEYS; j++) s[j] = 0;
#pragma unroll
      for (int p = 0; p < PAIRS; p++)
        if (ROW / 2 % 32 == 0 || p * 32 + lane < ROW / 2) {
          const F2 q = *(const F2 *)(m.query[column + c] + 2 * (p * 32 + lane));
#pragma unroll
          for (int j = 0; j < KEYS; j++) s[j] += q.x * half_to_float(v[j][p]) + q.y * half_to_float(v[j][p] >> 16);
        }
      float top = best[c];
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        s[j] = first + j * WARPS < mine ? warp_sum(s[j]) : -1e30f;
        top = fmaxf(top, s[j]);
      }
      const float kept = exp2_fast(best[c] - top);
      best[c] = top;
      total[c] *= kept;
#pragma unroll
      for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[c][i] *= kept;
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        const float e = first + j * WARPS < mine ? exp2_fast(s[j] - best[c]) : 0;
        total[c] += e;
#pragma unroll
        for (int p = 0; p < VALUE_PAIRS; p++) {
          sum[c][2 * p] += e * half_to_float(v[j][p]);
          sum[c][2 * p + 1] += e * half_to_float(v[j][p] >> 16);
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    if (COLUMNS > 1 && c >= count) break;
#pragma unroll
    for (int p = 0; p < VALUE_PAIRS; p++)
      if (warp < keys(c) && p * 32 + lane < KV_LORA / 2)
        *(F2 *)(m.sums[c][warp] + 2 * (p * 32 + lane)) = F2{sum[c][2 * p], sum[c][2 * p + 1]};
    if (lane == 0) {
      m.warp_maxima[c][warp] = best[c];
      m.warp_sums[c][warp] = total[c];
    }
  }
  __syncthreads();
  const auto maximum = [&](int c, int active) {
    float most = -1e30f;
    for (int w = 0; w < active; w++) most = fmaxf(most, m.warp_maxima[c][w]);
    return most;
  };
  if (COLUMNS > 1) {  // once rather than by every thread
    if (lane < count)
      m.warp_weights[lane][warp] = exp2_fast(m.warp_maxima[lane][warp] - maximum(lane, min(keys(lane), WARPS)));
    __syncthreads();
  }
  for (int i = threadIdx.x; i < count * KV_LORA; i += THREADS) {
    const int c = COLUMNS == 1 ? 0 : i / KV_LORA, d = i - c * KV_LORA, active = min(keys(c), WARPS);
    const float top = COLUMNS == 1 ? maximum(0, active) : 0;
    float whole = 0;
    for (int w = 0; w < active; w++)
      whole += (COLUMNS == 1 ? exp2_fast(m.warp_maxima[c][w] - top) : m.warp_weights[c][w]) * m.sums[c][w][d];
    m.query[column + c][d] = whole;
  }
  if (threadIdx.x < count) {
    const int c = threadIdx.x, active = min(keys(c), WARPS);
    const float top = maximum(c, active);
    float all = 0;
    for (int w = 0; w < active; w++) all += exp2_fast(m.warp_maxima[c][w] - top) * m.warp_sums[c][w];
    m.part_max[column + c] = top;
    m.part_sum[column + c] = all;
  }
}

// The head's attention from its cluster's parts.
struct Merged {
  Memory &m;
  float weight[COLUMNS][CLUSTER];
  DEVICE Merged(Memory &m) : m(m) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      float best = -1e30f, total = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) {
        weight[c][r] = *peer(&m.part_max[c], r);
        best = fmaxf(best, weight[c][r]);
      }
#pragma unroll
      for (int r = 0; r < CLUSTER; r++)
        total += (weight[c][r] = exp2_fast(weight[c][r] - best)) * *peer(&m.part_sum[c], r);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) weight[c][r] /= total;
    }
  }
  DEVICE F4 operator()(int column, int i) const {
    F4 v = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const F4 p = load4(peer(m.query[column], r) + i);
      const float w = weight[column][r];
      v = F4{v.x + w * p.x, v.y + w * p.y, v.z + w * p.z, v.w + w * p.w};
    }
    return v;
  }
};

DEVICE void run(const Args &a) {
  CLUSTER_SHARED(Memory, m);
  const Shared sh{m.codes, m.scales, nullptr, m.red};
  const int rank = cluster_rank(), warp = threadIdx.x / 32, head = blockIdx.x / CLUSTER;
  cluster_arrive();  // waited for before the first write into another block's memory
  if constexpr (LOW_RANK) m.rows.query.copy(a.w_query, Query::START + (u64)head * HEAD + rank * (HEAD / CLUSTER));
  copy_commit();
  m.rows.latent.copy(a.w_absorb, Absorb::START + (u64)head * Absorb::STRIDE + rank * (KV_LORA / CLUSTER));
  m.value.copy(a.w_value, Value::START + (u64)head * Value::STRIDE + rank * (Value::ROWS / CLUSTER));
  copy_commit();
  const int pos = a.state[POS], count = COLUMNS == 1 ? 1 : a.state[COUNT];  // of the first column; columns of this step

  const int first_new = (rank - pos % CLUSTER + CLUSTER) % CLUSTER;  // column of the block's first key in this step
  LatentRow row[NEW];
  const auto load_rows = [&] {
#pragma unroll
    for (int i = 0; i < NEW; i++) {
      const int c = first_new + i * CLUSTER;
      if (c < count) row[i].load(a.kv + c * ROW, a.kv_gain, a.table + (u64)(pos + c) * (ROPE_DIMS / 2));
    }
  };
  if constexpr (LOW_RANK) {
    Stage<LOW_RANK ? Query::COLS : 32, true, true, false, COLUMNS> stage;
    stage.prefetch(a.x_gain);
    grid_wait();
    const Plain x{a.x, Query::COLS};
    stage.load(x);
    load_rows();
    copy_wait<1>();
    stage.finish(x, sh);
    float norm[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) norm[c] = stage.norm(EPS, sh, c);
    cluster_wait();
    m.rows.query.multiply(sh, [&](int column, int i, int sub, float v) {
      for (int r = sub; r < CLUSTER; r += QUERY_LANES)
        peer(m.q[column], r)[rank * (HEAD / CLUSTER) + i] = mul_rn(v, norm[column]);
    });
  } else {
    grid_wait();
    load_rows();
    for (int i = threadIdx.x; i < COLUMNS * HEAD; i += THREADS)
      m.q[0][i] = a.q[(i / HEAD * HEADS + head) * HEAD + i % HEAD];
    cluster_wait();
  }
  cluster_arrive();
#pragma unroll
  for (int i = 0; i < NEW; i++)
    if (first_new + i * CLUSTER < count) row[i].store(m.row[i], m.row_red[i]);
  cluster_wait();
  if (head == 0 && first_new < count) {
    __syncthreads();  // rows were stored behind the arrival, so the cluster's barrier says nothing of them
    for (int j = 0; j < NEW; j++)
      if (const int c = first_new + j * CLUSTER; c < count)
        for (int i = threadIdx.x; i < ROW; i += THREADS) a.cache[(u64)(pos + c) * ROW + i] = m.row[j][i];
  }

  Stage<NOPE, false, true, false, COLUMNS> nope;
  copy_wait<0>();
  nope.finish(Plain{m.q[0], HEAD}, sh);
  for (int i = threadIdx.x; i < COLUMNS * ROPE_DIMS; i += THREADS) {
    const int c = i / ROPE_DIMS, d = i % ROPE_DIMS, at = c < count ? pos + c : pos;
    m.query[c][KV_LORA + d] = query_scale(at) * rotated(m.q[c] + NOPE, a.table + (u64)at * (ROPE_DIMS / 2), d);
  }
  m.rows.latent.multiply(sh, [&](int column, int row, int sub, float v) {
    for (int r = sub; r < CLUSTER; r += LATENT_LANES)
      peer(m.query[column], r)[rank * (KV_LORA / CLUSTER) + row] = v * query_scale(pos + column);
  });
  cluster_arrive();
  cluster_wait();

#pragma unroll 1
  for (int c = 0; c < count; c += AT_ONCE) {
    if (c) __syncthreads();  // the columns before have been summed
    attend(m, a.cache, pos, c, pos + c, min(AT_ONCE, count - c), rank);
  }
  cluster_arrive();
  cluster_wait();
  Stage<KV_LORA, false, true, false, COLUMNS> latent;
  latent.finish(Merged(m), sh);
  cluster_arrive();  // this block has read the others' parts
  constexpr int OWN = Value::ROWS / CLUSTER, PARTS = OWN / 32;
  const int first = head * Value::ROWS + rank * OWN;
  m.value.multiply(sh, [&](int column, int row, int sub, float v) {
    if (sub) return;
    if constexpr (OUT_QUANTISED) m.results[column][row] = v;
    else a.dst[column * HEADS * Value::ROWS + first + row] = v;
  });
  if constexpr (OUT_QUANTISED) {
    __syncthreads();
    for (int i = warp; i < COLUMNS * PARTS; i += WARPS)
      put_block<COLUMNS>(m.results[i / PARTS][i % PARTS * 32 + threadIdx.x % 32], a.dst_q, a.dst_s, i / PARTS,
          HEADS * Value::ROWS / 32, first / 32 + i % PARTS);
  }
  cluster_wait();  // nobody reads this block's memory any more
}
