// One forward step of a plan: the threads of the pool go through the list of its ops.
//
// kernels/ops.py says what each op computes, executor.py builds the list. Work is cut into tasks, each a part of the rows or of
// the tokens. With one token an op is one phase of tasks, and every thread norms and quantises the op's input for itself (cheaper
// than a phase of its own); with several, an op has stages, each a phase: tokens are prepared first, then each group of 16 rows
// is multiplied with panels of 16, 8, 4, 2 or 1 columns. Both do the same arithmetic in the same order per (row, token), so results
// depend neither on the chunking of a prompt nor on the number of threads. Where the machine has tiles, prompts take another way
// than decode steps (choose_form), for one token as for several; long pieces of a prompt one more in latent attention (expands).
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "simd.h"

#include "attention_tiles.h"
#include "attention_words.h"
#include "delta.h"
#include "expand.h"
#include "input.h"
#include "load.h"
#include "panels.h"
#include "pool.h"
#include "sample.h"

#define EXPORT __attribute__((visibility("default")))

// Python reads these names from the library (tc_names), so that their order is written here only.
#define TAGS(X)                                                                                                                 \
  X(EMBED) X(LINEAR) X(ATTENTION) X(ABSORB) X(LATENT_ATTENTION) X(VALUE_UP) X(GATE_UP) X(ROUTE) X(EXPERTS_UP) X(EXPERTS_DOWN)    \
  X(HEAD) X(NORM_ADD) X(LAYER_INPUTS) X(GATE_INPUT) X(CONVOLVE) X(GATED_CONVOLVE) X(DELTA) X(STORE_HIDDEN) X(JOIN)
#define GATINGS(X) X(SOFTMAX) X(SIGMOID) X(SOFTMAX_WEIGHT) X(SQRT_SOFTPLUS)
#define ACTIVATIONS(X) X(SILU) X(GELU) X(CLAMPED)
#define CLAMP 7.0f          // of CLAMPED; as ops.CLAMP and ops.CLAMP_SLOPE, checked when the library is loaded
#define CLAMP_SLOPE 1.702f
#define MIN_WEIGHT_SUM 0x1p-14f  // as ops.MIN_WEIGHT_SUM, checked when the library is loaded
#define MEMBER(name) name,
enum { TAGS(MEMBER) };
enum { GATINGS(MEMBER) };
enum { ACTIVATIONS(MEMBER) };

typedef struct {
  int32_t type, rows, cols, groups;  // groups 0: absent
  const uint8_t *data;
} Matrix;

typedef struct {
  int32_t tag, layer, matrices, add;  // add: into dst instead of over it
  int32_t src, dst[4];                // activation buffers
  int32_t at[4];                      // of a linear op: where results begin in a row of dst
  int32_t heads, kv_heads, key_dim, value_dim, nope, rope_dims, neox, q_norm_len, k_norm_len;
  int32_t top_k, gating, normalize, route_groups, route_groups_used;
  int32_t router;                     // of experts_up: number of the op that has the router
  int32_t window, activation, temperature_length, value_norm;  // window: rows that attention sees, 0: all
  int32_t gated, grouped, by_channel, taps;  // gated: dst[3] is attention's gate, 1 or value_dim values a head (0: none);
                                      // grouped: ops.DeltaRule; by_channel: its decay is KDA's; taps: width of a convolution
  int32_t stores;                     // attention's keys and values go into the cache; else there are none
  float eps, norm_eps, scale;         // norm_eps: of q_norm, k_norm and the latent norm; scale: of the scores, or of the result
  float temperature, softcap, stream_scale, logit_scale;  // ops.Temperature, Head, NormAdd, Router; 0: none of the first two
  float lower_bound;                  // of the logarithm of KDA's decay; 0: none
  const float *norm, *q_norm, *k_norm, *rope, *sinks, *shared_scale, *bias[4];
  int32_t *routes;                    // [STEP][top_k]: where a decode step leaves the experts of its tokens, to be looked at
  Matrix w[4];
} Op;

typedef struct {  // a layer's part of the KV cache: [heads][rows] rows of K, in tiles (attention.h), and of V
  uint16_t *k, *v;
  float *tail, *state;  // of a delta rule: the last inputs of its convolution, and [heads][key][value filled up to 16]
  int32_t heads, k_dim, v_dim;
  int32_t rows, window, base;  // window: rows that a token sees, 0: all; base: position of the first row (window_rows.py)
} LayerCache;

typedef struct {  // per thread
  int8_t *q;
  XScale *scales;
  float *f, *attn_q, *attn_s, *attn_out, *merged;
#if TILES || WORDS
  PlaneQueries queries;  // of attend_in_planes
  Room room;
#endif
  f32v *sums;        // of two products
  uint64_t ready;  // the phase whose input this is
  uint64_t chosen; // the phase for which `experts` were chosen
  int head;        // of per_head, experts_down: whose input this is
  int32_t *experts;
  float *expert_weights;
  float *chances;  // choose: [2][experts]
  int32_t *groups; // choose: [2][groups of experts]
  int32_t *pairs;  // of a batch: [batch * (top_k + 1)]
  float **targets; // of a batch: [batch]
  uint64_t stopped;  // while profiled: when the last task ended
  int last_op;
  int planes;        // rows of whole blocks of 32 are in planes, for tiles
} Scratch;

typedef struct { int op, stage, ops; } Phase;  // ops: of one token, run together (together_with)

// The tasks of a phase are those of its segments, one behind the other. `place`s of a segment are its tasks in the order of memory; each
// `per` of them are a unit, that tasks of later segments wait for.
typedef struct {
  int first, op, per, unit;  // the first task; the number of the first unit
  int slot;                  // of linear: the part; of experts_up and experts_down with one token: which of its experts, top_k: the shared one; of attention: heads
} Segment;                   // of a task; of absorb ALONE: the cache's row
enum { ALONE = -1 };
typedef struct { _Alignas(64) atomic_int count; _Atomic uint64_t done; } Count;  // of a unit: tasks that have ended; the last phase in which all have

// Asked while a prompt runs, with the share of its work that is done; whether to leave out the rest.
typedef int (*Watch)(double done);

typedef struct {
  // n_step: ops of a step; those of MTP are behind them. n_whole: those of them that all tokens of a prompt need
  int32_t n_ops, n_step, n_whole, max_context, batch, vocab, layers, n_buffers;
  const Op *ops;
  float **buffers;   // [n_buffers], each (batch, width[i])
  int32_t *widths;
  LayerCache *caches;  // [layers]
  uint64_t *ticks;   // NULL, or [threads][n_ops][2] nanoseconds of this step: at work, then waiting for the others
  uint16_t *expanded;  // room for so many halves: keys and values of some heads (expand.h)
  uint64_t expanded_room;
  uint64_t sampling; // nanoseconds from the logits to the last id that tc_sample chose
  Pool pool;
  Scratch *scratch;  // [threads]
  Scratch shared;    // of a batch
  Scratch made;      // of one token: results of an op, as the next one's input
  uint8_t *makes;    // [n_ops]: whether an op makes that
  int32_t *route_ids, *chosen;  // chosen: experts of a batch, n_chosen of them, and how many tokens chose each of all
  int n_chosen;
  float *route_weights, *router_logits;
  float *pair_out;   // (batch * top_k, dim): outputs of experts before they are summed
  float *partial;    // decode attention: [task] m, l, out
  atomic_int *done;  // decode attention: finished chunks per group of heads
  float *logits, *span_max, *span_sum, *work;  // of a decode step: [STEP][vocab], twice [STEP][spans of it], of one choice
  // the call in progress
  Phase *phases;
  int n_phases;
  Segment *segments;  // of the phase in progress
  int n_segments;
  uint64_t phase;     // its number, of all phases of all calls
  Count *units;
  const int32_t *ids;
  int first;             // row of the buffers that is the first token's
  int tokens, pos, logits_mode, sampled, mtp;  // logits_mode: 0 none, 1 last, 2 all; sampled: a decode step; mtp: runs MTP instead
  uint64_t serial;  // of the call
  Watch watch;      // of a prompt, or NULL; asked every `patience` nanoseconds, the last time at `asked`
  uint64_t patience, asked;
  atomic_int cut;   // it said so
  LayerCache of_heads;  // what is in `expanded`, of so many heads
  int widest;       // 16 columns of so many values have room in a thread's scratch
  float *logits_out;
  struct Piece *pieces;  // of working memory
  int short_;            // one of them could not be had
} Ctx;

enum { STEP = 16 };  // tokens of a decode step, at most: one, and what is verified with it; as library.STEP

#define MIN_(a, b) ((a) < (b) ? (a) : (b))
#define MAX_(a, b) ((a) > (b) ? (a) : (b))

// ---- inputs ----------------------------------------------------------------------------------------------------------

static int is_float(int type) { return type == F32 || type == F16 || type == BF16; }

// What the matrices of an op need of its input: bit 0 quantised, bit 1 floats.
static int needs(const Matrix *w, int n) {
  int need = 0;
  for (int i = 0; i < n; i++)
    if (w[i].groups) need |= is_float(w[i].type) ? 2 : 1;
  return need;
}

INLINE int in_planes(const Scratch *s, int n) { return s->planes && n % 32 == 0; }

static void prepare_row(const float *x, int n, const float *norm, float eps, int need, Scratch *to, size_t column, int nc, int c) {
  float by = norm ? rms_scale(x, n, eps) : 1.0f, *f = to->f + column * n;
  XScale *scales = to->scales + column * (n / 32);
  if (in_planes(to, n)) prepare_planes(x, n, norm, by, f, (PanelScale *)scales, nc, c);
  else prepare(x, n, norm, by, need & 1 ? to->q + 2 * column * n : NULL, scales, need & 2 ? f : NULL, nc, c);
}

// The only column of a product.
static void prepare_one(const float *x, int n, const float *norm, float eps, int need, Scratch *to) {
  prepare_row(x, n, norm, eps, need, to, 0, panel_width(1, in_planes(to, n)), 0);
}

INLINE X columns_of(const Scratch *s, size_t column, int k) {
  return columns_from(&(X){s->q, s->scales, s->f, k, in_planes(s, k)}, column);
}

// Whether this thread has already prepared the input of the op (one token); marks it as prepared.
static int ready(Ctx *c, const Op *op, int id) {
  uint64_t phase = c->serial << 20 | (uint64_t)(op - c->ops + 1);
  if (c->scratch[id].ready == phase) return 1;
  c->scratch[id].ready = phase;
  return 0;
}

// In a decode step an op whose results the next one needs quantised does that too, 32 values after 32, where each of the next one's threads
// would have to do it for all of them.
INLINE int makes(const Ctx *c, const Op *op) { return c->tokens == 1 && c->sampled && c->makes[op - c->ops]; }
INLINE int made(const Ctx *c, const Op *op) { return op > c->ops && makes(c, op - 1); }
static void make(Ctx *c, const float *x, int at, int n) {
  prepare(x, n, NULL, 1, c->made.q + 2 * (size_t)at, c->made.scales + at / 32, NULL, 1, 0);
}

// A task: part `part` of `parts` of a segment, run by thread `id`.
typedef struct { int id, stage, part, parts; const Segment *of; } Part;

// Counts a task of a unit as ended; whether it was the last of `tasks`.
static int ended(Ctx *c, int unit, int tasks) {
  atomic_int *count = &c->units[unit].count;
  if (atomic_fetch_add_explicit(count, 1, memory_order_acq_rel) + 1 < tasks) return 0;
  atomic_store_explicit(count, 0, memory_order_relaxed);
  return 1;
}

// The input of a linear op, in panels. With one token each thread prepares it for itself; with several, stage 0 prepares it for
// all threads and returns NULL.
static const Scratch *input(Ctx *c, const Op *op, Part me, int stage, const float *src, int stride, int n, const float *norm, int need) {
  if (made(c, op)) return &c->made;
  if (c->tokens == 1) {
    if (!ready(c, op, me.id)) prepare_one(src, n, norm, op->eps, need, &c->scratch[me.id]);
    return &c->scratch[me.id];
  }
  if (me.stage > stage) return &c->shared;
  for (int first = 0, w; first < c->tokens; first += w) {
    w = panel_width(c->tokens - first, in_planes(&c->shared, n));
    for (int i = 0; i < MIN_(w, c->tokens - first); i++)
      if ((first + i) % me.parts == me.part)
        prepare_row(src + (size_t)(first + i) * stride, n, norm, op->eps, need, &c->shared, first, w, i);
  }
  return NULL;
}

// ---- matrices --------------------------------------------------------------------------------------------------------

INLINE int groups16(const Matrix *w) { return (w->rows + 15) / 16; }
INLINE const uint8_t *rows16(const Matrix *w, int matrix, int group) {
  return w->data + ((size_t)matrix * groups16(w) + group) * group_bytes(w->type, w->cols);
}

// The share [*first, *last) of units, of which `before` bytes of work come first and each costs `bytes`. It begins with a multiple of
// `step`.
INLINE int border(double at, int units, int step) {
  int whole = (int)(MAX_(0, MIN_(at, units)) / step + 0.5) * step;
  return MIN_(whole, units);
}
INLINE void share(Part me, double total, double before, double bytes, int units, int step, int *first, int *last) {
  double per = total / me.parts;
  *first = border((per * me.part - before) / bytes, units, step);
  *last = me.part + 1 == me.parts ? units : border((per * (me.part + 1) - before) / bytes, units, step);
}
// Groups of 16 rows that are multiplied together with several tokens, of which a task has at least so many.
enum { LEAST = WORDS ? 4 : 2 };
INLINE int together(const Ctx *c) { return c->tokens > 1 ? LEAST : 1; }

