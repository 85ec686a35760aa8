// MLA, decode behind few keys, in one kernel: a cluster of CLUSTER blocks per head makes the head's query (from q_a
// through q_b, where the model has it), absorbs W_k_b, attends, and multiplies by W_v_b. Each block computes a part of
// every product's rows and has every CLUSTER-th key; vectors go through distributed shared memory. A block's weights
// are on their way into shared memory before grid_wait(). Up to CLUSTER columns of a step share a cluster and its
// weights; what is done for a column is what a single step does, so its bits are the same. Each block then attends for
// one column, over the keys of several blocks of a single step, one after the other: with CLUSTER columns over all, so
// that it puts them together itself. The clusters of the columns behind make the cache rows of those before for
// themselves.
#include "latent.cuh"
#include "matvec.cuh"

constexpr int HEAD = NOPE + ROPE_DIMS, ROW = KV_LORA + ROPE_DIMS;
constexpr int AT_ONCE = COLUMNS < CLUSTER ? COLUMNS : CLUSTER;  // columns of a cluster
static_assert(CLUSTER % AT_ONCE == 0, "each column has as many blocks");
constexpr bool WHOLE = AT_ONCE == CLUSTER;              // a block has all keys of its column
constexpr int NEW = (COLUMNS + CLUSTER - 1) / CLUSTER;  // cache rows of this step that a block makes, at most
constexpr bool LOW_RANK = Query::COLS > 0;              // q comes from q_a through q_b
constexpr int LONGEST = Query::COLS > KV_LORA ? Query::COLS : KV_LORA > NOPE ? KV_LORA : NOPE;
constexpr int PAIRS = (ROW / 2 + 31) / 32;                   // of a cache row's values, per lane
constexpr int ANGLES = (ROPE_DIMS + THREADS - 1) / THREADS;  // of a thread
constexpr int VALUE_PAIRS = (KV_LORA / 2 + 31) / 32;         // of those that are values as well

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
  // Of four columns a thread takes half, where so many threads are left, or else two rows each, so that it reads what
  // is staged for both of them at once.
  static constexpr int EACH = AT_ONCE > 2 && N % 2 == 0 && 2 * N * LANES > THREADS ? 2 : 1, OF = N / EACH * LANES,
                       SETS = AT_ONCE > 2 && 2 * OF <= THREADS ? 2 : 1, MINE = AT_ONCE / SETS;
  // put(column, row, lane of the row, value * factor(column)), by all lanes of each row.
  template <class Factor, class Put>
  DEVICE void multiply(const Shared &sh, const Factor &factor, const Put &put) const {
    static_assert(OF <= THREADS, "a thread has its rows once");
    const int set = SETS == 1 ? 0 : min((int)threadIdx.x / OF, SETS - 1), column = set * MINE;
    const int row = threadIdx.x % OF / LANES, sub = threadIdx.x % LANES;
    float sum[MINE][EACH] = {}, by[MINE];
#pragma unroll
    for (int c = 0; c < MINE; c++) by[c] = factor(column + c);
    const bool has = threadIdx.x < OF * SETS;
    if (has)
#pragma unroll
      for (int k = sub; k < KB; k += LANES) {
        Block<T> f[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) fetch<T, InShared>(f[e], planes, BLOCKS, (row + e * (N / EACH)) * KB + k);
#pragma unroll
        for (int c = 0; c < MINE; c++) {
          const int at = 2 * (column + c) * KB + k;
          const V4 x0 = sh.q[at], x1 = sh.q[at + KB];
          const Scale scale = sh.s[(column + c) * KB + k];
#pragma unroll
          for (int e = 0; e < EACH; e++) sum[c][e] = added<T>(sum[c][e], f[e], x0, x1, scale);
        }
      }
    for (int m = LANES / 2; m; m >>= 1)
#pragma unroll
      for (int c = 0; c < MINE; c++)
#pragma unroll
        for (int e = 0; e < EACH; e++) sum[c][e] += shfl_xor(sum[c][e], m);
    if (has)
#pragma unroll
      for (int c = 0; c < MINE; c++)
#pragma unroll
        for (int e = 0; e < EACH; e++) put(column + c, row + e * (N / EACH), sub, mul_rn(sum[c][e], by[c]));
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

constexpr int SUMS = WARPS * AT_ONCE * KV_LORA * 4, FIRST = sizeof(QueryRows);
constexpr int GAP = AT_ONCE == 1 && SUMS > FIRST ? SUMS - FIRST : 0;  // for one column there is room
constexpr bool OVER_LATENT = SUMS > FIRST + GAP;

struct Memory {  // a block's; of each column:
  u64 inboxes[3];  // of q, query and parts
  V4 codes[AT_ONCE * LONGEST / 16], nope_codes[AT_ONCE * NOPE / 16];  // apart: no barrier is between their uses
  Scale scales[AT_ONCE * LONGEST / 32], nope_scales[AT_ONCE * NOPE / 32];
  alignas(16) float q[AT_ONCE][HEAD];  // of the head, unscaled
  alignas(16) float query[ROW];        // of the block's column: absorbed, then rotated; scaled
  union {
    // attention over each part of the keys, not normalised
    alignas(16) float parts[CLUSTER][WHOLE ? 1 : AT_ONCE][KV_LORA];
    struct {
      V4 codes[AT_ONCE * KV_LORA / 16];
      Scale scales[AT_ONCE * KV_LORA / 32];
    } whole;  // over all keys, as int8 blocks
  };
  float part_max[CLUSTER][AT_ONCE], part_sum[CLUSTER][AT_ONCE];  // log2, sum of the weights
  float red[AT_ONCE * 32], results[AT_ONCE][Value::ROWS / CLUSTER];
  float warp_maxima[AT_ONCE][WARPS], warp_sums[AT_ONCE][WARPS];  // of each of the block's parts
  alignas(16) float weights[AT_ONCE][WARPS];  // that those sums count with
  float row_red[NEW][WARPS];
  alignas(16) u16 row[COLUMNS][ROW];  // cache rows of this step's keys; with one column the block's own, if it is
  ValueRows value;
  union {
    struct {
      QueryRows query;
      alignas(16) u8 gap[16 + GAP];
      LatentRows latent;
    } rows;
    float sums[WARPS * AT_ONCE][KV_LORA];  // of the keys of each warp of a single step; when the rows have been used
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

// Of a block's column: which it is, and the parts of its keys that the block has. A part is every CLUSTER-th key, those
// that a block of a single step has.
struct Column {
  int index, rank, pos;  // among the cluster's, of the block, of the column; before 0: none
  DEVICE Column(int first, int count, int of)
      : index(of % AT_ONCE), rank(of), pos(index < count ? first + index : -1) {}
  DEVICE int part(int i) const { return rank / AT_ONCE + i * (CLUSTER / AT_ONCE); }
  DEVICE int keys(int i) const { return pos < part(i) ? 0 : (pos - part(i)) / CLUSTER + 1; }
};
// What a warp of a single step has of a part's keys, of which a warp here takes AT_ONCE in turn.
struct Share {
  int part, warp;
  DEVICE explicit Share(int n) {
    const int i = threadIdx.x / 32 + n * WARPS;
    part = i % AT_ONCE;
    warp = i / AT_ONCE;
  }
  DEVICE int at() const { return warp * AT_ONCE + part; }  // of those of the block
};
using Keys = u32[KEYS][PAIRS];  // KEYS keys of a warp: values of a cache row, two in a word, by lanes
// A share's first keys, as far as they are in the cache, which has `known` rows.
DEVICE void load_known(Keys &v, const u16 *cache, int known, const Column &column, const Share &share) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < KEYS; j++) {
    const int key = column.part(share.part) + (share.warp + j * WARPS) * CLUSTER;
    if (key < known)
#pragma unroll
      for (int p = 0; p < PAIRS; p++)
        v[j][p] = p * 32 + lane < ROW / 2 ? ((const u32 *)(cache + (u64)key * ROW))[p * 32 + lane] : 0;
  }
}
// Attention over a share's keys so far, not normalised: log2 of the largest weight, the sum of the weights, and a
// lane's part of the weighted values.
struct Sum {
  float best = -1e30f, total = 0, values[2 * VALUE_PAIRS] = {};
  // N more keys.
  template <int N> DEVICE void add(const float *query, const Keys &v) {
    const int lane = threadIdx.x % 32;
    float s[N] = {};
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
      if (ROW / 2 % 32 == 0 || p * 32 + lane < ROW / 2) {
        const F2 q = *(const F2 *)(query + 2 * (p * 32 + lane));
#pragma unroll
        for (int j = 0; j < N; j++)
          s[j] = fma_rn(q.y, half_to_float(v[j][p] >> 16), fma_rn(q.x, half_to_float(v[j][p]), s[j]));
      }
    float top = best;
#pragma unroll
    for (int j = 0; j < N; j++) top = fmaxf(top, s[j] = warp_sum(s[j]));
    const float kept = exp2_fast(best - top);
    best = top;
    total = mul_rn(total, kept);  // a compiler could fuse this or the products below with the sums
#pragma unroll
    for (int i = 0; i < 2 * VALUE_PAIRS; i++) values[i] = mul_rn(values[i], kept);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const float e = exp2_fast(s[j] - best);
      total = add_rn(total, e);
#pragma unroll
      for (int p = 0; p < VALUE_PAIRS; p++) {
        values[2 * p] = fma_rn(e, half_to_float(v[j][p]), values[2 * p]);
        values[2 * p + 1] = fma_rn(e, half_to_float(v[j][p] >> 16), values[2 * p + 1]);
      }
    }
  }
};
// A share's attention into `sums`, `warp_maxima` and `warp_sums`. Keys from `known` on are in `row`; the first ones, if
// they are known and `early`, in `v`.
DEVICE void attend(
    Memory &m, const u16 *cache, Keys &v, bool early, int known, const Column &column, const Share &share) {
  static_assert(KEYS == 2, "one key, or all");
  const int lane = threadIdx.x % 32, mine = column.keys(share.part);
  Sum sum;
  for (int first = share.warp; first < mine; first += WARPS * KEYS) {
    const bool all = first + WARPS < mine;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      const int key = column.part(share.part) + (first + j * WARPS) * CLUSTER;
      const u32 *row = (const u32 *)(key >= known ? m.row[COLUMNS == 1 ? 0 : key - known] : cache + (u64)key * ROW);
      if ((j == 0 || all) && (!early || first != share.warp || key >= known))
#pragma unroll
        for (int p = 0; p < PAIRS; p++) v[j][p] = p * 32 + lane < ROW / 2 ? row[p * 32 + lane] : 0;
    }
    if (all) sum.add<KEYS>(m.query, v);
    else sum.add<1>(m.query, v);
  }
  if (lane == 0) {
    m.warp_maxima[share.part][share.warp] = sum.best;
    m.warp_sums[share.part][share.warp] = sum.total;
  }
