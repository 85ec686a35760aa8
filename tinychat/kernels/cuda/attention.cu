// Decode: flash attention on tensor cores. A block takes 16 * ROW_TILES rows (heads of one kv head's group, of TOGETHER
// columns of the step) and one split of the keys, CHUNK_KEYS keys at a time, double-buffered. Columns of a block begin
// at the same keys; what a later one has more is masked in the rows of the earlier, which leaves their bits as they
// are. Latent: V is the head of K's row, so each cache row is read once for all heads; queries and this step's row are
// ready. GQA: a block makes its queries and this step's rows for itself (heads.cuh), and leaves its columns' in the
// cache. 16 warps: S tiles over (rows, keys, parts of the key's values), softmax by rows, then O tiles over columns.
// Results: finished where a single split has work (GQA); else partial, which the last block of a kv head combines (GQA)
// or the next kernel (latent; value_up.cu).
#include "heads.cuh"
#include "matvec.cuh"

struct Args {
  u16 *partial = nullptr;        // (columns, splits, heads, value_dim): each split's result, where it is not finished
  F2 *ml = nullptr;              // (columns, splits, heads): maximum (log2) and sum
  int *tickets = nullptr;        // (columns, kv_heads): splits that are done
  const u16 *queries = nullptr;  // (columns, heads, key_dim), scaled; where LATENT, else:
  const float *q = nullptr;      // (columns, heads, key_dim)
  const float *k = nullptr;      // (columns, kv_heads, key_dim); nullptr where the layer shares its cache
  const float *v = nullptr;      // (columns, kv_heads, value_dim)
  const float *q_gain = nullptr;
  const float *k_gain = nullptr;
  const F2 *table = nullptr;  // cos and sin, (positions, rope_dims / 2)
  u16 *k_cache = nullptr;
  u16 *v_cache = nullptr;  // k_cache where LATENT
  const int *state = nullptr;
  float *out = nullptr;  // (columns, heads, value_dim), or:
  V4 *dst_q = nullptr;
  Scale *dst_s = nullptr;
  const float *sinks = nullptr;  // (heads), where SINKS
  const float *gate = nullptr;   // (columns, heads, value_dim), where GATED
};

// A chunk of a cache's rows, of DIM values each, from key `first` on: those before key `earlier`, and zeros from `end`
// on, in the background. Without loops: a short context's step runs it once.
template <int DIM> DEVICE void load_rows(u16 *to, const u16 *rows, int first, int earlier, int end) {
  constexpr int VECTORS = DIM / 8, N = CHUNK_KEYS * VECTORS;
#pragma unroll
  for (int n = 0; n < N; n += THREADS) {
    const int i = n + threadIdx.x, row = i / VECTORS, col = i % VECTORS * 8, key = first + row;
    if ((N % THREADS == 0 || i < N) && (key < earlier || key >= end))
      copy_async(to + row * (DIM + 8) + col, rows + (u64)row * KV_HEADS * DIM + col, key < end);
  }
}

DEVICE float sink_of(const Args &a, int head) { return a.sinks[head] * 1.44269504f; }  // as the scores, in log2

DEVICE float open(const Args &a, int i) { return GATED ? sigmoid(a.gate[i]) : 1.f; }

// The keys of a split, for a query at position `pos` without a window.
DEVICE int split_keys(int pos) { return keys_per_split(pos + 1, SPLITS, CHUNK_KEYS); }

