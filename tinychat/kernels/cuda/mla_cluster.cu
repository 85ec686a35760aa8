// MLA, decode behind few keys, in one kernel: a cluster of CLUSTER blocks per head makes the head's query (from q_a
// through q_b, where the model has it), absorbs W_k_b, attends, and multiplies by W_v_b. Each block computes a part of
// every product's rows and has every CLUSTER-th key; vectors go through distributed shared memory. A block's weights
// are on their way into shared memory before grid_wait(). Up to CLUSTER columns of a step share a cluster, its weights and
// keys; what is done for a column is what a single step does, so its bits are the same. The clusters of the columns behind
// make the cache rows of those before for themselves.
#include "latent.cuh"
#include "matvec.cuh"

constexpr int HEAD = NOPE + ROPE_DIMS, ROW = KV_LORA + ROPE_DIMS;
constexpr int AT_ONCE = COLUMNS < CLUSTER ? COLUMNS : CLUSTER;  // columns of a cluster
constexpr int NEW = (COLUMNS + CLUSTER - 1) / CLUSTER;  // keys of this step that a block has, at most
constexpr bool FIRST_EARLY = AT_ONCE <= 2;  // a warp's first keys are loaded before the wait; more have no registers
constexpr bool LOW_RANK = Query::COLS > 0;  // q comes from q_a through q_b
constexpr int LONGEST = Query::COLS > KV_LORA ? Query::COLS : KV_LORA > NOPE ? KV_LORA : NOPE;
constexpr int PAIRS = (ROW / 2 + 31) / 32;            // of a cache row's values, per lane
constexpr int ANGLES = (AT_ONCE * ROPE_DIMS + THREADS - 1) / THREADS;  // of a thread
constexpr int VALUE_PAIRS = (KV_LORA / 2 + 31) / 32;  // of those that are values as well