INLINE f32v silu(f32v x) { return x / (exp_(-x) + 1.0f); }

// dst (+)= scale * (matrix @ x (+ bias)) for groups first..last-1 of 16 rows and all columns of x, of columns in planes elements `from`
// to `to`; out: the thread's sums.
static void multiply_part(f32v *out, const Matrix *w, int matrix, int first, int last, const Scratch *x, int tokens, int from, int to,
                          float *dst, int stride, const float *bias, float scale, int add) {
  for (int t = 0; t < tokens; t += COLUMNS)
    for (int g = first; g < last; g += GROUPS) {
      int columns = MIN_(COLUMNS, tokens - t), groups = MIN_(GROUPS, last - g);
      X p = columns_of(x, t, w->cols);
      product(w->type, rows16(w, matrix, g), groups, &p, columns, from, to, out);
      for (int i = 0; i < groups; i++)
        for (int c = 0; c < columns; c++) {
          int row = 16 * (g + i), n = w->rows - row;
          float *y = dst + (size_t)(t + c) * stride + row;
          f32v sum = out[i * pitch_of(columns) + c];
          if (bias) sum += fetch(bias + row, n);
          store(y, add ? fma_(sum, splat(scale), fetch(y, n)) : sum * scale, n);
        }
    }
}
static void multiply(f32v *out, const Matrix *w, int matrix, int first, int last, const Scratch *x, int tokens, float *dst, int stride,
                     const float *bias, float scale, int add) {
  multiply_part(out, w, matrix, first, last, x, tokens, 0, w->cols, dst, stride, bias, scale, add);
}

// ops.Gated: f(g, u).
INLINE f32v activated(int activation, f32v g, f32v u) {
  switch (activation) {
    case GELU: {  // 0.5 (1 + tanh(y)) is the sigmoid of 2 y, y = sqrt(2 / pi) (g + 0.044715 g^3)
      f32v y = g * (g * g * 0.044715f + 1.0f) * 1.59576912f;
      return g / (exp_(-y) + 1.0f) * u;
    }
    case CLAMPED: {
      f32v a = select_(g < splat(CLAMP), g, splat(CLAMP)), b = select_(u < splat(CLAMP), u, splat(CLAMP));
      b = max_(b, splat(-CLAMP));
      return a / (exp_(a * -CLAMP_SLOPE) + 1.0f) * (b + 1.0f);
    }
    default: return silu(g) * u;
  }
}

// The bias of a row of an op's matrix: `biases` of all its matrices, or NULL.
INLINE const float *bias_of(const float *biases, const Matrix *w, int matrix) { return biases ? biases + (size_t)matrix * w->rows : NULL; }

// dst = f(gate @ x + gate_bias, up @ x + up_bias) for groups first..last-1 of 16 rows.
static void multiply_gated(f32v *a, const Matrix *gate, const Matrix *up, int matrix, int first, int last, const Scratch *x, int tokens,
                           float *const *dst, int activation, const float *gate_bias, const float *up_bias) {
  f32v *b = a + GROUPS * COLUMNS;
  for (int t = 0; t < tokens; t += COLUMNS)
    for (int g = first; g < last; g += GROUPS) {
      int columns = MIN_(COLUMNS, tokens - t), groups = MIN_(GROUPS, last - g);
      X p = columns_of(x, t, gate->cols);
      product(gate->type, rows16(gate, matrix, g), groups, &p, columns, 0, gate->cols, a);
      product(up->type, rows16(up, matrix, g), groups, &p, columns, 0, up->cols, b);
      for (int i = 0; i < groups; i++)
        for (int c = 0; c < columns; c++) {
          int row = 16 * (g + i), n = gate->rows - row, at = i * pitch_of(columns) + c;
          if (gate_bias) a[at] += fetch(gate_bias + row, n);
          if (up_bias) b[at] += fetch(up_bias + row, n);
          store(dst[t + c] + row, activated(activation, a[at], b[at]), n);
        }
    }
}

static float *row(Ctx *c, int buffer, int token) { return c->buffers[buffer] + (size_t)(c->first + token) * c->widths[buffer]; }

// ---- ops -------------------------------------------------------------------------------------------------------------

// Tasks per thread and stage, where the number of tasks is free. One token's tasks are limited by memory, which serves 16 threads so
// unevenly that with 4 tasks each they wait for 12 to 15 % of a step, with 16 for 3 to 8 %; several tokens' by cores that others use too.
enum { SPLIT = 16, SPLIT_HEAD = 64 };  // SPLIT_HEAD: of one token and the output matrix, of which all are large
// Of one token and matrices of heads; of one of its experts, whose tasks have so many bytes at least.
enum { SPLIT_HEADS = 6, SPLIT_EXPERT = 4, LEAST_BYTES = 24 << 10 };

static void embed_token(Ctx *c, const Op *op, Part me, int t) {
  const Matrix *w = &op->w[0];
  f32v *column = (f32v *)c->scratch[me.id].merged;
  // rows are stored interleaved: all 16 of a group are decoded to get one
  dequantise(rows16(w, 0, c->ids[t] / 16), w->type, w->cols, column);
  float *x = row(c, op->dst[0], t);
  for (int i = 0; i < w->cols; i++) x[i] = column[i][c->ids[t] % 16] * op->scale;
}

static void embed(Ctx *c, const Op *op, Part me) {
  for (int t = me.part; t < c->tokens; t += me.parts) embed_token(c, op, me, t);
}

// Units of ops.LayerInputs that are computed by themselves: per token the layers, all at once where their rows of the table do
// not begin with a block.
enum { STRETCH = 256 };  // values, a multiple of every block; as library.STRETCH
static int input_units(const Op *op) { return op->key_dim % STRETCH ? 1 : op->w[0].cols / op->key_dim; }

// Values from..from+n-1 of a token's layer inputs; n layers' worth, of which the table has its rows as in the file.
static void layer_inputs_part(const Op *op, float *x, int32_t id, int from, int n) {
  const Matrix *w = &op->w[0];
  const QuantLayout *l = &layouts[w->type];
  const uint8_t *packed = w->data + (size_t)id * (w->cols / l->block) * l->bytes;
  for (float *y = x + from; y < x + from + n; y += op->key_dim) {
    float inv = rms_scale(y, op->key_dim, op->eps);
    for (int i = 0; i < op->key_dim; i++) y[i] *= inv * op->norm[i];
  }
  for (int at = from; at < from + n; at += STRETCH) {
    int count = MIN_(STRETCH, from + n - at);
    _Alignas(64) uint8_t group[16 * 4 * STRETCH + 256];
    f32v column[STRETCH];
    const uint8_t *rows[16] = {packed + (size_t)(at / l->block) * l->bytes};  // of a group that has one row
    pack_group(group, rows, w->type, count);
    dequantise(group, w->type, count, column);
    for (int i = 0; i < count; i++) x[at + i] = (x[at + i] + column[i][0] * op->scale) * 0.70710678f;
  }
}

static void layer_inputs(Ctx *c, const Op *op, Part me) {
  int units = input_units(op), n = op->w[0].cols / units, all = c->tokens * units;
  for (int i = all * me.part / me.parts; i < all * (me.part + 1) / me.parts; i++)
    layer_inputs_part(op, row(c, op->dst[0], i / units), c->ids[i / units], i % units * n, n);
}

static void gate_input(Ctx *c, const Op *op, Part me) {
  int n = op->key_dim;
  for (int t = me.part; t < c->tokens; t += me.parts) {
    const float *by = row(c, op->src, t) + (size_t)op->layer * n;
    float *x = row(c, op->dst[0], t);
    for (int i = 0; i < n; i += 16) store(x + i, activated(op->activation, fetch(x + i, n - i), fetch(by + i, n - i)), n - i);
  }
}

// Of a long row of a prompt only so many elements are multiplied, with all rows, before the next ones: those of 256 tokens stay in a core's
// second-level cache, and tasks are short.
enum { PART = 2048 };
INLINE int parts_of(const Ctx *c, const Op *op) { return in_planes(&c->shared, op->w[0].cols) ? (op->w[0].cols + PART - 1) / PART : 1; }

static void linear(Ctx *c, const Op *op, Part me) {
  int cols = op->w[0].cols, one = c->tokens == 1, part = one ? 0 : me.of->slot, end = one ? parts_of(c, op) : part + 1;
  const Scratch *x = input(c, op, me, 0, row(c, op->src, 0), c->widths[op->src], cols, op->norm, needs(op->w, op->matrices));
  if (!x) return;
  double total = 0, before = 0;
  for (int i = 0; i < op->matrices; i++) total += (double)groups16(&op->w[i]) * group_bytes(op->w[i].type, cols);
  for (int i = 0; i < op->matrices; i++) {
    const Matrix *w = &op->w[i];
    double bytes = group_bytes(w->type, cols);
    int first, last;
    share(me, total, before, bytes, groups16(w), together(c), &first, &last);
    for (int p = part; p < end; p++)
      multiply_part(c->scratch[me.id].sums, w, 0, first, last, x, c->tokens, p * PART, MIN_((p + 1) * PART, cols),
                    row(c, op->dst[i], 0) + op->at[i], c->widths[op->dst[i]], p ? NULL : op->bias[i], op->scale, op->add || p);
    before += groups16(w) * bytes;
  }
}

static void gate_up(Ctx *c, const Op *op, Part me) {
  const Scratch *x = input(c, op, me, 0, row(c, op->src, 0), c->widths[op->src], op->w[0].cols, op->norm, needs(op->w, 2));
  if (!x) return;
  float **dst = c->scratch[me.id].targets;
  for (int t = 0; t < c->tokens; t++) dst[t] = row(c, op->dst[0], t);
  int first, last, unit = makes(c, op) ? 2 : 1, n = groups16(&op->w[0]) / unit;
  share(me, n, 0, 1, n, together(c), &first, &last);
  multiply_gated(c->scratch[me.id].sums, &op->w[0], &op->w[1], 0, unit * first, unit * last, x, c->tokens, dst, op->activation, NULL, NULL);
  if (unit == 2) make(c, dst[0] + 32 * first, 32 * first, 32 * (last - first));
}

// dst = stream_scale * (dst + scale * RMSNorm(src)), or without `add` as if dst were 0.
static void norm_add(Ctx *c, const Op *op, Part me) {
  int n = c->widths[op->dst[0]];
  for (int t = me.part; t < c->tokens; t += me.parts) {
    const float *y = row(c, op->src, t);
    float *x = row(c, op->dst[0], t), inv = rms_scale(y, n, op->eps) * op->scale;
    for (int i = 0; i < n; i += 16) {
      f32v scaled = fetch(y + i, n - i) * inv;
      f32v base = op->add ? fetch(x + i, n - i) : splat(0);
      store(x + i, fma_(scaled, fetch(op->norm + i, n - i), base) * op->stream_scale, n - i);
    }
  }
}

// Rotates `dims` values at position pos, in place.
static void rotate(float *x, const Op *op, int pos) {
  int half_dims = op->rope_dims / 2;
  const float *table = op->rope + (size_t)pos * op->rope_dims;
  for (int i = 0; i < half_dims; i++) {
    float cs = table[2 * i], sn = table[2 * i + 1];
    float *a = op->neox ? x + i : x + 2 * i, *b = op->neox ? x + i + half_dims : a + 1, x0 = *a, x1 = *b;
    *a = x0 * cs - x1 * sn;
    *b = x0 * sn + x1 * cs;
  }
}

// Head h of a projection (q or k): norm and rotation, from src into dst.
static void turn_head(float *dst, const float *src, const Op *op, int h, const float *gain, int norm_len, int all, int pos) {
  int dim = op->key_dim;
  const float *x = src + (size_t)h * dim;
  if (gain) {
    float inv = norm_len != dim ? rms_scale(src, all, op->norm_eps) : rms_scale(x, dim, op->norm_eps);
    const float *g = norm_len == dim ? gain : gain + (size_t)h * dim;
    for (int i = 0; i < dim; i++) dst[i] = x[i] * inv * g[i];
  } else {
    memcpy(dst, x, sizeof(float) * (size_t)dim);
  }
  rotate(dst, op, pos);
}

enum { EXPANDED = -1 };  // as the layer of an op: of the keys and values that were made of latent rows
INLINE const LayerCache *cache_of(const Ctx *c, const Op *op) {
  return op->layer == EXPANDED ? &c->of_heads : &c->caches[op->layer];
}
INLINE uint16_t *k_tile(Ctx *c, const Op *op, int head, int pos) {
  const LayerCache *l = cache_of(c, op);
  return l->k + ((ptrdiff_t)head * l->rows + (pos & ~15) - l->base) * l->k_dim;
}
INLINE uint16_t *v_row(Ctx *c, const Op *op, int head, int pos) {
  const LayerCache *l = cache_of(c, op);
  return l->v + ((ptrdiff_t)head * l->rows + pos - l->base) * l->v_dim;
}

// h of ops.MTP: RMSNorm(x) as the hidden row of each token.
static void store_hidden(Ctx *c, const Op *op, Part me) {
  int n = c->widths[op->src];
  for (int t = me.part; t < c->tokens; t += me.parts) {
    const float *x = row(c, op->src, t);
    uint16_t *to = v_row(c, op, 0, c->pos + t);
    float inv = rms_scale(x, n, op->eps);
    for (int i = 0; i < n; i += 16) {
      u16x16 h = to_f16(fetch(x + i, n - i) * inv * fetch(op->norm + i, n - i));
      memcpy(to + i, &h, 2 * (size_t)MIN_(16, n - i));
    }
  }
}

