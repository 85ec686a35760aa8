// Runs the CPU kernels on given data, without a C library, so that it is quickly built for another architecture.
// test_portable.py writes the input and checks the output.
// In:  the grids; int32 type, cols, raw bytes of 16 rows, float32 x (16, cols); then attention: int32 rows, K (rows, 48) and V (rows, 32)
//      float32, q (4, 48).
// Out: float32 dequantised (cols, 16), products with 1, 4, 8 and 16 columns (16, 16 each), attention with V and latent (4, 32).
#include "../../../tinychat/kernels/cpu/attention.h"
#include "../../../tinychat/kernels/cpu/input.h"
#include "../../../tinychat/kernels/cpu/panels.h"

void *memset(void *p, int c, size_t n) { for (char *a = p; n--;) { *a++ = (char)c; __asm__ volatile(""); } return p; }
void *memcpy(void *p, const void *q, size_t n) {
  char *a = p;
  for (const char *b = q; n--;) { *a++ = *b++; __asm__ volatile(""); }
  return p;
}
static long call(long number, long a, const void *b, size_t c) {
  register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = (long)b, x2 __asm__("x2") = (long)c;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}
static void put(const void *p, size_t n) { for (long k; n; p = (const char *)p + k, n -= (size_t)k) k = call(64, 1, p, n); }
static void get(void *p, size_t n) {
  for (long k; n; p = (char *)p + k, n -= (size_t)k)
    if ((k = call(63, 0, p, n)) <= 0) call(93, 2, NULL, 0);
}
static uint8_t heap[8 << 20] __attribute__((aligned(64)));
static size_t used;
static void *room(size_t n) { used += (n + 127) / 64 * 64; return heap + used - (n + 127) / 64 * 64; }

static void run(void) {
  int32_t type, cols, rows;
  uint16_t *tables = room(sizeof grids);
  get(tables, sizeof grids), set_grids(tables), get(&type, 4), get(&cols, 4);
  size_t n = (size_t)cols, bytes = n / layouts[type].block * layouts[type].bytes;
  uint8_t *raw = room(16 * bytes), *packed = room(group_bytes(type, cols));
  const uint8_t *src[16];
  float *x = room(64 * n), *f = room(64 * n);
  int8_t *q8 = room(32 * n);
  XScale *scales = room(16 * sizeof(XScale) * (n / 32 + 1));
  f32v *out = room(64 * n), sums[16];
  get(raw, 16 * bytes), get(x, 64 * n);
  for (int i = 0; i < 16; i++) src[i] = raw + (size_t)i * bytes;
  pack_group(packed, src, type, cols);
  dequantise(packed, type, cols, out);
  put(out, 64 * n);
  for (int nc = 1; nc <= 16; nc = nc == 1 ? 4 : 2 * nc)
    for (int first = 0; first < 16; first += nc) {
      for (int i = 0; i < nc; i++) prepare(x + (size_t)(first + i) * n, cols, NULL, 1, q8, scales, f, nc, i);
      product(type, packed, 1, &(X){q8, scales, f, cols}, nc, 0, cols, sums);
      put(sums, 64 * (size_t)nc);
    }
  get(&rows, 4);
  size_t r = (size_t)rows;
  float *k = room(192 * r), *v = room(128 * r), *q = room(768), *turned = room(768), *s = room(32 * CHUNK), *o = room(512);
  float max[4], sum[4];
  uint16_t *tiles = room(96 * (r + 16)), *values = room(64 * (r + 16));
  get(k, 192 * r), get(v, 128 * r), get(q, 768);
  for (int i = 0; i < rows; i++) {
    store_k(tiles + (i & ~15) * 48, k + 48 * i, 48, i);
    for (int d = 0; d < 32; d += 16) { u16x16 h = to_f16(ldf(v + 32 * i + d)); memcpy(values + 32 * i + d, &h, 32); }
  }
  for (int i = 0; i < 4; i++)
    for (int d = 0; d < 48; d++) turned[4 * d + i] = q[48 * i + d];
  for (int latent = 0; latent < 2; latent++) {
    Cache cache = {tiles, latent ? NULL : values, 48, 32};
    attend(&cache, turned, 4, 4, (int[4]){0}, (int[]){rows, rows, rows - 5, 1}, s, max, sum, o);
    for (int i = 0; i < 4; i++)
      for (int d = 0; d < 32; d++) o[32 * i + d] /= sum[i];
    put(o, 512);
  }
}
void _start(void) {
  put(SIMD_NAME, 16 < sizeof SIMD_NAME ? 16 : sizeof SIMD_NAME - 1);
  put("\n", 1);
  run();
  call(93, 0, NULL, 0);
}
