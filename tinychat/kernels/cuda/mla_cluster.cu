// MLA, decode behind few keys, in one kernel: a cluster of CLUSTER blocks per head makes the head's query (from q_a
// through q_b, where the model has it), absorbs W_k_b, attends, and multiplies by W_v_b. Each block computes a part of
// every product's rows and has every CLUSTER-th key; vectors go through distributed shared memory. A block's weights
// are on their way into shared memory before grid_wait(). Each column of the step has clusters of its own, which make the
// cache rows of the columns before it for themselves.
#include "latent.cuh"
#include "matvec.cuh"

constexpr int HEAD = NOPE + ROPE_DIMS, ROW = KV_LORA + ROPE_DIMS;
constexpr int NEW = (COLUMNS + CLUSTER - 1) / CLUSTER;  // keys of this step that a block has, at most
constexpr bool LOW_RANK = Query::COLS > 0;  // q comes from q_a through q_b
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
  // put(row, lane of the row, value), by all lanes of each row.
  template <class Put> DEVICE void multiply(const Shared &sh, const Put &put) const {
    static_assert(N * LANES <= THREADS, "a thread has one row");
    const int row = threadIdx.x / LANES, sub = threadIdx.x % LANES;
    float sum = 0;
    if (row < N)
#pragma unroll
      for (int k = sub; k < KB; k += LANES) {
        Block<T> f;
        fetch<T, InShared>(f, planes, BLOCKS, row * KB + k);
        sum = added<T>(sum, f, sh.q[k], sh.q[k + KB], sh.s[k]);
      }
    for (int m = LANES / 2; m; m >>= 1) sum += shfl_xor(sum, m);
    if (row < N) put(row, sub, sum);
  }
};
using QueryRows = Rows<Query, LOW_RANK ? HEAD / CLUSTER : 0, QUERY_LANES>;
using LatentRows = Rows<Absorb, KV_LORA / CLUSTER, LATENT_LANES>;
using ValueRows = Rows<Value, Value::ROWS / CLUSTER, VALUE_LANES>;

struct Memory {  // a block's
  V4 codes[LONGEST / 16];
  Scale scales[LONGEST / 32];
  alignas(16) float q[HEAD];        // of the head, unscaled
  alignas(16) float query[ROW];     // absorbed, then rotated; scaled
  alignas(16) float part[KV_LORA];  // attention over this block's keys, not normalised
  float part_max, part_sum;         // log2, sum of the weights
  float red[WARPS], row_red[NEW][WARPS], warp_maxima[WARPS], warp_sums[WARPS], results[Value::ROWS / CLUSTER];
  alignas(16) u16 row[NEW][ROW];  // cache rows of this step's keys, of every CLUSTER-th
  ValueRows value;
  union {
    struct {
      QueryRows query;
      LatentRows latent;
    } rows;
    float sums[WARPS][KV_LORA];  // of each warp's keys; when the rows have been used
  };
};
static_assert(sizeof(Memory) <= SHARED, "the shared memory asked for is too small");