// `count` columns from `column` on, whose splits begin at the same keys.
DEVICE void attend(Args a, int column, int count) {
  constexpr int GROUP = HEADS / KV_HEADS, ROWS = 16 * ROW_TILES, KP = KEY_DIM + 8, VP = LATENT ? KP : VALUE_DIM + 8,
                PP = CHUNK_KEYS + 8, SP = CHUNK_KEYS + 4, WARPS = THREADS / 32;
  constexpr int TILES = ROW_TILES * CHUNK_KEYS / 16, STEPS = KEY_DIM / 16, NT = (VALUE_DIM / 8 + WARPS - 1) / WARPS;
  constexpr int GROUPS = TILES * PARTS > WARPS ? TILES * PARTS / WARPS : 1;  // of 16 keys that a warp computes
  DYNAMIC_SHARED(pool);
  u16 *qs = (u16 *)pool, *ks = qs + ROWS * KP, *vs = LATENT ? ks : ks + STAGES * CHUNK_KEYS * KP,
      *ps = vs + STAGES * CHUNK_KEYS * VP;
  constexpr int SCORES = PARTS * ROWS * SP,
                MADE = LATENT ? 0 : WARPS * KEY_DIM;  // floats: of a chunk; of heads in the making
  float *ss = (float *)(ps + ROWS * PP), *row_max = ss + (SCORES > MADE ? SCORES : MADE), *row_sum = row_max + ROWS,
        *row_scale = row_sum + ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = COLUMNS == 1 ? blockIdx.x : blockIdx.z,
            kv_head = COLUMNS == 1 ? blockIdx.z : blockIdx.x % KV_HEADS, first_row = blockIdx.y * ROWS;
  const int known = a.state[POS], pos = known + column, base = WINDOW ? a.state[BASE] : 0;
  a.partial += (u64)column * SPLITS * HEADS * VALUE_DIM;
  a.ml += column * SPLITS * HEADS;
  a.tickets += column * KV_HEADS;
  if constexpr (LATENT) a.queries += column * HEADS * KEY_DIM;
  else a.q += column * HEADS * KEY_DIM;
  a.out += column * HEADS * VALUE_DIM;
  if (GATED) a.gate += column * HEADS * VALUE_DIM;
  const int last_row = min(first_row + ROWS, GROUP * count) - 1;
  if (last_row < first_row) return;
  const int all = pos + last_row / GROUP + 1, unseen = WINDOW ? max(all - WINDOW, 0) : 0, keys = all - unseen,
            per = keys_per_split(keys, SPLITS, CHUNK_KEYS), begin = unseen + split * per, end = min(begin + per, all);
  if (begin >= end) return;
  const int chunks = (end - begin + CHUNK_KEYS - 1) / CHUNK_KEYS;
  // The splits that have keys, of the block's first column and of column number c.
  const int first_active = ((TOGETHER == 1 ? keys : pos + 1) + per - 1) / per;
  const auto active = [&](int c) {
    return TOGETHER == 1 ? first_active : first_active + (pos + c >= first_active * per);
  };

  // Chunk c: rows that are in the cache, and zeros behind the last, in the background: they need no waiting.
  constexpr int KV = KEY_DIM / 8;
  const int earlier = OWN ? min(end, known) : end;
  auto load = [&](int c) {
    const int first = begin + c * CHUNK_KEYS, slot = c % STAGES * CHUNK_KEYS;
    const u64 at = (u64)(first - base) * KV_HEADS + kv_head;
    if (c < chunks) {
      load_rows<KEY_DIM>(ks + slot * KP, a.k_cache + at * KEY_DIM, first, earlier, end);
      if constexpr (!LATENT) load_rows<VALUE_DIM>(vs + slot * VP, a.v_cache + at * VALUE_DIM, first, earlier, end);
    }
    copy_commit();
  };
  // Items of chunk c, one for each warp: the queries (chunk 0), then K and V of the rows that this step adds to it.
  const int queries = last_row - first_row + 1;
  Rotated rotated;
  struct Item {
    bool query, value;
    int head, key;
  };
  auto item = [&](int i, int c) {
    const int n = c ? 0 : queries, first = max(begin + c * CHUNK_KEYS, earlier);
    return Item{i < n, i >= n && (i - n) % 2,
        i < n ? kv_head * GROUP + (TOGETHER == 1 ? first_row + i : i % GROUP) : kv_head,
        i < n ? pos + (TOGETHER == 1 ? 0 : i / GROUP) : first + (i - n) / 2};
  };
  auto items = [&](int c) {
    const int first = begin + c * CHUNK_KEYS, added = min(first + CHUNK_KEYS, end) - max(first, earlier);
    return (c ? 0 : queries) + 2 * max(added, 0);
  };
  auto prepare = [&](const Item &m) {
    if (m.value) return;
    rotated.gains(m.query ? a.q_gain : a.k_gain, m.head);
    rotated.angles(a.table, m.key);
  };
  auto make = [&](const Item &m, int c) {
    const int t = m.key - known, row = c % STAGES * CHUNK_KEYS + m.key - begin - c * CHUNK_KEYS;
    const bool stored = !m.query && t >= column && t < column + count && blockIdx.y == 0;
    const int of = TOGETHER == 1 ? 0 : m.key - pos;  // the query's column
    const u64 at = (u64)(m.key - base) * KV_HEADS + kv_head;
    u16 *to = m.query ? qs + (of * GROUP + m.head - kv_head * GROUP - first_row) * KP
        : m.value     ? vs + row * VP
                      : ks + row * KP;
    u16 *kept = m.value ? a.v_cache + at * VALUE_DIM : a.k_cache + at * KEY_DIM;
    const auto put = [&](int i, float y) {
      const u16 h = float_to_half(m.query ? y * QUERY_SCALE : y);
      to[i] = h;
      if (stored) kept[i] = h;
    };
    if (m.value) value_head(a.v + (t * KV_HEADS + kv_head) * VALUE_DIM, put);
    else
      rotated.run(m.query ? a.q + of * HEADS * KEY_DIM : a.k + t * KV_HEADS * KEY_DIM, m.query ? HEADS : KV_HEADS,
          m.head, ss + warp * KEY_DIM, put);
  };
  auto finish = [&](int c) {
    if constexpr (LATENT) {
      const int first = begin + c * CHUNK_KEYS, slot = c % STAGES * CHUNK_KEYS;
      if (first + CHUNK_KEYS > earlier)
        for (int i = threadIdx.x; i < CHUNK_KEYS * KV; i += THREADS) {
          const int row = i / KV, col = i % KV * 8, key = first + row;
          if (key >= earlier && key < end)
            *(V4 *)(ks + (slot + row) * KP + col) =
                *(const V4 *)(a.k_cache + ((u64)(key - base) * KV_HEADS + kv_head) * KEY_DIM + col);
        }
    } else {
#pragma unroll 1
      for (int i = warp; i < items(c); i += WARPS) {
        const Item m = item(i, c);
        if (c || i >= WARPS) prepare(m);
        make(m, c);
      }
    }
  };
  load(0);
  if (const int i = threadIdx.x; i < ROWS) {
    row_max[i] = -1e30f;
    row_sum[i] = 0;
  }
#pragma unroll
  for (int n = 0; n < ROWS * KV; n += THREADS)
    if (const int i = n + threadIdx.x, row = i / KV; row >= queries && row < ROWS)
      *(V4 *)(qs + row * KP + i % KV * 8) = V4{0, 0, 0, 0};
  if constexpr (!LATENT)
    if (warp < items(0)) prepare(item(warp, 0));
  grid_wait();
  if constexpr (LATENT)
    for (int i = threadIdx.x; i < queries * KV; i += THREADS) {
      const int row = i / KV, col = i % KV * 8;
      *(V4 *)(qs + row * KP + col) = *(const V4 *)(a.queries + (kv_head * GROUP + first_row + row) * KEY_DIM + col);
    }
  finish(0);
  float o[ROW_TILES][NT][4];
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[m][n][i] = 0;

  const int m = warp % ROW_TILES, part = warp / ROW_TILES % PARTS, n = warp / (ROW_TILES * PARTS) * GROUPS;
  V4 held[STEPS / PARTS];  // the warp's part of its queries
  for (int c = 0; c < chunks; c++) {
    load(c + 1);
    if (c + 1 < chunks) finish(c + 1);
    copy_wait<1>();
    __syncthreads();
    const u16 *kc = ks + c % STAGES * CHUNK_KEYS * KP, *vc = vs + c % STAGES * CHUNK_KEYS * VP;
    if (warp < TILES * PARTS / GROUPS) {  // S = Q K^T
      float s[2 * GROUPS][4] = {};
      const u16 *qa = qs + (m * 16 + lane % 16) * KP + lane / 16 * 8 + part * (STEPS / PARTS) * 16;
      const u16 *kb = kc + (n * 16 + lane / 16 * 8 + lane % 8) * KP + lane / 8 % 2 * 8 + part * (STEPS / PARTS) * 16;
#pragma unroll
      for (int k = 0; k < STEPS / PARTS; k++) {
        if (c == 0) held[k] = ldmatrix4(qa + k * 16);
        const u32 q[4] = {held[k].x, held[k].y, held[k].z, held[k].w};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
          const V4 b = ldmatrix4(kb + g * 16 * KP + k * 16);
          mma_f16(s[2 * g], q, b.x, b.y);
          mma_f16(s[2 * g + 1], q, b.z, b.w);
        }
      }
      float *dst = ss + (part * ROWS + m * 16 + lane / 4) * SP + n * 16 + lane % 4 * 2;
#pragma unroll
      for (int g = 0; g < 2 * GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) *(F2 *)(dst + i / 2 * 8 * SP + g * 8) = F2{s[g][i], s[g][i + 1]};
    }
    __syncthreads();
    {  // softmax of this chunk, and by how much what came before shrinks
      constexpr int RW = (ROWS + WARPS - 1) / WARPS, KL = CHUNK_KEYS / 32;
      float v[RW][KL], top[RW], sum[RW];
#pragma unroll
      for (int j = 0; j < RW; j++) {
        const int r = warp + j * WARPS, row = first_row + r,
                  limit = row <= last_row ? min(end, pos + row / GROUP + 1) : 0;
        top[j] = -1e30f;
#pragma unroll
        for (int i = 0; i < KL; i++) {
          v[j][i] = -1e30f;
          if (begin + c * CHUNK_KEYS + lane + 32 * i < limit) {
            v[j][i] = 0;
#pragma unroll
            for (int part = 0; part < PARTS; part++) v[j][i] += ss[(part * ROWS + r) * SP + lane + 32 * i];
          }
          top[j] = fmaxf(top[j], v[j][i]);
        }
      }
#pragma unroll
      for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int j = 0; j < RW; j++) top[j] = fmaxf(top[j], shfl_xor(top[j], m));
#pragma unroll
      for (int j = 0; j < RW; j++) {
        const int r = warp + j * WARPS;
        const float now = fmaxf(row_max[r], top[j]);
        sum[j] = 0;
#pragma unroll
        for (int i = 0; i < KL; i++) {
          const float p = v[j][i] > -1e29f ? exp2_fast(v[j][i] - now) : 0;
          sum[j] += p;
          ps[r * PP + lane + 32 * i] = float_to_half(p);
        }
        top[j] = now;
      }
#pragma unroll
      for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int j = 0; j < RW; j++) sum[j] += shfl_xor(sum[j], m);
      if (lane == 0)