static void norm_row(float *x, int n, const float *gain, float eps) {
  float inv = rms_scale(x, n, eps);
  for (int i = 0; i < n; i++) x[i] *= inv * gain[i];
}

// ops.Join; the gain of the hidden row is q_norm.
static void join(Ctx *c, const Op *op, Part me) {
  int n = op->w[0].cols;
  for (int t = me.part; t < c->tokens; t += me.parts) {
    float *x = row(c, op->dst[0], t);
    embed_token(c, op, me, t);
    norm_row(x, n, op->norm, op->eps);
    const uint16_t *h = c->pos + t ? v_row(c, op, 0, c->pos + t - 1) : NULL;
    for (int i = 0; i < n; i += 16) store(x + n + i, h ? from_f16(ld16(h + i)) : splat(0), n - i);
    norm_row(x + n, n, op->q_norm, op->eps);
  }
}

static void store_kv(Ctx *c, const Op *op, int kv, int token, float *tmp) {
  int pos = c->pos + token;
  turn_head(tmp, row(c, op->dst[1], token), op, kv, op->k_norm, op->k_norm_len, op->kv_heads * op->key_dim, pos);
  store_k(k_tile(c, op, kv, pos), tmp, op->key_dim, pos);
  const float *v = row(c, op->dst[2], token) + (size_t)kv * op->value_dim;
  uint16_t *to = v_row(c, op, kv, pos);
  float inv = op->value_norm ? rms_scale(v, op->value_dim, op->norm_eps) : 1.0f;
  for (int d = 0; d < op->value_dim; d += 16) {
    u16x16 h = to_f16(fetch(v + d, op->value_dim - d) * inv);
    memcpy(to + d, &h, 2 * (size_t)MIN_(16, op->value_dim - d));
  }
}

INLINE Cache cache_at(Ctx *c, const Op *op, int kv, int pos) {
  if (op->tag == LATENT_ATTENTION) return (Cache){k_tile(c, op, 0, pos), NULL, op->key_dim, op->value_dim};
  return (Cache){k_tile(c, op, kv, pos), v_row(c, op, kv, pos), op->key_dim, op->value_dim};
}

// Values of a head, filled up to whole vectors.
INLINE int padded(int n) { return (n + 15) / 16 * 16; }

// Query vectors of one task in a batch: enough to read keys seldom, few enough for many threads. In planes MOST, and no more than leave
// room for keys and values in the second-level cache.
enum { QUERIES = 40, MOST = 512 };
INLINE int plane_queries(const Op *op) { return MAX_(16, MIN_(MOST, (1 << 20) / (2 * op->key_dim + 4 * op->value_dim))); }

// The query vectors of a task, to be put into the thread's scratch: columns of [key_dim][stride], or rows of tiles.
INLINE int stride_of(int count) { return (count + 3) / 4 * 4; }
static void begin_queries(Scratch *s, const Op *op, int count) {
#if TILES || WORDS
  if (s->planes) {
    clear_queries(&s->queries, op->key_dim, count);
    return;
  }
#endif
  memset(s->attn_q, 0, sizeof(float) * (size_t)op->key_dim * stride_of(count));
}

// Query vector m of `count`: x of position pos, scaled.
static void put_query(Scratch *s, int count, int m, const float *x, const Op *op, int pos) {
  float scale = op->scale;
  if (op->temperature != 0) scale *= 1.0f + op->temperature * (float)log(1.0 + pos / op->temperature_length);
#if TILES || WORDS
  if (s->planes) {
    put_plane_query(&s->queries, m, x, op->key_dim, scale);
    return;
  }
#endif
  for (int d = 0; d < op->key_dim; d++) s->attn_q[(size_t)d * stride_of(count) + m] = x[d] * scale;
}

// Attention of them over a chunk, folded into their running (m, l, o).
static void attend_chunk(Scratch *s, const Cache *cache, int count, const int *from, const int *limit, float *m, float *l, float *o) {
#if TILES || WORDS
  if (s->planes) {
    attend_in_planes(cache, &s->queries, count, from, limit, &s->room, m, l, o);
    return;
  }
#endif
  float max[QUERIES], sum[QUERIES];
  int value = padded(cache->v_dim);
  attend(cache, s->attn_q, stride_of(count), count, from, limit, s->attn_s, max, sum, s->attn_out);
  for (int c = 0; c < count; c++) merge(&m[c], &l[c], o + (size_t)c * value, max[c], sum[c], s->attn_out + (size_t)c * value, value);
}

// The first cache position that a query at position pos attends to.
INLINE int first_seen(const Op *op, int pos) { return op->window ? MAX_(0, pos + 1 - op->window) : 0; }

// The term of query head h's sink in the sum of exponentials, relative to the maximum score `high`.
INLINE float sink(const Op *op, int h, float high) { return op->sinks ? exp_(splat(op->sinks[h] - high))[0] : 0; }

// A head's result: the weighted sum of its values over the sum of weights, and its gate.
static void finish(Ctx *c, const Op *op, int token, int h, const float *sum, float weights) {
  int n = op->value_dim;
  float *dst = row(c, op->dst[0], token) + (size_t)h * n;
  for (int d = 0; d < n; d += 16) {
    f32v y = ldf(sum + d) / weights;
    if (op->gated) {
      const float *gate = row(c, op->dst[3], token) + (size_t)h * op->gated;
      y = y / (exp_(-(op->gated == 1 ? splat(*gate) : fetch(gate + d, n - d))) + 1.0f);
    }
    store(dst + d, y, n - d);
  }
  if (makes(c, op)) make(c, dst, h * n, n);
}

enum { MAX_GROUP = 1024 };  // query heads of one kv head; as library.MAX_GROUP, checked when the library is loaded

// How long the threads take for tasks of so many query vectors: in rounds, a task's time that of its vectors and of what they
// share, which takes as long as one vector, or three where V is K transposed. In tiles as long as 40, or 80; there tasks take long, and
// cores are unequal, so that in the end a task is waited for.
INLINE int attention_cost(const Ctx *c, const Op *op, int tasks, int vectors) {
  int latent = op->tag == LATENT_ATTENTION;
  if (c->shared.planes) return (tasks + c->pool.threads) * (vectors + (latent ? 80 : 40));
  return (tasks + c->pool.threads - 1) / c->pool.threads * (vectors + (latent ? 3 : 1));
}

// One token: tasks are (kv head, part of its query heads, chunk); the thread that finishes a part's last chunk merges all in order.
// A part has `per` heads, so that the threads need least time.
static int attention_tasks(const Ctx *c, const Op *op, int *per) {
  int group = op->heads / op->kv_heads, chunks = c->pos / CHUNK + 1 - first_seen(op, c->pos) / CHUNK, best = 0;
  for (int heads = group; heads > 0; heads--) {
    int cost = attention_cost(c, op, op->kv_heads * chunks * ((group + heads - 1) / heads), heads);
    if (!best || cost < best) best = cost, *per = heads;
  }
  return op->kv_heads * chunks * ((group + *per - 1) / *per);
}

static void attention_one(Ctx *c, const Op *op, int id, int task) {
  Scratch *s = &c->scratch[id];
  int per, tasks = attention_tasks(c, op, &per), group = op->heads / op->kv_heads, seen = first_seen(op, c->pos);
  int first = seen / CHUNK, chunks = c->pos / CHUNK + 1 - first;
  int parts = tasks / op->kv_heads / chunks, value = padded(op->value_dim), record = value + 16;
  int kv = task / (parts * chunks), part = task / chunks % parts, chunk = task % chunks;
  int h0 = kv * group + part * per, count = MIN_(per, group - part * per);
  int start = (first + chunk) * CHUNK, from[MAX_GROUP], limit[MAX_GROUP];
  float high[MAX_GROUP], sum[MAX_GROUP];
  begin_queries(s, op, count);
  for (int m = 0; m < count; m++) {
    const float *q = row(c, op->src, 0) + (size_t)(h0 + m) * op->key_dim;
    if (op->tag == ATTENTION) {
      turn_head(s->merged, row(c, op->src, 0), op, h0 + m, op->q_norm, op->q_norm_len, op->heads * op->key_dim, c->pos);
      q = s->merged;
    }
    put_query(s, count, m, q, op, c->pos);
    from[m] = MAX_(0, seen - start), limit[m] = MIN_(CHUNK, c->pos + 1 - start);
  }
  if (op->stores && chunk == chunks - 1) store_kv(c, op, kv, 0, s->merged);  // each part writes the same bytes
  Cache cache = cache_at(c, op, kv, start);
  if (s->planes) {
    memset(high, 0, sizeof(float) * count), memset(sum, 0, sizeof(float) * count), memset(s->attn_out, 0, sizeof(float) * count * value);
    attend_chunk(s, &cache, count, from, limit, high, sum, s->attn_out);
  } else {
    attend(&cache, s->attn_q, stride_of(count), count, from, limit, s->attn_s, high, sum, s->attn_out);
  }
  for (int m = 0; m < count; m++) {
    float *to = c->partial + ((size_t)(h0 + m) * chunks + chunk) * record;
    to[0] = high[m], to[1] = sum[m];
    memcpy(to + 16, s->attn_out + (size_t)m * value, sizeof(float) * value);
  }
  if (atomic_fetch_add_explicit(&c->done[h0], 1, memory_order_acq_rel) + 1 < chunks) return;
  atomic_store_explicit(&c->done[h0], 0, memory_order_relaxed);
  for (int m = 0; m < count; m++) {
    float top = 0, total = 0;
    memset(s->merged, 0, sizeof(float) * value);
    for (int i = 0; i < chunks; i++) {
      const float *p = c->partial + ((size_t)(h0 + m) * chunks + i) * record;
      merge(&top, &total, s->merged, p[0], p[1], p + 16, value);
    }
    total += sink(op, h0 + m, top);
    finish(c, op, 0, h0 + m, s->merged, total);
  }
}

// Several tokens: keys and values into the cache, and the queries turned in place.
static void attention_inputs(Ctx *c, const Op *op, Part me) {
  float *tmp = c->scratch[me.id].merged;
  for (int t = me.part; t < c->tokens; t += me.parts) {
    for (int kv = 0; kv < op->kv_heads && op->stores; kv++) store_kv(c, op, kv, t, tmp);
    float *q = row(c, op->src, t);
    int all = op->heads * op->key_dim;
    for (int h = 0; h < op->heads; h++)
      turn_head(tmp + (size_t)h * op->key_dim, q, op, h, op->q_norm, op->q_norm_len, all, c->pos + t);
    memcpy(q, tmp, sizeof(float) * all);
  }
}

// Then tasks are (kv head, part of its query heads, block of tokens), each over all its chunks, the longest first. Where there are
// few of them, as when drafts are verified, they are halved if the threads need less time then.
typedef struct { int per_token, parts, block, blocks; } Blocks;
static Blocks query_blocks(const Ctx *c, const Op *op) {
  int most = c->shared.planes ? plane_queries(op) : QUERIES, least = 0;
  int group = op->heads / op->kv_heads, heads = MIN_(group, most), block = MIN_(c->tokens, most / heads);
  for (Blocks best = {0};;) {
    Blocks b = {heads, (group + heads - 1) / heads, block, (c->tokens + block - 1) / block};
    int tasks = op->kv_heads * b.parts * b.blocks, cost = attention_cost(c, op, tasks, heads * block);
    if (!least || cost < least) least = cost, best = b;
    if (tasks >= 4 * c->pool.threads || heads * block == 1) return best;
    if (block > 1) block = (block + 1) / 2;
    else heads = (heads + 1) / 2;
  }
}

// before: heads in front of the first one of these.
static void attention_block(Ctx *c, const Op *op, int id, int task, int before) {
  Scratch *s = &c->scratch[id];
  Blocks b = query_blocks(c, op);
  int group = op->heads / op->kv_heads, value = padded(op->value_dim);
  int kv = task % op->kv_heads, part = task / op->kv_heads % b.parts, first = (b.blocks - 1 - task / op->kv_heads / b.parts) * b.block;
  int h0 = before + kv * group + part * b.per_token, heads = MIN_(b.per_token, group - part * b.per_token);
  int n = MIN_(b.block, c->tokens - first), count = n * heads;
  int from[MOST], limit[MOST];
  float top[MOST], total[MOST];
  begin_queries(s, op, count);
  memset(s->merged, 0, sizeof(float) * (size_t)count * value);
  for (int m = 0; m < count; m++) {
    put_query(s, count, m, row(c, op->src, first + m / heads) + (size_t)(h0 + m % heads) * op->key_dim, op,
              c->pos + first + m / heads);
    top[m] = total[m] = 0;
  }
  for (int start = first_seen(op, c->pos + first) / CHUNK * CHUNK; start < c->pos + first + n; start += CHUNK) {
    for (int m = 0; m < count; m++) {
      int pos = c->pos + first + m / heads;
      from[m] = MIN_(CHUNK, MAX_(0, first_seen(op, pos) - start)), limit[m] = MAX_(0, MIN_(CHUNK, pos + 1 - start));
    }
    Cache cache = cache_at(c, op, kv, start);
    attend_chunk(s, &cache, count, from, limit, top, total, s->merged);
  }
  for (int m = 0; m < count; m++)
    finish(c, op, first + m / heads, h0 + m % heads, s->merged + (size_t)m * value, total[m] + sink(op, h0 + m % heads, top[m]));
}