#pragma unroll
  for (int p = 0; p < VALUE_PAIRS; p++)
    if (share.warp < mine && p * 32 + lane < KV_LORA / 2)
      *(F2 *)(m.sums[share.at()] + 2 * (p * 32 + lane)) = F2{sum.values[2 * p], sum.values[2 * p + 1]};
}

// A value of the attention from all parts of the keys, as Merged.
DEVICE float merged(const float *maxima, const float *sums, const float *part) {
  float weight[AT_ONCE], best = -1e30f, total = 0, v = 0;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) best = fmaxf(best, maxima[i]);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) total = fma_rn(weight[i] = exp2_fast(maxima[i] - best), sums[i], total);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) v = fma_rn(weight[i] / total, part[i], v);
  return v;
}
DEVICE void send_word(u32 *to, u32 v, u64 *inbox, int rank) { send((float *)to, unbits(v), inbox, rank); }
// By a warp: block `at` of a column of `whole`, as put_block (matvec.cuh), to all blocks; a lane has a value.
DEVICE void send_block(Memory &m, float v, int column, int at) {
  const int lane = threadIdx.x % 32;
  const float amax = warp_max(fabsf(v));
  const int code = round_int(amax > 0 ? v * (127.f / amax) : 0);
  int word = (code & 255) << lane % 4 * 8, sum = code;
  word |= shfl_xor(word, 1);
  word |= shfl_xor(word, 2);
  u32 *to = (u32 *)&m.whole.codes[codes_at<0>(column, lane >> 4, at, KV_LORA / 32)] + (lane / 4 & 3);
  for (int r = lane % 4; r < CLUSTER; r += 4) send_word(to, (u32)word, &m.inboxes[2], r);
  for (int i = 1; i < 16; i *= 2) sum += shfl_xor(sum, i);
  const int other = shfl_xor(sum, 16);
  Scale &scale = m.whole.scales[scale_at<0>(column, at, KV_LORA / 32)];
  if (lane < CLUSTER) {
    send(&scale.d, amax / 127.f, &m.inboxes[2], lane);
    send_word((u32 *)&scale.sums, (u32)((sum & 0xFFFF) | other << 16), &m.inboxes[2], lane);
  }
}