// N rows of matrices M in shared memory, in planes like the tensor's (quants.cuh). LANES lanes share a row.
template <class M, int N, int LANES> struct Rows {
  static constexpr int T = M::TYPE, KB = M::COLS / 32, BLOCKS = N * KB;
  static constexpr u64 BYTES = s2_at(T, BLOCKS) + align16(BLOCKS / 8 * s2_bytes(T));
  alignas(16) u8 planes[BYTES ? BYTES : 16];

  // Without a loop: what is done before the wait has to be short.
  template <int BYTES> static DEVICE void copy_plane(u8 *to, const u8 *from) {
    const int mine = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS * 16)
      if (i + THREADS * 16 <= BYTES || i + mine < BYTES) copy_async(to + i + mine, from + i + mine, true);
  }
  // Row `first` of the tensor and those behind it, in the background.
  DEVICE void copy(const u8 *w, u64 first) {
    const u64 at = first * KB;
    copy_plane<BLOCKS * lo_bytes(T)>(planes, w + at * lo_bytes(T));
    copy_plane<BLOCKS * two_bytes(T)>(planes + two_at(T, BLOCKS), w + two_at(T, M::BLOCKS) + at * two_bytes(T));
    copy_plane<BLOCKS * one_bytes(T)>(planes + one_at(T, BLOCKS), w + one_at(T, M::BLOCKS) + at * one_bytes(T));
    copy_plane<BLOCKS * s1_bytes(T)>(planes + s1_at(T, BLOCKS), w + s1_at(T, M::BLOCKS) + at * s1_bytes(T));
    copy_plane<BLOCKS / 8 * s2_bytes(T)>(planes + s2_at(T, BLOCKS), w + s2_at(T, M::BLOCKS) + at / 8 * s2_bytes(T));
  }
  // put(column, row, lane of the row, value), by all lanes of each row.
  template <class Put> DEVICE void multiply(const Shared &sh, const Put &put) const {
    static_assert(N * LANES <= THREADS, "a thread has one row");
    const int row = threadIdx.x / LANES, sub = threadIdx.x % LANES;
    float sum[AT_ONCE] = {};
    if (row < N)
#pragma unroll
      for (int k = sub; k < KB; k += LANES) {
        Block<T> f;
        fetch<T, InShared>(f, planes, BLOCKS, row * KB + k);
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
          sum[c] = added<T>(sum[c], f, sh.q[2 * c * KB + k], sh.q[(2 * c + 1) * KB + k], sh.s[c * KB + k]);
      }
    for (int m = LANES / 2; m; m >>= 1)
#pragma unroll
      for (int c = 0; c < AT_ONCE; c++) sum[c] += shfl_xor(sum[c], m);
    if (row < N)
#pragma unroll
      for (int c = 0; c < AT_ONCE; c++) put(c, row, sub, sum[c]);
  }
};
// K activations of each column into shared memory as int8 blocks, NORM: times the gain only, as Stage (matvec.cuh). A
// warp takes 128 values of a column, so that columns come side by side.
template <int K, bool NORM> struct Staged {
  static constexpr int N = K / 4, UNITS = (N + 31) / 32, ALL = UNITS * AT_ONCE, MINE = (ALL + WARPS - 1) / WARPS;
  static_assert(UNITS <= 32, "a sum for each in `red`");
  F4 gain[NORM ? MINE : 1], x[NORM ? MINE : 1];
  static DEVICE int unit(int n) { return threadIdx.x / 32 + n * WARPS; }
  static DEVICE int at(int n) { return unit(n) % UNITS * 32 + threadIdx.x % 32; }
  template <class Load> static DEVICE F4 loaded(const Load &src, int n) {
    return unit(n) < ALL && at(n) < N ? src(unit(n) / UNITS, 4 * at(n)) : F4{0, 0, 0, 0};
  }
  DEVICE void prefetch(const float *g) {
#pragma unroll
    for (int n = 0; n < MINE; n++) {
      const V4 v = ldc16(g + 4 * min(at(n), N - 1));
      gain[n] = F4{unbits(v.x), unbits(v.y), unbits(v.z), unbits(v.w)};
    }
  }
  template <class Load> DEVICE void load(const Load &src) {
#pragma unroll
    for (int n = 0; n < MINE; n++) x[n] = loaded(src, n);
  }
  template <class Load> DEVICE void finish(const Load &src, const Shared &sh) {
#pragma unroll
    for (int n = 0; n < MINE; n++) {
      if (unit(n) >= ALL) break;
      const int column = unit(n) / UNITS;
      stage_codes<K, 0>(sh, column, at(n), NORM ? times(x[NORM ? n : 0], gain[NORM ? n : 0]) : loaded(src, n));
      if (NORM) {
        const float ss = warp_sum(squares(x[NORM ? n : 0]));
        if (threadIdx.x % 32 == 0) sh.red[column * 32 + unit(n) % UNITS] = ss;
      }
    }
    __syncthreads();
  }
  DEVICE float norm(const Shared &sh, int column) const {
    float ss = 0;
#pragma unroll
    for (int i = 0; i < UNITS; i++) ss += sh.red[column * 32 + i];
    return rsqrt_(ss / K + EPS);
  }
};
using QueryRows = Rows<Query, LOW_RANK ? HEAD / CLUSTER : 0, QUERY_LANES>;
using LatentRows = Rows<Absorb, KV_LORA / CLUSTER, LATENT_LANES>;
using ValueRows = Rows<Value, Value::ROWS / CLUSTER, VALUE_LANES>;

constexpr int SUMS = WARPS * KV_LORA * 4, FIRST = sizeof(QueryRows);
constexpr int GAP = AT_ONCE == 1 && SUMS > FIRST ? SUMS - FIRST : 0;  // for one column there is room
constexpr bool OVER_LATENT = SUMS > FIRST + GAP;

struct Memory {  // a block's; of each column:
  u64 inboxes[3];  // of q, query and parts
  V4 codes[AT_ONCE * LONGEST / 16], nope_codes[AT_ONCE * NOPE / 16];  // apart: no barrier is between their uses
  Scale scales[AT_ONCE * LONGEST / 32], nope_scales[AT_ONCE * NOPE / 32];
  alignas(16) float q[AT_ONCE][HEAD];        // of the head, unscaled
  alignas(16) float query[AT_ONCE][ROW];     // absorbed, then rotated; scaled
  alignas(16) float parts[CLUSTER][AT_ONCE][KV_LORA];  // attention over each block's keys, not normalised
  float part_max[CLUSTER][AT_ONCE], part_sum[CLUSTER][AT_ONCE];  // log2, sum of the weights
  float red[AT_ONCE * 32], results[AT_ONCE][Value::ROWS / CLUSTER];
  float warp_maxima[AT_ONCE][WARPS], warp_sums[AT_ONCE][WARPS];
  float row_red[NEW][WARPS];
  alignas(16) u16 row[NEW][ROW];  // cache rows of this step's keys, of every CLUSTER-th
  ValueRows value;
  union {
    struct {
      QueryRows query;
      alignas(16) u8 gap[16 + GAP];
      LatentRows latent;
    } rows;
    float sums[WARPS][KV_LORA];  // of each warp's keys, of a column at a time; when the rows have been used
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

using Keys = u32[KEYS][PAIRS];  // KEYS keys of a warp: values of a cache row, two in a word, by lanes
// Those of a warp's first keys that are in the cache, which has `known` rows.
DEVICE void load_known(Keys &v, const u16 *cache, int known, int rank) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < KEYS; j++) {
    const int key = rank + (threadIdx.x / 32 + j * WARPS) * CLUSTER;
    if (key < known)
#pragma unroll
      for (int p = 0; p < PAIRS; p++)
        v[j][p] = p * 32 + lane < ROW / 2 ? ((const u32 *)(cache + (u64)key * ROW))[p * 32 + lane] : 0;
  }
}

