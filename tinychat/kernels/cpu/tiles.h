// Matrix tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and the product of two tiles of bytes. Here tiles 0 to 3 are sums (up
// to 16 x 16 int32), 4 and 5 hold rows of the left factor, 6 and 7 the right one in granules of 4 bytes.
#pragma once
#include "simd.h"

#ifndef TILES  // 0: none, 1: AMX, 2: the same in C, for tests on other machines
#if defined(__linux__) && (defined(__AMX_INT8__) || defined(__AMXINT8__))  // the latter before clang 16
#define TILES 1
#else
#define TILES 0
#endif
#endif

#if TILES
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

// The shapes for products over `k` bytes, a multiple of 4 and at most 64: tile 4 has `rows` rows, tile 5 `more`; so have the even
// sums and the odd ones.
INLINE TileShapes tile_shapes(int rows, int more, int k) {
  TileShapes t = {.palette = 1};
  for (int i = 0; i < 8; i++) t.rows[i] = i >= 6 ? k / 4 : i % 2 ? more : rows, t.row_bytes[i] = i == 4 || i == 5 ? k : 64;
  return t;
}
#endif

#if TILES == 1
#define TILES_NAME SIMD_NAME " and AMX"
#include <sys/syscall.h>
#include <unistd.h>

// Asks the kernel for the tiles' state of this process (and of the threads that it starts). Returns whether it is granted.
static int tiles_granted(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
// What was written before is in memory: gcc's forms of the operations do not say that they read it.
INLINE void tiles_written(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }
// A thread has tiles between these two only: the system saves 8 kB more where it interrupts a thread that has.
INLINE void tiles_begin(int rows, int more, int k) {
  TileShapes t = tile_shapes(rows, more, k);
  tiles_written(&t);
  _tile_loadconfig(&t);
}
INLINE void tiles_end(void) { _tile_release(); }
#define tile_zero(i) _tile_zero(i)
#define tile_load(i, p, stride) _tile_loadd(i, p, stride)
#define tile_stream(i, p, stride) _tile_stream_loadd(i, p, stride)  // what the first-level cache need not keep
#define tile_store(i, p, stride) _tile_stored(i, p, stride)
#define tile_dot_s(c, a, b) _tile_dpbssd(c, a, b)
#define tile_dot_us(c, a, b) _tile_dpbusd(c, a, b)
#elif TILES == 2
#define TILES_NAME SIMD_NAME " and tiles in C"
static _Thread_local struct {
  TileShapes shapes;
  _Alignas(64) uint8_t at[8][16][64];
} tiles_;
static int tiles_granted(void) { return 1; }
INLINE void tiles_written(const void *p) {}
static void tiles_begin(int rows, int more, int k) { memset(&tiles_, 0, sizeof tiles_), tiles_.shapes = tile_shapes(rows, more, k); }
static void tiles_end(void) { memset(&tiles_, 0, sizeof tiles_); }
static void tile_zero(int i) { memset(tiles_.at[i], 0, sizeof tiles_.at[i]); }
static void tile_load(int i, const void *p, size_t stride) {
  tile_zero(i);
  for (int r = 0; r < tiles_.shapes.rows[i]; r++) memcpy(tiles_.at[i][r], (const uint8_t *)p + r * stride, tiles_.shapes.row_bytes[i]);
}
#define tile_stream(i, p, stride) tile_load(i, p, stride)
static void tile_store(int i, void *p, size_t stride) {
  for (int r = 0; r < tiles_.shapes.rows[i]; r++) memcpy((uint8_t *)p + r * stride, tiles_.at[i][r], tiles_.shapes.row_bytes[i]);
}
static void tile_dot_s(int c, int a, int b) {
  for (int m = 0; m < tiles_.shapes.rows[c]; m++)
    for (int k = 0; k < tiles_.shapes.rows[b]; k++) {
      int32_t sums[16];
      memcpy(sums, tiles_.at[c][m], 64);
      for (int n = 0; n < 64; n++)
        sums[n / 4] += (int8_t)tiles_.at[a][m][4 * k + n % 4] * (int8_t)tiles_.at[b][k][n];
      memcpy(tiles_.at[c][m], sums, 64);
    }
}
// The same, bytes of a without sign.
static void tile_dot_us(int c, int a, int b) {
  for (int m = 0; m < tiles_.shapes.rows[c]; m++)
    for (int k = 0; k < tiles_.shapes.rows[b]; k++) {
      int32_t sums[16];
      memcpy(sums, tiles_.at[c][m], 64);
      for (int n = 0; n < 64; n++) sums[n / 4] += tiles_.at[a][m][4 * k + n % 4] * (int8_t)tiles_.at[b][k][n];
      memcpy(tiles_.at[c][m], sums, 64);
    }
}
#endif