#pragma unroll
        for (int j = 0; j < RW; j++) {
          const int r = warp + j * WARPS;
          const float shrink = exp2_fast(row_max[r] - top[j]);
          row_max[r] = top[j];
          row_sum[r] = row_sum[r] * shrink + sum[j];
          row_scale[r] = shrink;
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {  // O = O * shrink + P V
      const float lo = row_scale[m * 16 + lane / 4], hi = row_scale[m * 16 + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        o[m][n][0] *= lo;
        o[m][n][1] *= lo;
        o[m][n][2] *= hi;
        o[m][n][3] *= hi;
      }
    }
#pragma unroll
    for (int k = 0; k < CHUNK_KEYS / 16; k++) {
      u32 p[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        const V4 av = ldmatrix4(ps + (m * 16 + lane % 16) * PP + k * 16 + lane / 16 * 8);
        p[m][0] = av.x;
        p[m][1] = av.y;
        p[m][2] = av.z;
        p[m][3] = av.w;
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (VALUE_DIM / 8 % WARPS == 0 || warp * NT + n < VALUE_DIM / 8) {
          const V2 b = ldmatrix2_trans(vc + (k * 16 + lane % 16) * VP + (warp * NT + n) * 8);
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) mma_f16(o[m][n], p[m], b.x, b.y);
        }
    }
    __syncthreads();
  }
  const auto finished = [&](int c) { return !LATENT && active(c) == 1; };
  float *values = (float *)ks;            // of the group's heads, before they are quantised
  constexpr int OUT = GROUP * VALUE_DIM;  // values of a column
  // Results of column c from value 4 * `at` on, by all lanes of a warp.
  const auto put_codes = [&](int c, int at, F4 v) {
    stage_codes<HEADS * VALUE_DIM, tiled_of(COLUMNS)>(Shared{a.dst_q, a.dst_s, nullptr, nullptr}, column + c, at, v);
  };
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int r = m * 16 + lane / 4 + i / 2 * 8, row = first_row + r, c = TOGETHER == 1 ? 0 : row / GROUP;
      if (row > last_row || (TOGETHER > 1 && split >= active(c))) continue;
      const int head = kv_head * GROUP + row % GROUP;
      float sum = row_sum[r];
      if constexpr (SINKS)
        if (finished(c)) sum += exp2_fast(sink_of(a, head) - row_max[r]);
      const float f = 1.f / sum;
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (VALUE_DIM / 8 % WARPS == 0 || warp * NT + n < VALUE_DIM / 8) {
          const int col = (warp * NT + n) * 8 + lane % 4 * 2;
          const F2 v = {o[m][n][i] * f, o[m][n][i + 1] * f};
          const int at = (c * HEADS + head) * VALUE_DIM + col;
          if (finished(c))
            *(F2 *)(OUT_QUANTISED ? values + row * VALUE_DIM + col : a.out + at) =
                F2{v.x * open(a, at), v.y * open(a, at + 1)};
          else
            *(u32 *)(a.partial + ((u64)(c * SPLITS + split) * HEADS + head) * VALUE_DIM + col) =
                (u32)float_to_half(v.x) | (u32)float_to_half(v.y) << 16;
        }
      if (!finished(c) && warp == 0 && lane % 4 == 0)
        a.ml[(c * SPLITS + split) * HEADS + head] = F2{row_max[r], row_sum[r]};
    }
  int done = finished(0);  // columns that are finished, the first ones
  while (TOGETHER > 1 && done && done < count && finished(done)) done++;
  if constexpr (OUT_QUANTISED)
    if (done && (TOGETHER == 1 || split == 0)) {
      __syncthreads();
#pragma unroll
      for (int n = 0; n < TOGETHER * OUT / 4; n += THREADS)
        if (const int i = n + threadIdx.x; i < (TOGETHER == 1 ? 1 : done) * OUT / 4)
          put_codes(i / (OUT / 4), kv_head * OUT / 4 + i % (OUT / 4), load4(values + 4 * i));
    }
  if (LATENT || (TOGETHER == 1 ? done : done == count)) return;
  // The last block of this kv head and column combines the splits of its GROUP heads.
  __shared__ int last[TOGETHER];
  __syncthreads();
  const int mine = threadIdx.x < TOGETHER ? threadIdx.x : 0;  // a column
  if (threadIdx.x < TOGETHER) {  // for all threads: a fence of each takes as many times as long
    fence();
    const bool takes_part = TOGETHER == 1 || (mine >= done && mine < count && split < active(mine));
    last[mine] = takes_part && atomicAdd(&a.tickets[mine * KV_HEADS + kv_head], 1) == active(mine) - 1;
    fence();
  }
  __syncthreads();
  bool any = false;