// ---- latent rows as keys and values of heads, in long pieces of prompts (expand.h) ----
// Three ops of a layer have another form then: ABSORB stores the rows and turns the queries, LATENT_ATTENTION makes keys and values of some
// heads and attends to them, then of the next ones, and VALUE_UP has nothing to do.

#if TILES || WORDS
INLINE HeadDims head_dims(const Op *latent) {
  return (HeadDims){latent->value_dim, latent[-1].rope_dims, latent[-1].nope, latent[1].w[0].rows};
}

// Whether that takes fewer products than attention to latent rows, which cost more a pair of query and key, but need no keys and
// values of the rows in front of the piece. What it takes to unpack a head's matrices as columns counts as some rows more.
static int expands(const Ctx *c, const Op *latent) {
  HeadDims d = head_dims(latent);
  if (!(tiles_allowed || WORDS) || c->sampled || c->mtp || d.latent % 32 || d.key % 32 || d.rotated % 32) return 0;
  double saved = 2 * d.latent - d.key - d.value, made = (double)(d.key + d.value) * d.latent;
  return c->tokens > STEP && c->tokens * (c->pos + 0.5 * c->tokens) * saved > (c->pos + 100.0) * made;
}

// Of the heads whose keys and values have room at the same time: in how many pieces the heads are taken, and how many rows a head has.
INLINE int expanded_rows(const Ctx *c) { return (c->pos + c->tokens + 15) / 16 * 16; }
static int head_groups(const Ctx *c, const Op *latent) {
  HeadDims d = head_dims(latent);
  uint64_t head = (uint64_t)expanded_rows(c) * (uint64_t)(d.key + d.rotated + d.value);
  int most = (int)MIN_(c->expanded_room / head, (uint64_t)latent->heads);
  return (latent->heads + most - 1) / most;
}

// Attention of heads to their keys and values, as in a layer without latent rows: of group g, whose first head is *first.
static Op attention_of_heads(const Ctx *c, const Op *latent, int g, int *first) {
  HeadDims d = head_dims(latent);
  Op op = *latent;
  int n = head_groups(c, latent), last = latent->heads * (g + 1) / n;
  *first = latent->heads * g / n;
  op.tag = ATTENTION, op.layer = EXPANDED, op.src = latent[-1].src, op.dst[0] = latent[1].dst[0];
  op.key_dim = d.key + d.rotated, op.value_dim = d.value, op.heads = op.kv_heads = last - *first;
  return op;
}

// The rows of head h of W_k_b, transposed, and of W_v_b as columns, which stay in the shared scratch until the layer's output.
static void head_columns(Ctx *c, const Op *absorb, int id, int h) {
  HeadDims d = head_dims(absorb + 1);
  const Matrix *k = &absorb->w[0], *v = &absorb[2].w[0];
  f32v *group = c->scratch[id].sums;
  float *x = c->scratch[id].merged;
  size_t pitch = (size_t)column_pitch(&d), column = (size_t)h * columns_per_head(&d);
  int width = panel_width(16, 1);
  for (int g = 0; g < d.latent; g += 16) {
    dequantise(rows16(k, h, g / 16), k->type, k->cols, group);
    for (int i = 0; i < d.key; i++) stf(x + i * pitch + g, group[i]);
  }
  for (int i = 0; i < d.key; i++)
    prepare_row(x + i * pitch, d.latent, NULL, 0, 0, &c->shared, column + i / width * width, width, i % width);
  column += filled_16(d.key);
  for (int g = 0; g < d.value; g += 16, column += 16) {
    dequantise(rows16(v, h, g / 16), v->type, v->cols, group);
    for (int i = 0; i < d.latent; i += 16) transpose_floats(group + i, x + i, pitch);
    for (int i = 0; i < MIN_(16, d.value - g); i++)
      prepare_row(x + i * pitch, d.latent, NULL, 0, 0, &c->shared, column + i / width * width, width, i % width);
  }
}

// Lays out their place; layers have all the same.
static void begin_expanded(Ctx *c, const Op *latent) {
  HeadDims d = head_dims(latent);
  int heads = (latent->heads + head_groups(c, latent) - 1) / head_groups(c, latent), rows = expanded_rows(c);
  uint16_t *k = c->expanded, *v = k + (size_t)heads * rows * (d.key + d.rotated);
  c->of_heads = (LayerCache){.k = k, .v = v, .heads = heads, .k_dim = d.key + d.rotated, .v_dim = d.value, .rows = rows};
}

// Tasks: the group's heads and GROUPS tiles of rows each.
INLINE int row_pieces(const Ctx *c) { return (expanded_rows(c) / 16 + GROUPS - 1) / GROUPS; }
static void make_heads(Ctx *c, const Op *latent, Part me) {
  HeadDims d = head_dims(latent);
  int before, pieces = row_pieces(c);
  Op op = attention_of_heads(c, latent, me.stage / 2, &before);
  int units = op.heads * pieces;
  for (int u = units * me.part / me.parts; u < units * (me.part + 1) / me.parts; u++) {
    int h = u / pieces, pos = u % pieces * 16 * GROUPS;
    X x = columns_of(&c->shared, (size_t)(before + h) * columns_per_head(&d), d.latent);
    expand_rows(k_tile(c, latent, 0, pos), MIN_(GROUPS, (expanded_rows(c) - pos) / 16), &d, &x, k_tile(c, &op, h, pos), v_row(c, &op, h, pos),
                c->scratch[me.id].sums);
  }
}

static void attend_by_heads(Ctx *c, const Op *latent, Part me) {
  int before;
  Op op = attention_of_heads(c, latent, me.stage / 2, &before);
  if (me.stage % 2) attention_block(c, &op, me.id, me.part, before);
  else make_heads(c, latent, me);
}
static int tasks_by_heads(const Ctx *c, const Op *latent, int stage, int some) {
  int before;
  Op op = attention_of_heads(c, latent, stage / 2, &before);
  if (stage % 2 == 0) return MIN_(some, op.heads * row_pieces(c));
  Blocks b = query_blocks(c, &op);
  return op.heads * b.blocks;
}
#else
#define expands(c, latent) 0
#define head_groups(c, latent) 0
#define begin_expanded(c, latent)
#define head_columns(c, absorb, id, h)
#define attend_by_heads(c, latent, me)
#define tasks_by_heads(c, latent, stage, some) 0
#endif

static void attention(Ctx *c, const Op *op, Part me) {
  if (c->tokens == 1) attention_one(c, op, me.id, me.part);
  else if (op->tag == ATTENTION && me.stage == 0) attention_inputs(c, op, me);
  else if (op->tag == LATENT_ATTENTION && expands(c, op)) attend_by_heads(c, op, me);
  else attention_block(c, op, me.id, me.part, 0);
}

// A task: a head of q, of k or of v. Heads of q and k have length 1 afterwards, those of q over sqrt(key_dim).
static void convolve(Ctx *c, const Op *op, int unit) {
  int keys = op->kv_heads, channels = 2 * keys * op->key_dim + op->heads * op->value_dim, taps = op->taps;
  int of_keys = unit < 2 * keys, n = of_keys ? op->key_dim : op->value_dim;
  size_t from = of_keys ? (size_t)unit * n : (size_t)2 * keys * op->key_dim + (size_t)(unit - 2 * keys) * n;
  size_t stride = c->widths[op->dst[0]];
  float *x = row(c, op->dst[0], 0) + from, *tail = c->caches[op->layer].tail + from;
  const float *weights = op->bias[0] + from;
  int columns = channels;
  if (op->bias[1]) {  // one for each of q, k and v, which have as many channels
    columns = channels / 3;
    weights = op->bias[from / columns] + from % columns;
  }
  for (int i = 0; i < n; i += 16)
    convolve16(x + i, stride, c->tokens, weights + i, columns, taps, tail + i, channels, n - i, c->pos == 0);
  for (int t = 0; t < c->tokens && of_keys; t++) {
    float *at = x + t * stride, inv = rms_scale(at, n, op->eps / (float)n) / (unit < keys ? (float)n : __builtin_sqrtf((float)n));
    for (int i = 0; i < n; i += 16) store(at + i, fetch(at + i, n - i) * inv, n - i);
  }
}

// Tasks: shares of the channels, 16 at a time.
static void gated_convolve(Ctx *c, const Op *op, Part me) {
  int n = op->key_dim, vectors = (n + 15) / 16;
  size_t stride = c->widths[op->src], out_stride = c->widths[op->dst[0]];
  const float *b = row(c, op->src, 0);
  for (int v = vectors * me.part / me.parts; v < vectors * (me.part + 1) / me.parts; v++)
    gated_convolve16(b + 16 * v, b + n + 16 * v, b + 2 * n + 16 * v, stride, row(c, op->dst[0], 0) + 16 * v, out_stride,
                     c->tokens, op->bias[0] + 16 * v, op->taps, c->caches[op->layer].tail + 16 * v, n, n - 16 * v, c->pos == 0);
}

// A task: a head's state, outputs, their norm and gate.
static void delta(Ctx *c, const Op *op, int id, int h) {
  int keys = op->kv_heads, key = op->grouped ? h / (op->heads / keys) : h % keys, n = op->value_dim;
  size_t width = padded(n), size = (size_t)op->key_dim * width;
  float *state = c->caches[op->layer].state + h * size, *rate = c->scratch[id].merged, *decay = row(c, op->dst[3], 0);
  const float *qkv = row(c, op->src, 0);
  int decays = op->by_channel ? op->key_dim : 1, pitch = c->widths[op->dst[3]];
  decay += (size_t)h * decays;
  if (c->pos == 0) memset(state, 0, sizeof(float) * size);
  for (int t = 0; t < c->tokens; t++) {
    double beta = row(c, op->dst[2], t)[h];
    rate[t] = (float)(1 / (1 + exp(-beta)));
    for (int i = 0; i < decays; i++) {  // in place: they are this head's
      double alpha = decay[(size_t)t * pitch + i] + op->bias[1][h * decays + i];
      double speed = op->bias[0][h], bound = op->lower_bound;
      decay[(size_t)t * pitch + i] =
          (float)exp(bound != 0 ? bound / (1 + exp(-speed * alpha)) : speed * (alpha > 20 ? alpha : log1p(exp(alpha))));
    }
  }
  const float *q = qkv + (size_t)key * op->key_dim;
  Rule r = {q, q + (size_t)keys * op->key_dim, qkv + (size_t)2 * keys * op->key_dim + (size_t)h * n, (size_t)c->widths[op->src], decay,
            (size_t)pitch, rate, c->tokens, op->key_dim, op->by_channel};
  delta_rule(&r, state, n, width, row(c, op->dst[0], 0) + (size_t)h * n, (size_t)c->widths[op->dst[0]]);
  for (int t = 0; t < c->tokens; t++) {
    float *o = row(c, op->dst[0], t) + (size_t)h * n, inv = rms_scale(o, n, op->eps);
    for (int i = 0; i < n; i += 16) {
      f32v gate = fetch(row(c, op->dst[1], t) + (size_t)h * n + i, n - i);
      f32v by = op->by_channel ? 1.0f / (exp_(-gate) + 1.0f) : silu(gate);
      store(o + i, fetch(o + i, n - i) * inv * fetch(op->norm + i, n - i) * by, n - i);
    }
  }
}

// One matrix per head: dst[h][dst_stride..] = w[h] @ src[h][src_stride..], the input as it is.
static void per_head(Ctx *c, const Op *op, Part me, int src_stride, int dst_stride) {
  const Matrix *w = &op->w[0];
  Scratch *s = &c->scratch[me.id];
  int groups = groups16(w), need = needs(w, 1), first = 0, last = 0, most = MAX_(1, MIN_(COLUMNS / 16, c->widest / w->cols)) * 16;
  // with one token a share may end inside a head; a batch's heads are quantised once each, so shares are whole heads there
  int unit = makes(c, op) ? 2 : c->tokens == 1 || c->pool.threads > w->groups ? 1 : groups;
  share(me, w->groups * groups / unit, 0, 1, w->groups * groups / unit, 1, &first, &last);
  first *= unit, last *= unit;
  for (int h = first / groups; h * groups < last; h++) {
    int from = MAX_(first, h * groups) - h * groups, to = MIN_(last, (h + 1) * groups) - h * groups;
    for (int start = 0, n; start < c->tokens; start += n) {
      n = MIN_(most, c->tokens - start);
      int prepared = c->tokens == 1 && ready(c, op, me.id) && s->head == h;
      s->head = h;
      for (int at = 0, width; at < n && !prepared; at += width) {
        width = panel_width(n - at, in_planes(s, w->cols));
        for (int i = 0; i < MIN_(width, n - at); i++)
          prepare_row(row(c, op->src, start + at + i) + (size_t)h * src_stride, w->cols, NULL, 0, need, s, (size_t)at, width, i);
      }
      float *dst = row(c, op->dst[0], start) + (size_t)h * dst_stride;
      multiply(s->sums, w, h, from, to, s, n, dst, c->widths[op->dst[0]], NULL, 1, 0);
      if (makes(c, op)) make(c, dst + 16 * from, h * dst_stride + 16 * from, 16 * (to - from));
    }
  }
}

