// Keys and values of single heads, made of the latent rows of MLA for long pieces of prompts: a query and a key then cost as many
// products as a head has dims, not as a latent row has. 16 latent rows are a tile of the cache (attention.h), which is a group of 16
// rows of halves as weights are; the rows of W_k_b, transposed, and of W_v_b are the columns that it is multiplied with.
#pragma once
#include "attention_planes.h"
#include "panels.h"

#if TILES || WORDS
// What the columns of a head are: those of `key` values that are not rotated, then those of its values, each filled up to a multiple
// of 16. `rotated`: values that all heads' keys have in common, which follow the latent ones of a row.
typedef struct { int latent, rotated, key, value; } HeadDims;
INLINE int filled_16(int n) { return (n + 15) / 16 * 16; }
INLINE int columns_per_head(const HeadDims *d) { return filled_16(d->key) + filled_16(d->value); }

// Between columns that are not prepared yet: no power of two, as their starts would share a few sets of the first-level cache.
INLINE int column_pitch(const HeadDims *d) { return d->latent + 16; }

// to[i * pitch + j] = x[j][i], of 16 and 16.
INLINE void transpose_floats(const f32v x[16], float *to, size_t pitch) {
  u16x16 low[16], high[16];
  for (int j = 0; j < 16; j++) low[j] = __builtin_convertvector((u32v)x[j], u16x16), high[j] = __builtin_convertvector((u32v)x[j] >> 16, u16x16);
  transpose16(low), transpose16(high);
  for (int i = 0; i < 16; i++)
    stf(to + i * pitch, (f32v)(__builtin_convertvector(low[i], u32v) | __builtin_convertvector(high[i], u32v) << 16));
}

// Keys and values of up to GROUPS tiles of latent rows at `rows`, into tiles of k, [key + rotated][16], and rows of v. x: the head's
// columns; out: room for GROUPS * COLUMNS vectors.
static void expand_rows(const uint16_t *rows, int tiles, const HeadDims *d, const X *x, uint16_t *k, uint16_t *v, f32v *out) {
  int row = d->latent + d->rotated, whole = d->key + d->rotated, keys = filled_16(d->key), all = columns_per_head(d);
  for (int first = 0, n; first < all; first += n) {
    n = all - first < COLUMNS ? all - first : COLUMNS;
    X part = columns_from(x, (size_t)first);
    product_in_planes(F16, (const uint8_t *)rows, (size_t)row * 32, tiles, &part, n, 0, part.k, out, (size_t)n);
    for (int t = 0; t < tiles; t++)
      for (int c = 0; c < n; c += 16) {
        u16x16 raw[16];
        for (int i = 0; i < 16; i++) raw[i] = to_f16(out[(size_t)t * n + c + i]);
        if (first + c < keys) {
          int at = first + c, many = d->key - at < 16 ? d->key - at : 16;
          memcpy(k + ((size_t)t * whole + at) * 16, raw, sizeof *raw * (size_t)many);
        } else {
          int at = first + c - keys, many = d->value - at < 16 ? d->value - at : 16;
          transpose16(raw);
          for (int r = 0; r < 16; r++) memcpy(v + ((size_t)t * 16 + r) * d->value + at, &raw[r], 2 * (size_t)many);
        }
      }
  }
  for (int t = 0; t < tiles; t++)
    memcpy(k + ((size_t)t * whole + d->key) * 16, rows + ((size_t)t * row + d->latent) * 16, 32 * (size_t)d->rotated);
}
#endif