// Attention of `count` columns, the first at `pos`, over every CLUSTER-th key from `rank` on, those from `known` on in
// `row`: what it sends to all blocks as `parts`, `part_max` and `part_sum`. A warp takes KEYS keys at a time, and keeps
// its lanes' part of the weighted sums of values in registers. FIRST_EARLY: the first ones, as far as they are known, are
// in `v`.
DEVICE void attend(Memory &m, const u16 *cache, Keys &v, int known, int pos, int count, int rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto keys = [&](int c) { return c >= count || pos + c < rank ? 0 : (pos + c - rank) / CLUSTER + 1; };
  const int most = keys(count - 1);
  int mine[AT_ONCE];
  float best[AT_ONCE], total[AT_ONCE], sum[AT_ONCE][2 * VALUE_PAIRS];
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    mine[c] = keys(c);
    best[c] = -1e30f;
    total[c] = 0;
#pragma unroll
    for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[c][i] = 0;
  }
  for (int first = warp; first < most; first += WARPS * KEYS) {
    float s[AT_ONCE][KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const int i = first + j * WARPS, key = rank + i * CLUSTER;
      const u32 *row = (const u32 *)(key >= known ? m.row[(key - known) / CLUSTER] : cache + (u64)key * ROW);
      if (!FIRST_EARLY || first != warp || key >= known)
#pragma unroll
        for (int p = 0; p < PAIRS; p++) v[j][p] = i < most && p * 32 + lane < ROW / 2 ? row[p * 32 + lane] : 0;
#pragma unroll
      for (int c = 0; c < AT_ONCE; c++) s[c][j] = 0;
    }
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (ROW / 2 % 32 == 0 || p * 32 + lane < ROW / 2)
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
          const F2 q = *(const F2 *)(m.query[c] + 2 * (p * 32 + lane));
#pragma unroll
          for (int j = 0; j < KEYS; j++)
            s[c][j] = fma_rn(q.y, half_to_float(v[j][p] >> 16), fma_rn(q.x, half_to_float(v[j][p]), s[c][j]));
        }
    // A column that has none of these keys keeps what it has: times 1, plus 0.
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
      float top = best[c];
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        const float whole = warp_sum(s[c][j]);
        s[c][j] = first + j * WARPS < mine[c] ? whole : -1e30f;
        top = fmaxf(top, s[c][j]);
      }
      const float kept = exp2_fast(best[c] - top);
      best[c] = top;
      total[c] = mul_rn(total[c], kept);  // a compiler could fuse this or the products below with the sums
#pragma unroll
      for (int i = 0; i < 2 * VALUE_PAIRS; i++) sum[c][i] = mul_rn(sum[c][i], kept);