// The block's parts, each from its shares: to all blocks as `parts`, `part_max` and `part_sum`, or together as `whole`.
DEVICE void send_parts(Memory &m, const Column &column) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  static_assert(WARPS <= 32 && WARPS % 4 == 0, "a lane for each; weights in vectors");
  if (warp < AT_ONCE) {
    const float of_warp = lane < WARPS ? m.warp_maxima[warp][lane] : -1e30f, top = warp_max(of_warp),
                weight = lane < WARPS ? exp2_fast(of_warp - top) : 0,
                all = warp_sum(mul_rn(weight, lane < WARPS ? m.warp_sums[warp][lane] : 0));
    if (lane < WARPS) m.weights[warp][lane] = weight;
    if constexpr (WHOLE) {
      m.part_max[0][warp] = top;
      m.part_sum[0][warp] = all;
    } else if (lane < CLUSTER) {
      send(&m.part_max[column.part(warp)][column.index], top, &m.inboxes[2], lane);
      send(&m.part_sum[column.part(warp)][column.index], all, &m.inboxes[2], lane);
    }
  }
  __syncthreads();
  int active[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) active[i] = min(column.keys(i), WARPS);
  for (int d = threadIdx.x; d < KV_LORA; d += THREADS) {
    float part[AT_ONCE] = {};
    for (int first = 0; first < active[0]; first += 4)  // the first part has the most keys
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const F4 weight = load4(m.weights[i] + first);
        const float w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (first + j < active[i]) part[i] = fma_rn(w[j], m.sums[(first + j) * AT_ONCE + i][d], part[i]);
      }
    if constexpr (WHOLE) send_block(m, merged(m.part_max[0], m.part_sum[0], part), column.index, d / 32);
    else
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) send(&m.parts[column.part(i)][column.index][d], part[i], &m.inboxes[2], r);
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
  if (COLUMNS > AT_ONCE && count <= 0) return;  // else the number is not waited for
  const int known = a.state[POS], pos = known + column;
  const Column own(pos, count, rank);
  const int first_new = (rank - known % CLUSTER + CLUSTER) % CLUSTER;  // column of the first cache row that it makes
  const auto has = [&](int i) { return first_new + i * CLUSTER < column + count; };
  const int own_rows = (column + count - first_new + CLUSTER - 1) / CLUSTER;
  if constexpr (LOW_RANK) m.rows.query.copy(a.w_query, Query::START + (u64)head * HEAD + rank * (HEAD / CLUSTER));
  copy_commit();
  m.rows.latent.copy(a.w_absorb, Absorb::START + (u64)head * Absorb::STRIDE + rank * (KV_LORA / CLUSTER));
  m.value.copy(a.w_value, Value::START + (u64)head * Value::STRIDE + rank * (Value::ROWS / CLUSTER));
  copy_commit();
  if (threadIdx.x == 0) {
    inbox_open(&m.inboxes[0], AT_ONCE * HEAD * 4);
    inbox_open(&m.inboxes[1], KV_LORA * 4 + (COLUMNS == 1 ? 0 : (column + count - own_rows) * ROW * 2));
    inbox_open(&m.inboxes[2], WHOLE ? count * (KV_LORA + KV_LORA / 32 * 8) : CLUSTER * count * (KV_LORA + 2) * 4);
  }
  cluster_arrive_relaxed();  // waited for before the first send()

  LatentRow row[NEW];