// Latent row of the cache, rotation of q, and q's no-position part through the K matrix of each head.
static void absorb(Ctx *c, const Op *op, Part me) {
  int latent = op->w[0].rows, width = latent + op->rope_dims, dim = op->nope + op->rope_dims;
  float *tmp = c->scratch[me.id].merged;
  for (int t = 0; t < c->tokens; t++) {
    int pos = c->pos + t;
    if (t % me.parts == me.part && me.of == c->segments) {
      const float *kv = row(c, op->dst[1], t);
      float inv = rms_scale(kv, latent, op->norm_eps);
      for (int i = 0; i < latent; i++) tmp[i] = kv[i] * inv * op->norm[i];
      memcpy(tmp + latent, kv + latent, sizeof(float) * op->rope_dims);
      rotate(tmp + latent, op, pos);
      store_k(k_tile(c, op, 0, pos), tmp, width, pos);
    }
  }
  if (me.of->slot == ALONE) return;
  if (expands(c, op + 1)) {
    for (int t = me.part; t < c->tokens; t += me.parts)
      for (int h = 0; h < op->heads; h++) rotate(row(c, op->src, t) + (size_t)h * dim + op->nope, op, c->pos + t);
    for (int h = me.part; h < op->heads; h += me.parts) head_columns(c, op, me.id, h);
    return;
  }
  int all = c->tokens * op->heads;
  for (int i = all * me.part / me.parts; i < all * (me.part + 1) / me.parts; i++) {
    int t = i / op->heads, h = i % op->heads;
    float *to = row(c, op->dst[0], t) + (size_t)h * width + latent;
    memcpy(to, row(c, op->src, t) + (size_t)h * dim + op->nope, sizeof(float) * op->rope_dims);
    rotate(to, op, c->pos + t);
  }
  per_head(c, op, me, dim, width);
}

static void value_up(Ctx *c, const Op *op, Part me) { per_head(c, op, me, op->w[0].cols, op->w[0].rows); }

static float highest(const float *x, int n) {
  f32v m = splat(-__builtin_inff());
  int i = 0;
  for (; i + 16 <= n; i += 16) m = max_(m, ldf(x + i));
  float high = hmax(m);
  for (; i < n; i++) high = MAX_(high, x[i]);
  return high;
}

// Chooses the experts of one token from its router logits l; ids and weights: [top_k].
static void choose(const Op *op, const Scratch *s, const float *l, int32_t *ids, float *weights) {
  int n = op->w[0].rows;
  float *p = s->chances, *pick = p + n;
  for (int i = 0; i < n; i++) p[i] = l[i] * op->logit_scale;
  if (op->gating == SOFTMAX) {
    float high = highest(p, n), sum = 0;
    for (int i = 0; i < n; i += 16) store(p + i, exp_(fetch(p + i, n - i) - high), n - i);
    for (int i = 0; i < n; i++) sum += p[i];
    for (int i = 0; i < n; i++) p[i] /= sum;
  } else if (op->gating == SIGMOID) {
    for (int i = 0; i < n; i += 16) store(p + i, 1.0f / (exp_(-fetch(p + i, n - i)) + 1.0f), n - i);
  } else if (op->gating == SQRT_SOFTPLUS) {
    for (int i = 0; i < n; i++) p[i] = (float)__builtin_sqrt(p[i] > 20 ? p[i] : log(1.0 + exp(p[i])));
  }
  for (int i = 0; i < n; i++) pick[i] = p[i] + (op->bias[1] ? op->bias[1][i] : 0);
  if (op->route_groups > 1) {
    int per = n / op->route_groups, *kept = s->groups;
    float *score = (float *)(kept + op->route_groups);
    for (int g = 0; g < op->route_groups; g++) {
      float a = -__builtin_inff(), b = a;
      for (int i = g * per; i < (g + 1) * per; i++) {
        if (pick[i] > a) b = a, a = pick[i];
        else if (pick[i] > b) b = pick[i];
      }
      score[g] = per > 1 ? a + b : a, kept[g] = 0;
    }
    for (int k = 0; k < op->route_groups_used; k++) {
      int best = -1;
      for (int g = 0; g < op->route_groups; g++)
        if (!kept[g] && (best < 0 || score[g] > score[best])) best = g;
      kept[best] = 1;
    }
    for (int i = 0; i < n; i++)
      if (!kept[i / per]) pick[i] = -__builtin_inff();
  }
  float sum = 0;
  for (int k = 0; k < op->top_k; k++) {
    float high = highest(pick, n);
    int best = 0;
    while (best < n - 1 && pick[best] != high) best++;
    pick[best] = -__builtin_inff();
    ids[k] = best;
    sum += weights[k] = p[best];
  }
  if (op->gating == SOFTMAX_WEIGHT) {
    float high = weights[0];
    for (int k = 1; k < op->top_k; k++) high = MAX_(high, weights[k]);
    sum = 0;
    for (int k = 0; k < op->top_k; k++) sum += weights[k] = exp_(splat(weights[k] - high))[0];
    for (int k = 0; k < op->top_k; k++) weights[k] /= sum;
    sum = 1;
  }
  float factor = (op->normalize ? 1.0f / MAX_(sum, MIN_WEIGHT_SUM) : 1.0f) * op->scale;
  for (int k = 0; k < op->top_k; k++) weights[k] *= factor * (op->bias[2] ? op->bias[2][ids[k]] : 1.0f);
}

// In a decode step of one token a task of a router in F32, which has few rows, sums up every second column of 16 of them: one of the two
// chains that a product adds up in the end.
static int halved(const Ctx *c, const Op *op) { return c->sampled && c->tokens == 1 && op->w[0].type == F32; }
static void route_half(Ctx *c, const Matrix *w, const float *x, int group, int half) {
  const uint8_t *a = rows16(w, 0, group);
  f32v sum = splat(0);
  for (int k = half; k < w->cols; k += 2) {
    prefetch(a + 64 * (size_t)k, 64);
    sum = fma_(load_F32(a + 64 * (size_t)k), splat(x[k]), sum);
  }
  stf(c->router_logits + 16 * (half * groups16(w) + group), sum);
}
// Adds up both halves.
static const float *whole_logits(const Ctx *c, const Op *op, float *out) {
  if (!halved(c, op)) return c->router_logits;
  int n = op->w[0].rows;
  for (int i = 0; i < n; i += 16) {
    f32v y = ldf(c->router_logits + i) + ldf(c->router_logits + 16 * groups16(&op->w[0]) + i);
    store(out + i, op->bias[0] ? y + fetch(op->bias[0] + i, n - i) : y, n - i);
  }
  return out;
}

static void route(Ctx *c, const Op *op, Part me) {
  const Matrix *w = &op->w[0];
  if (me.stage == 2) {  // with one token, every thread chooses for itself at the start of the next phase
    for (int t = me.part; t < c->tokens; t += me.parts)
      choose(op, &c->scratch[me.id], c->router_logits + (size_t)t * w->rows, c->route_ids + t * op->top_k, c->route_weights + t * op->top_k);
    return;
  }
  const Scratch *x = input(c, op, me, 0, row(c, op->src, 0), c->widths[op->src], w->cols, op->norm, needs(w, 1));
  if (!x) return;
  int first, last, n = groups16(w);
  if (halved(c, op)) {
    route_half(c, w, x->f, me.part / 2, me.part % 2);
    return;
  }
  share(me, n, 0, 1, n, 1, &first, &last);
  multiply(c->scratch[me.id].sums, w, 0, first, last, x, c->tokens, c->router_logits, w->rows, op->bias[0], 1, 0);
}

// Tokens of a batch that chose expert e: token * top_k + slot of each. Returns how many.
static int pairs_of(const Ctx *c, const Op *op, int e, int32_t *pairs) {
  int n = 0;
  for (int i = 0; i < c->tokens * op->top_k; i++)
    if (c->route_ids[i] == e) pairs[n++] = i;
  return n;
}

// Lists the experts that the tokens of a batch chose, for each thread those of the most tokens first, since the last ones are waited for.
static void list_experts(Ctx *c, const Op *op) {
  int n = op->w[0].groups, most = 0, rank = 0;
  int32_t *tokens = c->chosen + n;
  memset(tokens, 0, sizeof(int32_t) * (size_t)n);
  for (int i = 0; i < c->tokens * op->top_k; i++) tokens[c->route_ids[i]]++;
  c->n_chosen = 0;
  for (int e = 0; e < n; e++) c->n_chosen += tokens[e] > 0, most = MAX_(most, tokens[e]);
  for (; most > 0; most--)
    for (int e = 0; e < n; e++)
      if (tokens[e] == most) c->chosen[place_of(rank++, c->n_chosen, c->pool.threads)] = e;
}

// Into how many parts the rows of each of them are divided, so that threads which end first find something to take.
static int expert_parts(const Ctx *c) { return (SPLIT * c->pool.threads + c->n_chosen - 1) / c->n_chosen; }

// Tokens that are multiplied with an expert at a time, where columns have k values: its weights are unpacked once for all of them.
enum { EXPERT_COLUMNS = 64 };
static int expert_columns(const Ctx *c, int k) { return MIN_(EXPERT_COLUMNS, c->widest / k * 16); }

// Copies prepared columns (each by itself) side by side into panels.
static void gather(Scratch *to, const Scratch *from, const int32_t *column, int n, int k, int need) {
  for (int start = 0, width; start < n; start += width) {
    int planes = in_planes(from, k);
    width = panel_width(n - start, planes);
    for (int i = 0; i < MIN_(width, n - start); i++) {
      X x = columns_of(from, column[start + i], k);
      int8_t *q = to->q + (size_t)start * k * 2 + 64 * i;
      XScale *s = to->scales + (size_t)start * (k / 32) + i;
      if (planes) {
        uint8_t *p = (uint8_t *)(to->f + (size_t)start * k) + 64 * i;
        PanelScale *scales = (PanelScale *)(s - i) + i;
        for (int b = 0; b < (k + 63) / 64 * 2; b++) memcpy(p + (size_t)b * 64 * width, (const uint8_t *)x.f + 64 * b, 64);
        for (int b = 0; b * SCALED < k; b++) scales[b * width] = ((const PanelScale *)x.scales)[b];
        continue;
      }
      if (need & 1)
        for (int b = 0; b < k / 32; b++) memcpy(q + (size_t)b * 64 * width, x.q + b * 64, 64), s[b * width] = x.scales[b];
      if (need & 2)
        for (int j = 0; j < k; j++) to->f[((size_t)start + 0) * k + (size_t)j * width + i] = x.f[j];
    }
  }
}

// Multiplies rows of groups first..last-1 of 16 of the shared expert, of one token, by how much it counts.
static void scale_shared(Ctx *c, const Op *op, int token, float *dst, int first, int last) {
  if (!op->shared_scale) return;
  int k = op->w[0].cols, rows = op->w[2].rows;
  const float *x = row(c, op->src, token);
  f32v sum = splat(0);
  for (int i = 0; i < k; i += 16) sum = fma_(fetch(x + i, k - i) * fetch(op->norm + i, k - i), fetch(op->shared_scale + i, k - i), sum);
  f32v by = 1.0f / (exp_(splat(-hsum(sum) * rms_scale(x, k, op->eps))) + 1.0f);
  for (int r = 16 * first; r < MIN_(16 * last, rows); r += 16) store(dst + r, fetch(dst + r, rows - r) * by, rows - r);
}

static void experts_up(Ctx *c, const Op *op, Part me) {
  const Op *router = c->ops + op->router;
  const Matrix *gate = &op->w[0], *shared = &op->w[2];
  int k = gate->cols, ff = gate->rows, top = op->top_k, need = needs(op->w, 4), groups = groups16(gate);
  Scratch *s = &c->scratch[me.id];
  if (c->tokens == 1) {
    int routed = me.of->slot < top, unit = makes(c, op) ? 2 : 1, expert = 0, first, last;
    const Matrix *w = op->w + (routed ? 0 : 2);
    if (!ready(c, op, me.id)) prepare_one(row(c, op->src, 0), k, op->norm, op->eps, need, s);
    if (routed) {
      if (s->chosen != c->phase) choose(router, s, whole_logits(c, router, s->chances), s->experts, s->expert_weights);
      s->chosen = c->phase, expert = s->experts[me.of->slot];
      if (me.part == 0) {
        op->routes[me.of->slot] = c->route_ids[me.of->slot] = expert;
        c->route_weights[me.of->slot] = s->expert_weights[me.of->slot];
      }
    }
    float *dst = row(c, op->dst[0], 0) + (size_t)me.of->slot * ff;
    share(me, groups16(w) / unit, 0, 1, groups16(w) / unit, 1, &first, &last);
    first *= unit, last *= unit;
    multiply_gated(s->sums, w, w + 1, expert, first, last, s, 1, &dst, op->activation, routed ? bias_of(op->bias[0], w, expert) : NULL,
                   routed ? bias_of(op->bias[1], w, expert) : NULL);
    if (!routed) scale_shared(c, op, 0, dst, first, last);
    if (unit == 2) make(c, dst + 16 * first, me.of->slot * ff + 16 * first, 16 * (last - first));
    return;
  }
  if (me.stage == 0) {
    if (c->sampled && me.part == 0) memcpy(op->routes, c->route_ids, sizeof(int32_t) * (size_t)(c->tokens * top));
    for (int t = me.part; t < c->tokens; t += me.parts) prepare_row(row(c, op->src, t), k, op->norm, op->eps, need, &c->shared, t, 1, 0);
    return;
  }
  // tasks: row ranges of the experts, then of the shared expert
  int per = expert_parts(c), routed = per * c->n_chosen, e = me.part < routed ? c->chosen[me.part / per] : -1;
  int part = e < 0 ? me.part - routed : me.part % per, parts = e < 0 ? me.parts - routed : per;
  int all = e < 0 ? groups16(shared) : groups, first = all * part / parts, last = all * (part + 1) / parts;
  if (first == last) return;
  int32_t *pairs = s->pairs, *column = pairs + c->tokens * top;
  float **dst = s->targets;
  for (int start = 0, n = e < 0 ? c->tokens : pairs_of(c, op, e, pairs), m; start < n; start += m) {
    m = MIN_(expert_columns(c, k), n - start);
    for (int i = 0; i < m; i++) {
      int token = e < 0 ? start + i : pairs[start + i] / top, slot = e < 0 ? top : pairs[start + i] % top;
      column[i] = token, dst[i] = row(c, op->dst[0], token) + (size_t)slot * ff;
    }
    gather(s, &c->shared, column, m, k, need);
    if (e >= 0) {
      multiply_gated(s->sums, gate, &op->w[1], e, first, last, s, m, dst, op->activation, bias_of(op->bias[0], gate, e),
                     bias_of(op->bias[1], gate, e));
    } else {
      multiply_gated(s->sums, shared, &op->w[3], 0, first, last, s, m, dst, op->activation, NULL, NULL);
      for (int i = 0; i < m; i++) scale_shared(c, op, column[i], dst[i], first, last);
    }
  }
}