struct Args {
  const float *x = nullptr;  // (columns, Query::COLS): q_a, where LOW_RANK
  const float *x_gain = nullptr;
  const float *q = nullptr;  // (columns, heads, nope + rope_dims), else
  const float *kv = nullptr;  // (columns, kv_lora + rope_dims)
  const float *kv_gain = nullptr;
  const float *gate = nullptr;  // (columns, heads), where GATED
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

// Attention over every CLUSTER-th key from `rank` on, those from `known` on in `row`: `part`, `part_max` and `part_sum`. A warp takes KEYS keys at a
// time and keeps its lanes' part of the weighted sum of values in registers.
DEVICE void attend(Memory &m, const u16 *cache, int known, int pos, int rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = pos < rank ? 0 : (pos - rank) / CLUSTER + 1;
  float best = -1e30f, total = 0, sum[2 * VALUE_PAIRS];
#pragma unroll
  for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[i] = 0;
  for (int first = warp; first < mine; first += WARPS * KEYS) {
    u32 v[KEYS][PAIRS];
    float s[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const int i = first + j * WARPS, key = rank + i * CLUSTER;
      const u32 *row = (const u32 *)(key >= known ? m.row[(key - known) / CLUSTER] : cache + (u64)key * ROW);
#pragma unroll
      for (int p = 0; p < PAIRS; p++) v[j][p] = i < mine && p * 32 + lane < ROW / 2 ? row[p * 32 + lane] : 0;
      s[j] = 0;
    }
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (ROW / 2 % 32 == 0 || p * 32 + lane < ROW / 2) {
        const F2 q = *(const F2 *)(m.query + 2 * (p * 32 + lane));
#pragma unroll
        for (int j = 0; j < KEYS; j++)
          s[j] = fma_rn(q.y, half_to_float(v[j][p] >> 16), fma_rn(q.x, half_to_float(v[j][p]), s[j]));
      }
    float top = best;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      s[j] = first + j * WARPS < mine ? warp_sum(s[j]) : -1e30f;
      top = fmaxf(top, s[j]);
    }
    const float kept = exp2_fast(best - top);
    best = top;
    total = mul_rn(total, kept);  // a compiler could fuse this or the products below with the sums
#pragma unroll
    for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[i] = mul_rn(sum[i], kept);
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const float e = first + j * WARPS < mine ? exp2_fast(s[j] - best) : 0;
      total = add_rn(total, e);
#pragma unroll
      for (int p = 0; p < VALUE_PAIRS; p++) {
        sum[2 * p] = fma_rn(e, half_to_float(v[j][p]), sum[2 * p]);
        sum[2 * p + 1] = fma_rn(e, half_to_float(v[j][p] >> 16), sum[2 * p + 1]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < VALUE_PAIRS; p++)
    if (warp < mine && p * 32 + lane < KV_LORA / 2)
      *(F2 *)(m.sums[warp] + 2 * (p * 32 + lane)) = F2{sum[2 * p], sum[2 * p + 1]};
  if (lane == 0) {
    m.warp_maxima[warp] = best;
    m.warp_sums[warp] = total;
  }
  __syncthreads();
  const int active = min(mine, WARPS);
  best = -1e30f;
  for (int w = 0; w < active; w++) best = fmaxf(best, m.warp_maxima[w]);
  for (int d = threadIdx.x; d < KV_LORA; d += THREADS) {
    float whole = 0;
    for (int w = 0; w < active; w++) whole += exp2_fast(m.warp_maxima[w] - best) * m.sums[w][d];
    m.part[d] = whole;
  }
  if (threadIdx.x == 0) {
    total = 0;
    for (int w = 0; w < active; w++) total += exp2_fast(m.warp_maxima[w] - best) * m.warp_sums[w];
    m.part_max = best;
    m.part_sum = total;
  }
}

// The head's attention from its cluster's parts.
struct Merged {
  const float *part[CLUSTER];
  float weight[CLUSTER];
  DEVICE Merged(Memory &m) {
    float best = -1e30f, total = 0;
    const float *maximum[CLUSTER], *sum[CLUSTER];
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      part[r] = peer(m.part, r);
      maximum[r] = peer(&m.part_max, r);
      sum[r] = peer(&m.part_sum, r);
      weight[r] = *maximum[r];
      best = fmaxf(best, weight[r]);
    }
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) total += (weight[r] = exp2_fast(weight[r] - best)) * *sum[r];
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) weight[r] /= total;
  }
  DEVICE F4 operator()(int, int i) const {
    F4 v = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const F4 p = load4(part[r] + i);
      v = F4{v.x + weight[r] * p.x, v.y + weight[r] * p.y, v.z + weight[r] * p.z, v.w + weight[r] * p.w};
    }
    return v;
  }
};