#pragma unroll
  for (int c = 0; c < TOGETHER; c++) any |= last[c];
  if (!any) return;
  if (threadIdx.x < TOGETHER && last[mine]) a.tickets[mine * KV_HEADS + kv_head] = 0;
  for (int i = warp; i < GROUP * count; i += WARPS) {
    const int c = i / GROUP, head = kv_head * GROUP + i % GROUP;
    if (last[c])
      combine_weights<SPLITS>(ss + i * SPLITS, a.ml + c * SPLITS * HEADS + head, HEADS, active(c), lane,
          SINKS ? sink_of(a, head) : -INFINITY);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * OUT / 4; i += THREADS) {
    const int c = i / (OUT / 4), h = i / (VALUE_DIM / 4), at = kv_head * OUT + i % (OUT / 4) * 4;
    if (!last[c]) continue;
    const u16 *from = a.partial + (u64)c * SPLITS * HEADS * VALUE_DIM + at;
    F4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = 0; s < active(c); s++) {
      const V2 v = *(const V2 *)(from + (u64)s * HEADS * VALUE_DIM);
      const float w = ss[h * SPLITS + s];
      sum.x += w * half_to_float(v.x);
      sum.y += w * half_to_float(v.x >> 16);
      sum.z += w * half_to_float(v.y);
      sum.w += w * half_to_float(v.y >> 16);
    }
    const int of = c * HEADS * VALUE_DIM + at;
    const F4 v = {sum.x * open(a, of), sum.y * open(a, of + 1), sum.z * open(a, of + 2), sum.w * open(a, of + 3)};
    if constexpr (OUT_QUANTISED) put_codes(c, at / 4, v);
    else *(F4 *)(a.out + of) = v;
  }
}

// Where there would be more blocks with keys than places for them, a block takes several columns.
DEVICE void run(const Args &a) {
  if constexpr (COLUMNS == 1) return attend(a, 0, 1);
  const int known = a.state[POS], first = blockIdx.x / KV_HEADS;
  if ((int)blockIdx.z * CHUNK_KEYS >= known + COLUMNS) return;  // no keys, without a division: most blocks behind few
  if constexpr (TOGETHER == 1) {
    if (first < a.state[COUNT]) attend(a, first, 1);
    return;
  }
  constexpr int MOST = PLACES / (COLUMNS * KV_HEADS);                     // splits that have places, a column a block
  const int together = known >= MOST * split_keys(known) ? TOGETHER : 1;  // in all blocks alike
  if (first % together) return;
  const int end = min(first + together, a.state[COUNT]);
  for (int column = first; column < end;) {
    int n = end - column;
    while (n > 1 && split_keys(known + column + n - 1) != split_keys(known + column)) n--;
    attend(a, column, n);
    column += n;
    __syncthreads();
  }
}