static void experts_down(Ctx *c, const Op *op, Part me) {
  const Matrix *w = &op->w[0], *shared = &op->w[1];
  int ff = w->cols, top = op->top_k, need = needs(op->w, 2), groups = groups16(w), dim = w->rows;
  Scratch *s = &c->scratch[me.id];
  if (c->tokens == 1) {
    const Matrix *m = me.of->slot < top ? w : shared;
    int matrix = me.of->slot < top ? c->route_ids[me.of->slot] : 0, slots = top + (shared->groups > 0), first, last;
    const Scratch in = {.q = c->made.q + 2 * (size_t)me.of->slot * ff, .scales = c->made.scales + (size_t)me.of->slot * ff / 32};
    if (!made(c, op)) {
      int prepared = ready(c, op, me.id) && s->head == me.of->slot;
      s->head = me.of->slot;
      if (!prepared) prepare_one(row(c, op->src, 0) + (size_t)me.of->slot * ff, m->cols, NULL, 0, need, s);
    }
    share(me, groups, 0, 1, groups, 1, &first, &last);
    multiply(s->sums, m, matrix, first, last, made(c, op) ? &in : s, 1, c->pair_out + (size_t)me.of->slot * dim, dim,
             me.of->slot < top ? bias_of(op->bias[0], m, matrix) : NULL, 1, 0);
    for (int g = first; g < last; g++) {
      if (!ended(c, me.of->unit + g, slots)) continue;
      int r = 16 * g, n = dim - r;  // the last expert of these rows adds up all of them, always in the same order
      float *x = row(c, op->dst[0], 0) + r;
      f32v sum = op->add ? fetch(x, n) : splat(0);
      for (int i = 0; i < slots; i++)
        sum = fma_(fetch(c->pair_out + (size_t)i * dim + r, n), splat((i < top ? c->route_weights[i] : 1.0f) * op->scale), sum);
      store(x, sum, n);
    }
    return;
  }
  if (me.stage == 0) {
    for (int i = me.part; i < c->tokens * top; i += me.parts)
      prepare_row(row(c, op->src, i / top) + (size_t)(i % top) * ff, ff, NULL, 0, need, &c->shared, i, 1, 0);
  } else if (me.stage == 1) {  // tasks: row ranges of the experts
    int per = expert_parts(c), e = c->chosen[me.part / per], part = me.part % per;
    int first = groups * part / per, last = groups * (part + 1) / per, from = 16 * first, rows = MIN_(16 * last, dim) - from;
    int32_t *pairs = s->pairs;
    for (int start = 0, n = first < last ? pairs_of(c, op, e, pairs) : 0, m; start < n; start += m) {
      m = MIN_(expert_columns(c, ff), n - start);
      gather(s, &c->shared, pairs + start, m, ff, need);
      multiply(s->sums, w, e, first, last, s, m, s->merged, dim, bias_of(op->bias[0], w, e), 1, 0);
      for (int i = 0; i < m; i++)
        memcpy(c->pair_out + (size_t)pairs[start + i] * dim + from, s->merged + (size_t)i * dim + from, sizeof(float) * rows);
    }
  } else if (me.stage == 2) {
    for (int t = me.part; t < c->tokens; t += me.parts) {
      float *x = row(c, op->dst[0], t);
      for (int i = 0; i < top; i++) {
        f32v weight = splat(c->route_weights[t * top + i] * op->scale);
        const float *y = c->pair_out + ((size_t)t * top + i) * dim;
        for (int r = 0; r < dim; r += 16) {
          f32v base = i > 0 || op->add ? fetch(x + r, dim - r) : splat(0);
          store(x + r, fma_(fetch(y + r, dim - r), weight, base), dim - r);
        }
      }
    }
  } else {
    const Scratch *in = input(c, op, me, 3, row(c, op->src, 0) + (size_t)top * ff, c->widths[op->src], shared->cols, NULL, need);
    if (!in) return;
    int first, last;
    share(me, groups, 0, 1, groups, together(c), &first, &last);
    multiply(s->sums, shared, 0, first, last, in, c->tokens, row(c, op->dst[0], 0), c->widths[op->dst[0]], NULL, op->scale, 1);
  }
}

static void head(Ctx *c, const Op *op, Part me) {
  const Matrix *w = &op->w[0];
  int first, last, n = groups16(w), tokens = c->logits_mode == 2 ? c->tokens : 1;
  const Scratch *x = &c->scratch[me.id];
  if (tokens == c->tokens) x = input(c, op, me, 0, row(c, op->src, 0), c->widths[op->src], w->cols, op->norm, needs(w, 1));
  else if (me.stage == 0) return;
  else if (!ready(c, op, me.id)) prepare_one(row(c, op->src, c->tokens - 1), w->cols, op->norm, op->eps, needs(w, 1), &c->scratch[me.id]);
  if (!x) return;
  share(me, n, 0, 1, n, together(c), &first, &last);
  multiply(c->scratch[me.id].sums, w, 0, first, last, x, tokens, c->logits_out, w->rows, NULL, op->scale, 0);
  for (int t = 0; t < tokens && op->softcap != 0; t++)
    for (int r = 16 * first; r < MIN_(16 * last, w->rows); r += 16) {
      float *l = c->logits_out + (size_t)t * w->rows + r;
      f32v e = exp_(fetch(l, w->rows - r) * (2.0f / op->softcap));  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
      store(l, op->softcap - 2.0f * op->softcap / (e + 1.0f), w->rows - r);
    }
}

static void run_op(Ctx *c, const Op *op, Part me) {
#ifdef SLOW_OP  // an artificial delay that a test of the profile has to find
  if (op->tag == SLOW_OP) nanosleep(&(struct timespec){0, 300000}, NULL);
#endif
  switch (op->tag) {
    case EMBED: embed(c, op, me); break;
    case LINEAR: linear(c, op, me); break;
    case ATTENTION: case LATENT_ATTENTION: attention(c, op, me); break;
    case ABSORB: absorb(c, op, me); break;
    case VALUE_UP: value_up(c, op, me); break;
    case GATE_UP: gate_up(c, op, me); break;
    case ROUTE: route(c, op, me); break;
    case EXPERTS_UP: experts_up(c, op, me); break;
    case EXPERTS_DOWN: experts_down(c, op, me); break;
    case HEAD: head(c, op, me); break;
    case NORM_ADD: norm_add(c, op, me); break;
    case LAYER_INPUTS: layer_inputs(c, op, me); break;
    case GATE_INPUT: gate_input(c, op, me); break;
    case CONVOLVE: convolve(c, op, me.part); break;
    case GATED_CONVOLVE: gated_convolve(c, op, me); break;
    case DELTA: delta(c, op, me.id, me.part); break;
    case STORE_HIDDEN: store_hidden(c, op, me); break;
    case JOIN: join(c, op, me); break;
  }
}

// Stages of an op with several tokens.
static int stages(const Ctx *c, const Op *op) {
  switch (op->tag) {
    case LATENT_ATTENTION: return expands(c, op) ? 2 * head_groups(c, op) : 1;
    case VALUE_UP: return !expands(c, op - 1);
    case LINEAR: case ATTENTION: case GATE_UP: case EXPERTS_UP: case HEAD: return 2;
    case ROUTE: return 3;
    case EXPERTS_DOWN: return op->w[1].groups ? 5 : 3;
    default: return 1;
  }
}

// Into how many pieces the matrices of an op can be divided for one token.
static int units_of(const Op *op) {
  int n = groups16(&op->w[0]);
  if (op->tag == ABSORB || op->tag == VALUE_UP) return n * op->w[0].groups;
  for (int i = 1; i < op->matrices && op->tag == LINEAR; i++) n += groups16(&op->w[i]);
  return n;
}

static int stage_tasks(const Ctx *c, const Op *op, int stage) {
  int some = (c->tokens == 1 && op->tag == HEAD ? SPLIT_HEAD : SPLIT) * c->pool.threads, per;
  if (op->tag == HEAD && !c->logits_mode) return 0;
  if (op->tag == CONVOLVE) return 2 * op->kv_heads + op->heads;
  if (op->tag == DELTA) return op->heads;
  if (c->tokens == 1) {
    if (op->tag == EMBED || op->tag == NORM_ADD || op->tag == GATE_INPUT || op->tag == STORE_HIDDEN || op->tag == JOIN) return 1;
    if (op->tag == ATTENTION || op->tag == LATENT_ATTENTION) return attention_tasks(c, op, &per);
    return op->tag == GATED_CONVOLVE || op->tag == LAYER_INPUTS ? some : MIN_(some, units_of(op) / (makes(c, op) ? 2 : 1));
  }
  if (op->tag == LATENT_ATTENTION && expands(c, op)) return tasks_by_heads(c, op, stage, some);
  if (op->tag == LATENT_ATTENTION || (op->tag == ATTENTION && stage == 1)) {
    Blocks b = query_blocks(c, op);
    return op->kv_heads * b.parts * b.blocks;
  }
  if ((op->tag == EXPERTS_UP || op->tag == EXPERTS_DOWN) && stage == 1)
    return c->n_chosen * expert_parts(c) + (op->tag == EXPERTS_UP && op->w[2].groups ? some : 0);
  int groups = 0;  // a task of several tokens has LEAST of them, since it reads all columns
  for (int i = 0; i < op->matrices; i++) groups += groups16(&op->w[i]);
  if (op->tag == LINEAR || op->tag == GATE_UP || op->tag == HEAD) return MAX_(c->pool.threads, MIN_(some, groups / LEAST));
  return some;
}

// Whether columns are in planes, for tiles or as words: in prompts. Decode steps get the same bits for one token and for several, so
// that drafts can be verified. Experts that few tokens choose on the average do without, as unpacking them would take the most
// time; without tiles so do the output matrix, which mostly has one token, and attention.
enum { FEW = 12, FEW_FOR_TILES = 6 };
static void choose_form(Ctx *c, const Op *op) {
  int few = (op->tag == EXPERTS_UP || op->tag == EXPERTS_DOWN) && c->tokens * op->top_k < (tiles_allowed ? FEW_FOR_TILES : FEW) * op->w[0].groups;
  few |= !tiles_allowed && (op->tag == HEAD || ((op->tag == ATTENTION || op->tag == LATENT_ATTENTION) && op->key_dim % 32));
  int planes = (tiles_allowed || WORDS) && !c->sampled && !c->mtp && !few;
  if (planes == c->shared.planes) return;
  c->shared.planes = planes;
  for (int i = 0; i < c->pool.threads; i++) c->scratch[i].planes = planes;
}

// How many ops from `op` on run together in a decode step of one token: tasks wait for what they need alone, not for all of an op.
// Those of a head need this head's of the op before; an expert's second matrix the first ones, which need the router; the
// shared expert does not. With clocks each op has its own time.
static int together_with(const Ctx *c, const Op *op) {
  if (c->tokens > 1 || !c->sampled || c->ticks) return 1;
  if (op->tag == ROUTE) return 3;
  int q = op->tag == LINEAR && op[1].tag == ABSORB && op->matrices == 1 && op->w[0].rows % (16 * op[1].heads) == 0;
  return op[q].tag == ABSORB ? q + 3 : 1;
}

// Equal shares of n pieces: as many as there can be up to `most`.
static int shares(int n, int most) {
  int k = MIN_(n, MAX_(most, 1));
  while (n % k) k--;
  return k;
}

static int new_segment(Ctx *c, const Op *op, int slot, int per, int tasks) {
  Segment *s = &c->segments[c->n_segments++];
  s->op = (int)(op - c->ops), s->slot = slot, s->per = per;
  s[1].first = s->first + tasks, s[1].unit = s->unit + (per ? tasks / per : 0);
  return tasks;
}