DEVICE void run(Args a) {
  CLUSTER_SHARED(Memory, m);
  const Shared sh{m.codes, m.scales, nullptr, m.red};
  const int rank = cluster_rank(), warp = threadIdx.x / 32, head = blockIdx.x / CLUSTER % HEADS;
  const int column = COLUMNS == 1 ? 0 : blockIdx.x / (CLUSTER * HEADS);
  if (COLUMNS > 1 && column >= a.state[COUNT]) return;
  a.x += column * Query::COLS;
  a.q += column * HEADS * HEAD;
  if (!OUT_QUANTISED) a.dst += column * HEADS * Value::ROWS;
  cluster_arrive();  // waited for before the first write into another block's memory
  if constexpr (LOW_RANK) m.rows.query.copy(a.w_query, Query::START + (u64)head * HEAD + rank * (HEAD / CLUSTER));
  copy_commit();
  m.rows.latent.copy(a.w_absorb, Absorb::START + (u64)head * Absorb::STRIDE + rank * (KV_LORA / CLUSTER));
  m.value.copy(a.w_value, Value::START + (u64)head * Value::STRIDE + rank * (Value::ROWS / CLUSTER));
  copy_commit();
  const int known = a.state[POS], pos = known + column;
  const F2 *angles = a.table + (u64)pos * (ROPE_DIMS / 2);

  const bool owner = rank == pos % CLUSTER;  // of this column's key
  const int first_new = (rank - known % CLUSTER + CLUSTER) % CLUSTER;  // column of the block's first key in this step
  LatentRow row[NEW];
  const auto load_rows = [&] {
#pragma unroll
    for (int i = 0; i < NEW; i++) {
      const int c = first_new + i * CLUSTER;
      if (c <= column) row[i].load(a.kv + c * ROW, a.kv_gain, a.table + (u64)(known + c) * (ROPE_DIMS / 2));
    }
  };
  if constexpr (LOW_RANK) {
    Stage<LOW_RANK ? Query::COLS : 32, true, true, false, 1> stage;
    stage.prefetch(a.x_gain);
    grid_wait();
    const Plain x{a.x};
    stage.load(x);
    load_rows();
    copy_wait<1>();
    stage.finish(x, sh);
    const float norm = stage.norm(EPS, sh, 0);
    cluster_wait();
    m.rows.query.multiply(sh, [&](int i, int sub, float v) {
      for (int r = sub; r < CLUSTER; r += QUERY_LANES) peer(m.q, r)[rank * (HEAD / CLUSTER) + i] = v * norm;
    });
  } else {
    grid_wait();
    load_rows();
    for (int i = threadIdx.x; i < HEAD; i += THREADS) m.q[i] = a.q[head * HEAD + i];
    cluster_wait();
  }
  cluster_arrive();
#pragma unroll
  for (int i = 0; i < NEW; i++)
    if (first_new + i * CLUSTER <= column) row[i].store(m.row[i], m.row_red[i]);
  cluster_wait();
  if (owner && head == 0) {
    __syncthreads();  // the row was stored behind the arrival, so the cluster's barrier says nothing of it
    for (int i = threadIdx.x; i < ROW; i += THREADS) a.cache[(u64)pos * ROW + i] = m.row[column / CLUSTER][i];
  }

  Stage<NOPE, false, true, false, 1> nope;
  copy_wait<0>();
  nope.finish(Plain{m.q}, sh);
  for (int i = threadIdx.x; i < ROPE_DIMS; i += THREADS)
    m.query[KV_LORA + i] = query_scale(pos) * rotated(m.q + NOPE, angles, i);
  m.rows.latent.multiply(sh, [&](int row, int sub, float v) {
    for (int r = sub; r < CLUSTER; r += LATENT_LANES)
      peer(m.query, r)[rank * (KV_LORA / CLUSTER) + row] = v * query_scale(pos);
  });
  cluster_arrive();
  cluster_wait();

  attend(m, a.cache, known, pos, rank);
  cluster_arrive();
  cluster_wait();
  Stage<KV_LORA, false, true, false, 1> latent;
  latent.finish(Merged(m), sh);
  cluster_arrive();  // this block has read the others' parts
  const int first = head * Value::ROWS + rank * (Value::ROWS / CLUSTER);
  const float open = GATED ? 1.f / (1.f + expf(-a.gate[column * HEADS + head])) : 1.f;
  m.value.multiply(sh, [&](int row, int sub, float v) {
    if (sub) return;
    if (GATED) v = mul_rn(v, open);
    if constexpr (OUT_QUANTISED) m.results[row] = v;
    else a.dst[first + row] = v;
  });
  if constexpr (OUT_QUANTISED) {
    __syncthreads();
    if (warp < Value::ROWS / CLUSTER / 32)
      put_block<COLUMNS>(
          m.results[threadIdx.x], a.dst_q, a.dst_s, column, HEADS * Value::ROWS / 32, first / 32 + warp);
  }
  cluster_wait();  // nobody reads this block's memory any more
}