#pragma unroll
  for (int i = 0; i < NEW; i++)
    if (has(i)) row[i].prefetch(a.kv_gain, a.table + (u64)(known + first_new + i * CLUSTER) * (ROPE_DIMS / 2));
  F2 angles[ANGLES];  // of the queries' values that the thread rotates
#pragma unroll
  for (int n = 0; n < ANGLES; n++) {
    const int d = min((int)threadIdx.x + n * THREADS, ROPE_DIMS - 1);
    angles[n] = a.table[(u64)max(own.pos, 0) * (ROPE_DIMS / 2) + pair_of(d)];
  }
  Keys keys;
  load_known(keys, a.cache, known, own, Share(0));
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
    cluster_wait();
    m.rows.query.multiply(
        sh, [&](int c) { return stage.norm(sh, c); },
        [&](int c, int i, int sub, float v) {
          for (int r = sub; r < CLUSTER; r += QUERY_LANES)
            send(&m.q[c][rank * (HEAD / CLUSTER) + i], v, &m.inboxes[0], r);
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
    if (has(i)) row[i].store(m.row[COLUMNS == 1 ? 0 : first_new + i * CLUSTER], m.row_red[i]);

  if (LOW_RANK) inbox_wait(&m.inboxes[0]);
#pragma unroll
  for (int n = 0; n < ANGLES; n++)
    if (const int d = threadIdx.x + n * THREADS; d < ROPE_DIMS)
      m.query[KV_LORA + d] = query_scale(own.pos) * rotated(m.q[own.index] + NOPE, angles[n], d);
  Staged<NOPE, false> nope;
  copy_wait<0>();
  const Shared nope_sh{m.nope_codes, m.nope_scales, nullptr, m.red};
  nope.finish(Plain{m.q[0], HEAD}, nope_sh);
  if (COLUMNS > 1)
    for (int i = threadIdx.x; i < own_rows * (ROW / 2); i += THREADS) {
      u32 *word = (u32 *)m.row[first_new + i / (ROW / 2) * CLUSTER] + i % (ROW / 2);
#pragma unroll
      for (int r = 1; r < CLUSTER; r++) send_word(word, *word, &m.inboxes[1], (rank + r) % CLUSTER);
    }
  m.rows.latent.multiply(
      nope_sh, [&](int c) { return query_scale(pos + c); },
      [&](int c, int row, int sub, float v) {  // to the blocks of this column
        for (int r = c + sub * AT_ONCE; r < CLUSTER; r += LATENT_LANES * AT_ONCE)
          send(&m.query[rank * (KV_LORA / CLUSTER) + row], v, &m.inboxes[1], r);
      });
  inbox_wait(&m.inboxes[1]);

  if (OVER_LATENT) __syncthreads();  // all have multiplied the rows
  if (own.pos >= 0) {
#pragma unroll 1
    for (int n = 0; n < AT_ONCE; n++) attend(m, a.cache, keys, n == 0, known, own, Share(n));
    __syncthreads();
    send_parts(m, own);
  }
  if (head == 0 && first_new < count)
#pragma unroll 1
    for (int i = threadIdx.x; i < ROW; i += THREADS)
      a.cache[(u64)(pos + first_new) * ROW + i] = m.row[COLUMNS == 1 ? 0 : column + first_new][i];
  inbox_wait(&m.inboxes[2]);
  if constexpr (!WHOLE) {
    Staged<KV_LORA, false> latent;
    latent.finish(Merged{m}, sh);
  }
  constexpr int OWN = Value::ROWS / CLUSTER, PARTS = OWN / 32;
  const int first = head * Value::ROWS + rank * OWN;
  m.value.multiply(
      WHOLE ? Shared{m.whole.codes, m.whole.scales, nullptr, m.red} : sh,
      [&](int c) { return GATED ? sigmoid(a.gate[(column + c) * HEADS + head]) : 1.f; },
      [&](int c, int row, int sub, float v) {
        if (sub) return;
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