static void lay_out(Ctx *c, Phase p) {
  c->n_segments = 0, c->phase++, c->segments[0].first = c->segments[0].unit = 0;
  const Op *absorbs = c->ops + p.op + (c->ops[p.op].tag == LINEAR);
  if (p.ops > 1 && absorbs->tag == ABSORB) new_segment(c, absorbs, ALONE, 1, 1);
  for (const Op *op = c->ops + p.op; op < c->ops + p.op + p.ops; op++) {
    const Matrix *w = &op->w[0];
    int threads = c->pool.threads, per;
    if (c->tokens == 1 && (op->tag == EXPERTS_UP || op->tag == EXPERTS_DOWN)) {
      int up = op->tag == EXPERTS_UP, shared = op->w[up ? 2 : 1].groups > 0;
      for (int i = -shared; i < op->top_k; i++) {  // the shared one first, which does not wait for the router
        const Matrix *m = i >= 0 ? w : w + (up ? 2 : 1);
        int pieces = groups16(m) / (up && makes(c, op) ? 2 : 1), enough = (int)(groups16(m) * group_bytes(m->type, m->cols) / LEAST_BYTES);
        int most = MIN_(pieces, MAX_(1, MIN_(SPLIT_EXPERT * threads, enough))), n = shares(pieces, most), last = !up && i + 1 == op->top_k;
        if (2 * n < most) n = most;
        if (last) n = MIN_(pieces, 2 * n);  // behind which threads wait
        new_segment(c, op, i < 0 ? op->top_k : i, up ? n : 0, n);
      }
    } else if (c->tokens == 1 && op->tag == ROUTE) {
      int n = groups16(w) * (halved(c, op) ? 2 : 1);
      new_segment(c, op, 0, n, n);
    } else if (p.ops > 1 && op->tag == LATENT_ATTENTION) {
      int tasks = attention_tasks(c, op, &per);
      new_segment(c, op, per, c->pos / CHUNK + 1, tasks);
    } else if (p.ops > 1) {  // matrices of heads
      int heads = op->tag == LINEAR ? op[1].heads : w->groups;
      per = shares(units_of(op) / heads / (makes(c, op) ? 2 : 1), SPLIT_HEADS * threads / heads);
      new_segment(c, op, 0, per, per * heads);
    } else {
      int parts = op->tag == LINEAR && p.stage == 1 ? parts_of(c, op) : 1;
      for (int i = 0; i < parts; i++) new_segment(c, op, i, parts > 1, stage_tasks(c, op, p.stage));
    }
  }
}

INLINE const Segment *segment_of(const Ctx *c, int task, int *place) {
  const Segment *s = c->segments;
  while (task >= s[1].first) s++;
  *place = place_of(task - s->first, s[1].first - s->first, c->pool.threads);
  return s;
}

INLINE int is_done(const Ctx *c, int unit) { return atomic_load_explicit(&c->units[unit].done, memory_order_acquire) == c->phase; }

// See together_with; of a prompt, a part of rows is added to the one before (parts_of).
static int task_ready(void *arg, int phase, int task) {
  const Ctx *c = arg;
  if (phase == c->n_phases || (c->phases[phase].ops == 1 && c->tokens == 1) || c->cut) return 1;
  int place;
  const Segment *s = segment_of(c, task, &place), *before = s - 1;
  const Op *op = &c->ops[s->op];
  if (c->tokens > 1) return s->slot == 0 || !s->per || is_done(c, before->unit + place);
  switch (op->tag) {
    case ABSORB: return before < c->segments || before->slot == ALONE || is_done(c, before->unit + place / s->per);
    case LATENT_ATTENTION:
      for (int h = place / s->per * s->slot, end = MIN_(h + s->slot, op->heads); h < end; h++)
        if (!is_done(c, before->unit + h)) return 0;
      return is_done(c, 0);  // the cache's row
    case VALUE_UP: return is_done(c, before->unit + place / s->per / before->slot);
    case EXPERTS_UP: return s->slot == op->top_k || is_done(c, 0);
    case EXPERTS_DOWN: return is_done(c, s[-op->top_k - (op->w[1].groups > 0)].unit);
    default: return 1;
  }
}

// A counter of constant frequency that is read in a few cycles; run_tokens converts it to nanoseconds.
static inline uint64_t counter(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return nanoseconds();
#endif
}

// Whether the rest of a prompt is left out. The thread of the call asks, since what it asks may need that thread.
static int is_cut(Ctx *c, int phase, int id) {
  if (c->watch && id == 0 && !c->cut && nanoseconds() - c->asked >= c->patience) {
    c->cut = c->watch((double)phase / c->n_phases);
    c->asked = nanoseconds();
  }
  return c->cut;
}

static int spans_of(const Ctx *c) { return (c->vocab + SPAN - 1) / SPAN; }

static int phase_tasks(void *arg, int phase) {
  Ctx *c = arg;
  if (c->cut) return 0;
  if (phase < c->n_phases) {
    Phase p = c->phases[phase];
    const Op *op = &c->ops[p.op];
    choose_form(c, op);
    if (op->tag == EXPERTS_UP && p.stage == 1) list_experts(c, op);
    lay_out(c, p);
    return c->segments[c->n_segments].first;
  }
  c->sampling = nanoseconds();
  return c->pool.threads;
}

// A task of a phase, or behind the last one of the statistics for sampling.
static void phase_task(void *arg, int phase, int task, int tasks, int id) {
  Ctx *c = arg;
  if (is_cut(c, phase, id)) return;
  Scratch *s = &c->scratch[id];
  uint64_t start = c->ticks ? counter() : 0;
  int op = -1;
  if (phase < c->n_phases) {
    int place, first;
    const Segment *of = segment_of(c, task, &place);
    op = of->op, first = of->first;
    run_op(c, &c->ops[op], (Part){id, c->phases[phase].stage, place, of[1].first - first, of});
    if (of->per && ended(c, of->unit + place / of->per, of->per))
      atomic_store_explicit(&c->units[of->unit + place / of->per].done, c->phase, memory_order_release);
  } else {
    int spans = spans_of(c), n = spans * c->tokens;
    for (int i = n * task / tasks; i < n * (task + 1) / tasks; i++) {
      int at = i % spans * SPAN;
      span_stats(c->logits + (size_t)(i / spans) * c->vocab + at, MIN_(SPAN, c->vocab - at), &c->span_max[i], &c->span_sum[i]);
    }
  }
  if (!c->ticks) return;
  uint64_t *ticks = c->ticks + 2 * (size_t)id * c->n_ops, now = counter();
  if (s->last_op >= 0) ticks[2 * s->last_op + 1] += start - s->stopped;  // waited behind the op before
  if (op >= 0) ticks[2 * op] += now - start;
  s->stopped = now, s->last_op = op;
}

// Runs ops from..to-1.
static void run_ops(Ctx *c, int from, int to) {
  c->serial++;
  for (int i = 0; i < c->pool.threads; i++) c->scratch[i].last_op = -1;
  c->n_phases = 0;
  for (int i = from, ops; i < to; i += ops) {
    ops = together_with(c, &c->ops[i]);
    if (c->ops[i].tag == LATENT_ATTENTION && c->tokens > 1 && expands(c, &c->ops[i])) begin_expanded(c, &c->ops[i]);
    for (int stage = 0; stage < (c->tokens == 1 ? 1 : stages(c, &c->ops[i])); stage++) c->phases[c->n_phases++] = (Phase){i, stage, ops};
  }
  uint64_t began = c->ticks ? nanoseconds() : 0, first = counter();
  pool_run(&c->pool, (Work){c->n_phases + c->sampled, phase_tasks, phase_task, task_ready, c});
  if (!c->ticks) return;
  double unit = (double)(nanoseconds() - began) / (double)MAX_(counter() - first, 1);
  for (int i = 0; i < 2 * c->n_ops * c->pool.threads; i++) c->ticks[i] = (uint64_t)((double)c->ticks[i] * unit);
}

static void run_tokens(Ctx *c) {
  int from = c->mtp ? c->n_step : 0, to = c->mtp ? c->n_ops : c->n_step;
  if (c->mtp || c->logits_mode == 2 || c->n_whole == to) {
    run_ops(c, from, to);
    return;
  }
  run_ops(c, from, c->n_whole);
  if (!c->logits_mode || c->cut) return;
  c->watch = NULL;  // tasks of one token count what has ended, so all of them have to
  int tokens = c->tokens, skipped = tokens - 1;
  c->first = skipped, c->ids += skipped, c->pos += skipped, c->tokens = 1;
  run_ops(c, c->n_whole, to);
  c->first = 0, c->ids -= skipped, c->pos -= skipped, c->tokens = tokens;
}

// ---- the interface ---------------------------------------------------------------------------------------------------

// Zeroed memory in huge pages where the system has them; NULL if there is none.
EXPORT void *tc_alloc(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return p;
}
EXPORT void tc_free(void *p, size_t bytes) { munmap(p, bytes); }

// What the products use; asks the system for the tiles where there are such.
EXPORT const char *tc_simd(void) {
#if TILES
  if ((tiles_allowed = tiles_granted())) return TILES_NAME;
#endif
  return SIMD_NAME;
}
// Whether weights are unpacked for prompts (choose_form); to be asked after tc_simd.
EXPORT int tc_unpacks(void) { return tiles_allowed || WORDS; }
EXPORT void tc_grids(const uint16_t *all) { set_grids(all); }
EXPORT size_t tc_group_bytes(int type, int cols) { return group_bytes(type, cols); }

// What library.py has copies of: the sizes of the structures (of Ctx the part up to `sampling`, then all of it), and names.
EXPORT size_t tc_sizeof(int what) {
  size_t sizes[] = {sizeof(Matrix), sizeof(Op), sizeof(SampleSpec), sizeof(LayerCache), sizeof(Source),
                    offsetof(Ctx, sampling) + sizeof(uint64_t), sizeof(Ctx)};
  return sizes[what];
}
#define NAME(name, ...) #name " "
#define OFFSET(name, ...) offsetof(STRUCTURE, name),
// library.py declares the same structures; it compares every field's name and offset when it loads the library.
#define MATRIX_FIELDS(X) X(type) X(rows) X(cols) X(groups) X(data)
#define OP_FIELDS(X)                                                                                                            \
  X(tag) X(layer) X(matrices) X(add) X(src) X(dst) X(at) X(heads) X(kv_heads) X(key_dim) X(value_dim) X(nope) X(rope_dims) X(neox)     \
  X(q_norm_len) X(k_norm_len) X(top_k) X(gating) X(normalize) X(route_groups) X(route_groups_used) X(router) X(window)           \
  X(activation) X(temperature_length) X(value_norm) X(gated) X(grouped) X(by_channel) X(taps) X(stores) X(eps) X(norm_eps) X(scale) X(temperature) X(softcap) X(stream_scale)        \
  X(logit_scale) X(lower_bound)                                                                                                 \
  X(norm) X(q_norm) X(k_norm) X(rope) X(sinks) X(shared_scale) X(bias) X(routes) X(w)
#define SAMPLE_FIELDS(X) SAMPLING(X) X(n_penalised) X(seed) X(penalised) X(divisors) X(amounts) X(mask)
#define SOURCE_FIELDS(X) X(fd) X(type) X(rows) X(cols) X(groups) X(stride) X(run) X(start) X(to)
#define CACHE_FIELDS(X) X(k) X(v) X(tail) X(state) X(heads) X(k_dim) X(v_dim) X(rows) X(window) X(base)
#define CONTEXT_FIELDS(X)                                                                                                       \
  X(n_ops) X(n_step) X(n_whole) X(max_context) X(batch) X(vocab) X(layers) X(n_buffers) X(ops) X(buffers) X(widths) X(caches) X(ticks) X(expanded) X(expanded_room) X(sampling)
EXPORT const char *tc_fields(int what) {
  const char *names[] = {MATRIX_FIELDS(NAME), OP_FIELDS(NAME), SAMPLE_FIELDS(NAME), CACHE_FIELDS(NAME), SOURCE_FIELDS(NAME), CONTEXT_FIELDS(NAME)};
  return names[what];
}
EXPORT size_t tc_offset(int what, int field) {
#define STRUCTURE Matrix
  static const size_t matrix[] = {MATRIX_FIELDS(OFFSET)};
#undef STRUCTURE
#define STRUCTURE Op
  static const size_t op[] = {OP_FIELDS(OFFSET)};
#undef STRUCTURE
#define STRUCTURE SampleSpec
  static const size_t sample[] = {SAMPLE_FIELDS(OFFSET)};
#undef STRUCTURE
#define STRUCTURE LayerCache
  static const size_t cache[] = {CACHE_FIELDS(OFFSET)};
#undef STRUCTURE
#define STRUCTURE Source
  static const size_t source[] = {SOURCE_FIELDS(OFFSET)};
#undef STRUCTURE
#define STRUCTURE Ctx
  static const size_t context[] = {CONTEXT_FIELDS(OFFSET)};
#undef STRUCTURE
  static const size_t *const offsets[] = {matrix, op, sample, cache, source, context};
  return offsets[what][field];
}
#define NAME_AND_VALUE(name, value, ...) #name "=" #value " "
EXPORT const char *tc_names(int what) {
  const char *names[] = {TAGS(NAME), GATINGS(NAME), QUANTISED(NAME_AND_VALUE) FLOATING(NAME_AND_VALUE), ACTIVATIONS(NAME)};
  return names[what];
}
EXPORT double tc_constant(int what) {
  double values[] = {CHUNK, MAX_GROUP, STEP, STRETCH, MIN_WEIGHT_SUM, CLAMP, CLAMP_SLOPE};
  return values[what];
}

EXPORT int tc_load(Ctx *c, const Source *sources, int n) { return load(&c->pool, sources, n); }

// The inverse, for tests and the embedding: 16 packed rows to float32 (cols, 16).
EXPORT void tc_dequantise(const uint8_t *group, int type, int cols, float *out) {
  f32v *tmp = aligned_alloc(64, sizeof(f32v) * (size_t)cols);
  if (!tmp) return;
  dequantise(group, type, cols, tmp);
  memcpy(out, tmp, sizeof(f32v) * (size_t)cols);
  free(tmp);
}