#pragma unroll
      for (int j = 0; j < KEYS; j++) {
        const float e = first + j * WARPS < mine[c] ? exp2_fast(s[c][j] - best[c]) : 0;
        total[c] = add_rn(total[c], e);
#pragma unroll
        for (int p = 0; p < VALUE_PAIRS; p++) {
          sum[c][2 * p] = fma_rn(e, half_to_float(v[j][p]), sum[c][2 * p]);
          sum[c][2 * p + 1] = fma_rn(e, half_to_float(v[j][p] >> 16), sum[c][2 * p + 1]);
        }
      }
    }
  }
  if (lane == 0)
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
      m.warp_maxima[c][warp] = best[c];
      m.warp_sums[c][warp] = total[c];
    }
  static_assert(WARPS <= 32, "a lane for each");
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) {
    if (c >= count) break;
    if (c || OVER_LATENT) __syncthreads();  // the column before has been summed; all have multiplied the rows
#pragma unroll
    for (int p = 0; p < VALUE_PAIRS; p++)
      if (warp < mine[c] && p * 32 + lane < KV_LORA / 2)
        *(F2 *)(m.sums[warp] + 2 * (p * 32 + lane)) = F2{sum[c][2 * p], sum[c][2 * p + 1]};
    __syncthreads();
    const float of_warp = lane < WARPS ? m.warp_maxima[c][lane] : -1e30f, top = warp_max(of_warp),
                weight = lane < WARPS ? exp2_fast(of_warp - top) : 0;
    const int active = min(mine[c], WARPS);
    for (int d = threadIdx.x; d < KV_LORA; d += THREADS) {
      float whole = 0;
#pragma unroll(AT_ONCE > 2 ? 4 : WARPS)
      for (int w = 0; w < WARPS; w++)
        if (w < active) whole = fma_rn(shfl(weight, w), m.sums[w][d], whole);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) send(&m.parts[rank][c][d], whole, &m.inboxes[2], r);
    }
    if (warp == c) {
      const float all = warp_sum(mul_rn(weight, lane < WARPS ? m.warp_sums[c][lane] : 0));
      if (lane < CLUSTER) {
        send(&m.part_max[rank][c], top, &m.inboxes[2], lane);
        send(&m.part_sum[rank][c], all, &m.inboxes[2], lane);
      }
    }
  }
}

// The head's attention from its cluster's parts.
struct Merged {
  Memory &m;
  DEVICE F4 operator()(int column, int i) const {
    float weight[CLUSTER], sum[CLUSTER], best = -1e30f, total = 0;
    F4 part[CLUSTER], v = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      weight[r] = m.part_max[r][column];
      sum[r] = m.part_sum[r][column];
      part[r] = load4(m.parts[r][column] + i);
      best = fmaxf(best, weight[r]);
    }
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) total = fma_rn(weight[r] = exp2_fast(weight[r] - best), sum[r], total);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const float w = weight[r] / total;
      v = F4{fma_rn(w, part[r].x, v.x), fma_rn(w, part[r].y, v.y), fma_rn(w, part[r].z, v.z), fma_rn(w, part[r].w, v.w)};
    }
    return v;
  }
};

DEVICE void run(const Args &a) {
  CLUSTER_SHARED(Memory, m);
  const Shared sh{m.codes, m.scales, nullptr, m.red};
  const int rank = cluster_rank(), warp = threadIdx.x / 32, head = blockIdx.x / CLUSTER % HEADS;
  const int column = COLUMNS == 1 ? 0 : blockIdx.x / (CLUSTER * HEADS) * AT_ONCE;  // the cluster's first
  const int count = COLUMNS == 1 ? 1 : min(a.state[COUNT] - column, AT_ONCE);
  if (count <= 0) return;
  const int known = a.state[POS], pos = known + column;
  if constexpr (LOW_RANK) m.rows.query.copy(a.w_query, Query::START + (u64)head * HEAD + rank * (HEAD / CLUSTER));
  copy_commit();
  m.rows.latent.copy(a.w_absorb, Absorb::START + (u64)head * Absorb::STRIDE + rank * (KV_LORA / CLUSTER));
  m.value.copy(a.w_value, Value::START + (u64)head * Value::STRIDE + rank * (Value::ROWS / CLUSTER));
  copy_commit();
  if (threadIdx.x == 0) {
    inbox_open(&m.inboxes[0], AT_ONCE * HEAD * 4);
    inbox_open(&m.inboxes[1], AT_ONCE * KV_LORA * 4);
    inbox_open(&m.inboxes[2], CLUSTER * count * (KV_LORA + 2) * 4);
  }
  cluster_arrive_relaxed();  // waited for before the first send()

  const int first_new = (rank - known % CLUSTER + CLUSTER) % CLUSTER;  // column of the block's first key in this step
  LatentRow row[NEW];
  const auto has = [&](int i) { return first_new + i * CLUSTER < column + count; };
#pragma unroll
  for (int i = 0; i < NEW; i++)
    if (has(i)) row[i].prefetch(a.kv_gain, a.table + (u64)(known + first_new + i * CLUSTER) * (ROPE_DIMS / 2));
  F2 angles[ANGLES];  // of the queries' values that the thread rotates
#pragma unroll
  for (int n = 0; n < ANGLES; n++) {
    const int i = min((int)threadIdx.x + n * THREADS, count * ROPE_DIMS - 1);
    angles[n] = a.table[(u64)(pos + i / ROPE_DIMS) * (ROPE_DIMS / 2) + pair_of(i % ROPE_DIMS)];
  }
  Keys keys;
  if (FIRST_EARLY) load_known(keys, a.cache, known, rank);
  const auto load_rows = [&] {
#pragma unroll
    for (int i = 0; i < NEW; i++)
      if (has(i)) row[i].load(a.kv + (first_new + i * CLUSTER) * ROW);
#pragma unroll
    for (int i = 0; i < NEW; i++)
      if (has(i)) row[i].sum(m.row_red[i]);
  };
  if constexpr (LOW_RANK) {
    Staged<LOW_RANK ? Query::COLS : 32, true> stage;
    stage.prefetch(a.x_gain);
    grid_wait();
    const Plain x{a.x + column * Query::COLS, Query::COLS};
    stage.load(x);
    load_rows();
    copy_wait<1>();
    stage.finish(x, sh);
    float norm[AT_ONCE];
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) norm[c] = stage.norm(sh, c);
    cluster_wait();
    m.rows.query.multiply(sh, [&](int c, int i, int sub, float v) {
      for (int r = sub; r < CLUSTER; r += QUERY_LANES)
        send(&m.q[c][rank * (HEAD / CLUSTER) + i], mul_rn(v, norm[c]), &m.inboxes[0], r);
    });
  } else {
    grid_wait();
    load_rows();
    for (int i = threadIdx.x; i < AT_ONCE * HEAD; i += THREADS)
      m.q[0][i] = a.q[((column + i / HEAD) * HEADS + head) * HEAD + i % HEAD];
    cluster_wait();
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < NEW; i++)
    if (has(i)) row[i].store(m.row[i], m.row_red[i]);

  if (LOW_RANK) inbox_wait(&m.inboxes[0]);