// Working memory: every piece is checked and recorded, so that tc_prepare can fail at any piece and all of them are freed. If a
// size overflows or an allocation fails, `short_` becomes true and the piece is NULL.
typedef struct Piece { struct Piece *next; } Piece;

static void *piece(Ctx *c, size_t items, size_t bytes) {
  size_t total;
  if (__builtin_mul_overflow(items, bytes, &total) || total > SIZE_MAX / 2) return c->short_ = 1, NULL;
  Piece *p = aligned_alloc(64, 64 + (total + 127) / 64 * 64);
  if (!p) return c->short_ = 1, NULL;
  p->next = c->pieces;
  c->pieces = p;
  return (char *)p + 64;
}

static Scratch new_scratch(Ctx *c, size_t columns, size_t k) {
  size_t n;
  if (__builtin_mul_overflow(columns, k, &n)) n = SIZE_MAX;
  return (Scratch){.q = piece(c, n, 2), .scales = piece(c, n / 32 + 1, sizeof(XScale)), .f = piece(c, n, 4)};
}

// Starts threads until there are `threads` (fewer if the system refuses; the number is returned).
EXPORT int tc_open(Ctx *c, int threads) { return pool_start(&c->pool, threads); }

// Whether an op can leave its results as `next` needs its input: quantised by whole blocks, which are a task's.
static int can_make(const Op *op, const Op *next) {
  int experts = op->tag == EXPERTS_UP && next->tag == EXPERTS_DOWN, values;
  if (next->src != op->dst[0] || next->norm || needs(next->w, 4) != 1 || !(experts || next->tag == LINEAR)) return 0;
  switch (op->tag) {
    case ATTENTION: values = op->value_dim; break;
    case VALUE_UP: case GATE_UP: case EXPERTS_UP: values = op->w[0].rows | op->w[2].rows * (op->w[2].groups > 0); break;
    default: return 0;
  }
  return values % 32 == 0;
}

// Allocates what the ops need; the fields before `pool` are set by the caller. Returns 0, or -1 if memory is short.
EXPORT int tc_prepare(Ctx *c) {
  int n = c->pool.threads, top = 1, ff = 1, routed = 0, dim = c->widths[0];
  size_t widest = dim, heads = 1, value = 16, key = 16, columns = 0, matrix = 0;  // columns: values of all heads' (head_columns)
  for (int i = 0; i < c->n_buffers; i++) widest = MAX_(widest, (size_t)c->widths[i]);
  c->widest = (int)widest;
  for (int i = 0; i < c->n_ops; i++) {
    const Op *op = &c->ops[i];
    if (op->tag == ATTENTION || op->tag == LATENT_ATTENTION)
      heads = MAX_(heads, (size_t)op->heads), value = MAX_(value, (size_t)padded(op->value_dim)), key = MAX_(key, (size_t)op->key_dim);
#if TILES || WORDS
    if (op->tag == LATENT_ATTENTION) {
      HeadDims d = head_dims(op);
      value = MAX_(value, (size_t)padded(d.value)), key = MAX_(key, (size_t)(d.key + d.rotated));
      columns = MAX_(columns, (size_t)op->heads * columns_per_head(&d) * d.latent), matrix = MAX_(matrix, (size_t)MAX_(d.key, 16) * column_pitch(&d));
    }
#endif
    if (op->tag == EXPERTS_DOWN) top = MAX_(top, op->top_k), ff = MAX_(ff, op->w[0].cols);
    if (op->tag == ROUTE) routed = MAX_(routed, op->w[0].rows);
  }
  size_t chunks = ((size_t)c->max_context + 15) / 16 * 16 / CHUNK + 1, vectors = MAX_(tiles_allowed || WORDS ? MOST : QUERIES, heads) + 16;
  c->phases = piece(c, (5 + 2 * heads) * (size_t)c->n_ops, sizeof(Phase));
  size_t parts = widest / PART + 1, units = MAX_(3 * heads + (size_t)top + 3 + (size_t)dim / 16 + 1, parts * SPLIT * (size_t)n);
  c->segments = piece(c, MAX_(2 * (size_t)top + 5, parts + 1), sizeof(Segment));
  c->units = piece(c, units, sizeof(Count));
  if (c->units) memset(c->units, 0, units * sizeof(Count));
  c->scratch = piece(c, n, sizeof(Scratch));
  for (int i = 0; i < n && c->scratch; i++) {
    Scratch *s = &c->scratch[i];
    *s = new_scratch(c, 16, widest);
    s->sums = piece(c, 2 * GROUPS * COLUMNS, sizeof(f32v));
    s->attn_q = piece(c, vectors, 4 * ((key + 31) / 32 * 32));
    s->attn_s = piece(c, vectors, 4 * CHUNK);
#if TILES
    if (tiles_allowed) {
      size_t pair = sizeof(TilePair), deep = (key + 63) / 64;
      s->queries = (PlaneQueries){piece(c, vectors / 16, deep * pair), piece(c, vectors, 4)};
      s->room.keys = piece(c, KEY_TILES, deep * pair), s->room.values = piece(c, value / 16, KEY_STEPS * pair);
      s->room.weights = piece(c, TOGETHER, KEY_STEPS * pair), s->room.scores = piece(c, 2 * TOGETHER, 64 * CHUNK);
    }
#elif WORDS
    size_t depths = (size_t)depths_of((int)key);
    s->queries = (PlaneQueries){piece(c, vectors, 2 * depths * DEPTH), piece(c, vectors, depths * DEPTH / SCALED * sizeof(PanelScale))};
    s->room.keys = piece(c, KEY_TILES * depths, sizeof(Planes)), s->room.values = piece(c, value / 16, sizeof(Planes));
    s->room.scores = piece(c, KEY_TILES * BLOCK, sizeof(f32v)), s->room.weights = piece(c, BLOCK, 2 * CHUNK);
    s->room.scales = piece(c, BLOCK, CHUNK / SCALED * sizeof(PanelScale)), s->room.out = piece(c, BLOCK, 4 * value);
#endif
    s->attn_out = piece(c, vectors, 4 * value);
    s->experts = piece(c, top, 4), s->expert_weights = piece(c, top, 4);
    s->chances = piece(c, 2, 4 * (size_t)routed), s->groups = piece(c, 2, 4 * (size_t)routed);
    s->pairs = piece(c, c->batch, 4 * (size_t)(top + 1)), s->targets = piece(c, c->batch, sizeof(float *));
    s->merged = piece(c, MAX_(MAX_(vectors * value, widest + 16), MAX_((size_t)dim * (routed ? EXPERT_COLUMNS : 16), 2 * (size_t)c->batch)) + matrix, 4);
  }
  size_t most = (size_t)pitch_of(c->batch);  // panels may have empty columns
  c->shared = new_scratch(c, most, MAX_(MAX_(widest, (size_t)top * ff), columns / most + 1));
  c->made = new_scratch(c, 1, widest);
  c->makes = piece(c, (size_t)c->n_ops, 1);
  for (int i = 0; i < c->n_ops && c->makes; i++) c->makes[i] = i + 1 < c->n_ops && can_make(&c->ops[i], &c->ops[i + 1]);
  c->partial = piece(c, heads * chunks, 4 * (value + 16));
  c->done = piece(c, heads, sizeof(atomic_int));
  if (c->done) memset(c->done, 0, sizeof(atomic_int) * heads);
  c->router_logits = piece(c, c->batch + 1, 4 * (size_t)(routed + 16));
  c->route_ids = piece(c, c->batch, 4 * (size_t)top);
  c->route_weights = piece(c, c->batch, 4 * (size_t)top);
  c->chosen = piece(c, 2 * (size_t)routed, 4);
  c->pair_out = routed ? piece(c, (size_t)c->batch * top + 1, 4 * (size_t)dim) : NULL;
  c->logits = piece(c, STEP * (size_t)c->vocab + 16, 4);
  c->work = piece(c, (size_t)c->vocab * 2 + (size_t)spans_of(c) + 32, 4);
  c->span_max = piece(c, STEP * (size_t)spans_of(c), 4);
  c->span_sum = piece(c, STEP * (size_t)spans_of(c), 4);
  return c->short_ ? -1 : 0;
}

// Runs n (at most `batch`) tokens at positions pos.., through MTP if `mtp`; logits_mode 1 fills out with the last token's logits, 2
// with everyone's. Returns whether `watch` (NULL: nobody), asked every `patience` nanoseconds, has cut it short: then the tokens' rows and
// results are garbage.
EXPORT int tc_forward(Ctx *c, const int32_t *ids, int n, int pos, int logits_mode, int mtp, float *out, Watch watch, uint64_t patience) {
  c->ids = ids, c->tokens = n, c->pos = pos, c->logits_mode = logits_mode, c->logits_out = out;
  c->sampled = 0, c->mtp = mtp;
  c->watch = n > 1 ? watch : NULL, c->patience = patience, c->asked = nanoseconds();
  run_tokens(c);
  int cut = c->cut;
  c->watch = NULL, c->cut = 0;
  return cut;
}

// One decode step: runs n (at most STEP) tokens at positions pos.., for tc_sample to choose what follows them.
EXPORT void tc_step(Ctx *c, const int32_t *ids, int n, int pos) {
  c->ids = ids, c->tokens = n, c->pos = pos, c->logits_mode = 2, c->logits_out = c->logits;
  c->sampled = 1, c->mtp = 0;
  run_tokens(c);
  c->sampling = nanoseconds() - c->sampling;
}

// The id behind token i of the last decode step, and its log-probability.
EXPORT int tc_sample(Ctx *c, int i, const SampleSpec *spec, double *logprob) {
  uint64_t began = nanoseconds(), at = (uint64_t)i * (uint64_t)spans_of(c);
  int id = sample(c->logits + (size_t)i * c->vocab, c->vocab, spec, (uint64_t)(c->pos + i), c->span_max + at, c->span_sum + at, c->work,
                  logprob);
  c->sampling = nanoseconds() - began + (i ? 0 : c->sampling);
  return id;
}

// Makes the rows of layers with a window begin at position `base`; those behind it stay.
EXPORT void tc_slide(Ctx *c, int base) {
  for (LayerCache *l = c->caches; l < c->caches + c->layers; l++) {
    if (!l->window) continue;
    int by = base - l->base, kept = l->rows - by;
    for (int h = 0; h < l->heads && by > 0 && kept > 0; h++) {
      uint16_t *k = l->k + (size_t)h * l->rows * l->k_dim, *v = l->v + (size_t)h * l->rows * l->v_dim;
      memmove(k, k + (size_t)by * l->k_dim, (size_t)kept * l->k_dim * sizeof *k);
      memmove(v, v + (size_t)by * l->v_dim, (size_t)kept * l->v_dim * sizeof *v);
    }
    l->base = base;
  }
}

// Copies `rows` cache rows from `first` (a multiple of 16), in whole tiles of 16, out (in 0) or back in (1), of layers with a
// window those from their base on. Returns the bytes.
EXPORT size_t tc_cache(Ctx *c, uint8_t *data, int first, int rows, int in) {
  int end = first + (rows + 15) / 16 * 16;
  size_t at = 0;
  for (int v = 0; v < 2; v++)
    for (const LayerCache *l = c->caches; l < c->caches + c->layers; l++) {
      int from = MAX_(first, l->base);
      size_t width = (size_t)(v ? l->v_dim : l->k_dim), bytes = (size_t)MAX_(end - from, 0) * width * sizeof(uint16_t);
      for (int h = 0; h < l->heads && bytes; h++) {
        uint16_t *rows_at = (v ? l->v : l->k) + ((ptrdiff_t)h * l->rows + from - l->base) * (ptrdiff_t)width;
        if (data && in) memcpy(rows_at, data + at, bytes);
        else if (data) memcpy(data + at, rows_at, bytes);
        at += bytes;
      }
    }
  return at;
}

typedef struct {
  const uint8_t *data;
  size_t bytes;
  int threads;
  uint32_t sink[MAX_THREADS * 16];
} ReadJob;

enum { PIECE = 1 << 20 };
static int read_tasks(void *arg, int phase) { return (int)(((ReadJob *)arg)->bytes / PIECE); }

static void read_task(void *arg, int phase, int task, int tasks, int id) {
  ReadJob *j = arg;
  u32v s[4] = {{0}};
  task = place_of(task, tasks, j->threads);
  for (const uint8_t *p = j->data + (size_t)PIECE * task, *end = p + PIECE; p < end; p += 256)
    for (int i = 0; i < 4; i++) s[i] += ld(p + 64 * i);
  memcpy(&j->sink[id * 16], &(u32v[]){s[0] + s[1] + s[2] + s[3]}, 64);
}

// Read bandwidth in GB/s over `bytes` at `data` (whole MiB, much larger than the caches), best of 3.
EXPORT double tc_bandwidth(Ctx *c, const uint8_t *data, size_t bytes) {
  ReadJob job = {data, bytes, c->pool.threads};
  double best = 0;
  for (int i = 0; i < 3; i++) {
    uint64_t start = nanoseconds();
    pool_run(&c->pool, (Work){1, read_tasks, read_task, NULL, &job});
    double gb = (double)(bytes / PIECE * PIECE) / (double)(nanoseconds() - start);
    best = gb > best ? gb : best;
  }
  return best;
}

EXPORT void tc_close(Ctx *c) {
  pool_stop(&c->pool);
  for (Piece *p = c->pieces, *next; p; p = next) next = p->next, free(p);
}