#pragma unroll
  for (int n = 0; n < ANGLES; n++)
    if (const int i = threadIdx.x + n * THREADS; i < count * ROPE_DIMS) {
      const int c = i / ROPE_DIMS, d = i % ROPE_DIMS;
      m.query[c][KV_LORA + d] = query_scale(pos + c) * rotated(m.q[c] + NOPE, angles[n], d);
    }
  Staged<NOPE, false> nope;
  copy_wait<0>();
  const Shared nope_sh{m.nope_codes, m.nope_scales, nullptr, m.red};
  nope.finish(Plain{m.q[0], HEAD}, nope_sh);
  m.rows.latent.multiply(nope_sh, [&](int c, int row, int sub, float v) {
    for (int r = sub; r < CLUSTER; r += LATENT_LANES)
      send(&m.query[c][rank * (KV_LORA / CLUSTER) + row], mul_rn(v, query_scale(pos + c)), &m.inboxes[1], r);
  });
  inbox_wait(&m.inboxes[1]);

  attend(m, a.cache, keys, known, pos, count, rank);
  if (head == 0 && first_new < count)
#pragma unroll 1
    for (int i = threadIdx.x; i < ROW; i += THREADS)
      a.cache[(u64)(pos + first_new) * ROW + i] = m.row[column / CLUSTER][i];
  inbox_wait(&m.inboxes[2]);
  Staged<KV_LORA, false> latent;
  latent.finish(Merged{m}, sh);
  constexpr int OWN = Value::ROWS / CLUSTER, PARTS = OWN / 32;
  const int first = head * Value::ROWS + rank * OWN;
  float open[AT_ONCE];
#pragma unroll
  for (int c = 0; c < AT_ONCE; c++) open[c] = GATED ? sigmoid(a.gate[(column + c) * HEADS + head]) : 1.f;
  m.value.multiply(sh, [&](int c, int row, int sub, float v) {
    if (sub) return;
    if (GATED) v = mul_rn(v, open[c]);
    if constexpr (OUT_QUANTISED) m.results[c][row] = v;
    else a.dst[(column + c) * HEADS * Value::ROWS + first + row] = v;
  });
  if constexpr (OUT_QUANTISED) {
    __syncthreads();
    for (int i = warp; i < AT_ONCE * PARTS; i += WARPS)
      put_block<COLUMNS>(m.results[i / PARTS][i % PARTS * 32 + threadIdx.x % 32], a.dst_q, a.dst_s, column + i / PARTS,
          HEADS * Value::ROWS / 32, first / 32 + i % PARTS);
  }
}
