// The functions of ptx.cuh on a CPU, so that the .cu files run in tests without a GPU: a block's threads are fibers that switch at
// barriers, shuffles and matrix instructions. Blocks run one after the other (those of a cluster together), kernels too. Slow, exact, and poisoned: shared memory
// starts as garbage in every block.
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) V4 { u32 x, y, z, w; };
struct alignas(8) V2 { u32 x, y; };
struct alignas(16) F4 { float x, y, z, w; };
struct alignas(8) F2 { float x, y; };

#define DEVICE inline
#define KERNEL(threads, resident) static void
#define __device__
#define __forceinline__ inline
#ifdef __linux__  // a kernel's shared memory is a section of its own, which every block begins with poisoned
#define __shared__ static __attribute__((section(EMULATED_SECTION)))
#else
#define __shared__ static
#endif
#define DYNAMIC_SHARED(name) static V4 name[232448 / 16]
#define __launch_bounds__(n)
#define CLUSTER_KERNEL(threads, resident, blocks) static void
#define CLUSTER_SHARED(type, name) type &name = *(type *)emu::block_memory[emu::current / emu::threads]

enum { STACK = 1 << 17 };
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
struct Dim { unsigned x = 1, y = 1, z = 1; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
struct Fiber { ucontext_t start; jmp_buf jump; bool started = false, done = false; char *stack = nullptr; };
enum { FIBERS = 4096, BLOCKS = 8 };  // of a cluster, at most
static Fiber fibers[FIBERS];
static void (*body)();
static V4 block_memory[BLOCKS][232448 / 16];
static int current, threads, first_block, running;  // the current fiber; threads of a block; fibers that are not done
static int cluster_waiting, cluster_generation, cluster_seen[FIBERS], block_waiting[BLOCKS], block_generation[BLOCKS], alive[BLOCKS];
static int warp_waiting[FIBERS / 32], warp_generation[FIBERS / 32], warp_alive[FIBERS / 32];
static ucontext_t main_context;
static jmp_buf main_jump;

static void enter() {
  body();
  fibers[current].done = true;
  running--; alive[current / threads]--; warp_alive[current / 32]--;
  _longjmp(main_jump, 1);
}
static void become(int fiber) { current = fiber; threadIdx.x = fiber % threads; blockIdx.x = first_block + fiber / threads; }
static void yield() {
  const int me = current;
  if (_setjmp(fibers[me].jump) == 0) _longjmp(main_jump, 1);
  become(me);
}
static void barrier(int &waiting, int &generation, const int &expected) {
  const int g = generation;
  waiting++;
  long spins = 0;
  while (generation == g) {
    if (waiting >= expected) { waiting = 0; generation++; break; }
    if (++spins > 200000) { fprintf(stderr, "emulator: threads wait for ever (divergent barrier?)\n"); abort(); }
    yield();
  }
}
static void warp_barrier() { const int w = current / 32; barrier(warp_waiting[w], warp_generation[w], warp_alive[w]); }
static void block_barrier() { const int b = current / threads; barrier(block_waiting[b], block_generation[b], alive[b]); }

static void run_blocks(int threads_of_block, int blocks) {  // of one cluster, from blockIdx.x on
  threads = threads_of_block; first_block = blockIdx.x; running = threads * blocks;
  if (blocks > 1) memset(block_memory, 0xFF, blocks * sizeof *block_memory);
  cluster_waiting = cluster_generation = 0;
  for (int b = 0; b < blocks; b++) { alive[b] = threads; block_waiting[b] = 0; }
  for (int i = 0; i < threads * blocks; i++) {
    fibers[i].started = fibers[i].done = false;
    if (!fibers[i].stack) fibers[i].stack = (char *)malloc(STACK);
    warp_alive[i / 32] = min(32, threads - i % threads / 32 * 32);
    warp_waiting[i / 32] = 0;
  }
  while (running)
    for (volatile int i = 0; i < threads * blocks; i++) {
      if (fibers[i].done) continue;
      become(i);
      if (_setjmp(main_jump) == 0) {
        Fiber &f = fibers[i];
        if (f.started) _longjmp(f.jump, 1);
        f.started = true;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = &main_context;
        makecontext(&f.start, enter, 0);
        setcontext(&f.start);
      }
    }
}
static char slots[FIBERS / 32][32][64];
template <class T> T exchange(T v, int lane) {  // what `lane` of the same warp gave
  const int w = current / 32;
  memcpy(slots[w][current % 32], &v, sizeof v);
  warp_barrier();
  T out;
  memcpy(&out, slots[w][lane & 31], sizeof v);
  warp_barrier();
  return out;
}
template <class T> void all(const T &v, T (&out)[32]) {
  const int w = current / 32;
  memcpy(slots[w][current % 32], &v, sizeof v);
  warp_barrier();
  for (int i = 0; i < 32; i++) memcpy(&out[i], slots[w][i], sizeof v);
  warp_barrier();
}
}  // namespace emu

static void __syncthreads() { emu::block_barrier(); }
DEVICE void warp_sync() { emu::warp_barrier(); }
DEVICE void grid_launch() {}
DEVICE void grid_wait() {}
template <class T> T load(const void *p) { T v; if ((u64)p % sizeof(T)) { fprintf(stderr, "emulator: misaligned load\n"); abort(); } memcpy(&v, p, sizeof v); return v; }
DEVICE V4 ldc16(const void *p) { return load<V4>(p); }
DEVICE V2 ldc8(const void *p) { return load<V2>(p); }
DEVICE u32 ldc4(const void *p) { return load<u32>(p); }
DEVICE u32 ldc2(const void *p) { return load<u16>(p); }
DEVICE u32 ldc1(const void *p) { return load<u8>(p); }
DEVICE float half_to_float(u32 h) { _Float16 f; u16 b = (u16)h; memcpy(&f, &b, 2); return (float)f; }
DEVICE u16 float_to_half(float v) { _Float16 f = (_Float16)v; u16 b; memcpy(&b, &f, 2); return b; }
DEVICE u32 pack_halves(float lo, float hi) { return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16; }
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int s = 0; s < 32; s += 16) d |= (u32)float_to_half((float)fma((double)half_to_float(a >> s), (double)half_to_float(b >> s), (double)half_to_float(c >> s))) << s;
  return d;
}
DEVICE u32 half2_mul(u32 a, u32 b) { return half2_fma(a, b, 0x80008000u); }
DEVICE u32 half2_sub(u32 a, u32 b) { return half2_fma(b, 0xBC00BC00u, a); }
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; i++) {
    const u8 byte = both >> 8 * (selector >> 4 * i & 7);
    d |= (u32)(u8)(selector >> 4 * i & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return d;
}
DEVICE u32 bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }
DEVICE float unbits(u32 u) { float f; memcpy(&f, &u, 4); return f; }
DEVICE int dp4a(u32 a, u32 b, int c) { for (int i = 0; i < 4; i++) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i); return c; }
DEVICE int dp2a(int a, u32 b, int c) { return c + (short)a * (signed char)b + (a >> 16) * (signed char)(b >> 8); }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float __expf(float x) { return expf(x); }
DEVICE int round_int(float x) { return (int)rintf(x); }
DEVICE float rsqrt_(float x) { return 1.f / sqrtf(x); }
DEVICE float shfl_xor(float v, int m) { return emu::exchange(v, (emu::current % 32) ^ m); }
DEVICE int shfl_xor(int v, int m) { return emu::exchange(v, (emu::current % 32) ^ m); }
DEVICE int shfl(int v, int l) { return emu::exchange(v, l); }
DEVICE float shfl(float v, int l) { return emu::exchange(v, l); }
DEVICE int shfl_up(int v, int by) { const int l = emu::current % 32; return emu::exchange(v, l >= by ? l - by : l); }
DEVICE void copy_async(void *s, const void *g, bool valid) { if ((u64)s % 16 || (valid && (u64)g % 16)) { fprintf(stderr, "emulator: misaligned copy\n"); abort(); } if (valid) memcpy(s, g, 16); else memset(s, 0, 16); }
template <int N> DEVICE void copy_async_few(void *s, const void *g) { if ((u64)s % N || (u64)g % N) { fprintf(stderr, "emulator: misaligned copy\n"); abort(); } memcpy(s, g, N); }
DEVICE int cluster_rank() { return emu::current / emu::threads; }
DEVICE void cluster_arrive() {
  emu::cluster_seen[emu::current] = emu::cluster_generation;
  if (++emu::cluster_waiting == emu::running) { emu::cluster_waiting = 0; emu::cluster_generation++; }
}
DEVICE void cluster_arrive_relaxed() { cluster_arrive(); }
DEVICE void cluster_wait() { while (emu::cluster_generation == emu::cluster_seen[emu::current]) emu::yield(); }
template <class T> T *peer(T *p, int rank) { return (T *)((char *)p + (rank - cluster_rank()) * (long)sizeof *emu::block_memory); }
DEVICE void inbox_open(u64 *inbox, int bytes) { *inbox = bytes; }
DEVICE void send(float *to, float v, u64 *inbox, int rank) { *peer(to, rank) = v; *peer(inbox, rank) -= sizeof v; }
DEVICE void inbox_wait(u64 *inbox) { while (*(volatile u64 *)inbox) emu::yield(); }
DEVICE void copy_commit() {}
template <int N> DEVICE void copy_wait() {}
DEVICE u32 matrix_row(const void *const *rows, int m, int l, bool trans) {
  u16 lo, hi;
  if (trans) { memcpy(&lo, (const u16 *)rows[m * 8 + l % 4 * 2] + l / 4, 2); memcpy(&hi, (const u16 *)rows[m * 8 + l % 4 * 2 + 1] + l / 4, 2); }
  else { memcpy(&lo, (const u16 *)rows[m * 8 + l / 4] + l % 4 * 2, 2); memcpy(&hi, (const u16 *)rows[m * 8 + l / 4] + l % 4 * 2 + 1, 2); }
  return lo | (u32)hi << 16;
}
DEVICE void checked(const void *p) { if ((u64)p % 16) { fprintf(stderr, "emulator: misaligned ldmatrix\n"); abort(); } }
DEVICE V4 ldmatrix4(const void *p) { checked(p); const void *r[32]; emu::all(p, r); int l = emu::current % 32; return V4{matrix_row(r, 0, l, false), matrix_row(r, 1, l, false), matrix_row(r, 2, l, false), matrix_row(r, 3, l, false)}; }
DEVICE V2 ldmatrix2(const void *p) { checked(p); const void *r[32]; emu::all(p, r); int l = emu::current % 32; return V2{matrix_row(r, 0, l, false), matrix_row(r, 1, l, false)}; }
DEVICE V2 ldmatrix2_trans(const void *p) { checked(p); const void *r[32]; emu::all(p, r); int l = emu::current % 32; return V2{matrix_row(r, 0, l, true), matrix_row(r, 1, l, true)}; }
DEVICE V4 ldmatrix4_trans(const void *p) { checked(p); const void *r[32]; emu::all(p, r); int l = emu::current % 32; return V4{matrix_row(r, 0, l, true), matrix_row(r, 1, l, true), matrix_row(r, 2, l, true), matrix_row(r, 3, l, true)}; }
struct Fragments { u32 a[4], b[2]; };
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Fragments all[32]; emu::all(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
  const int l = emu::current % 32;
  for (int i = 0; i < 4; i++) {
    const int row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const u32 av = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], bv = all[col * 4 + k % 8 / 2].b[k / 8];
      sum += half_to_float(av >> 16 * (k & 1)) * half_to_float(bv >> 16 * (k & 1));
    }
    d[i] += sum;
  }
}
template <int K> DEVICE void mma_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Fragments all[32]; emu::all(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
  const int l = emu::current % 32;
  for (int i = 0; i < 4; i++) {
    const int row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
    for (int k = 0; k < K; k++) {
      const u32 av = all[row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2], bv = all[col * 4 + k % 16 / 4].b[k / 16];
      d[i] += (signed char)(av >> 8 * (k & 3)) * (signed char)(bv >> 8 * (k & 3));
    }
  }
}
DEVICE void mma_s8_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_s8<32>(d, a, b0, b1); }
DEVICE void mma_s8_k16(int (&d)[4], u32 a0, u32 a1, u32 b0) { const u32 a[4] = {a0, a1, 0, 0}; mma_s8<16>(d, a, b0, 0); }
DEVICE u32 shared_address(const void *p) { return (u32)(u64)p; }
DEVICE u64 tile_at(const void *p) { return (u64)p; }
DEVICE void fence_tiles() {}
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() {}
template <int PENDING> void wgmma_wait() {}
// Half k (0..15) of row `row` of a tile, as tile_at says.
DEVICE float tile_value(u64 tile, int row, int k) {
  const u64 base = tile & ~1023ull, at = (tile & 1023) + k * 2;
  u16 h;
  if (at >= 128) { fprintf(stderr, "emulator: a tile that starts past its first row\n"); abort(); }
  memcpy(&h, (const u8 *)base + row * 128 + ((at / 16 ^ row % 8) * 16) + at % 16, 2);
  return half_to_float(h);
}
template <int N, class B> void wgmma_of(float (&d)[N][4], const u32 (&a)[4], const B &b) {
  Fragments all[32]; emu::all(Fragments{{a[0], a[1], a[2], a[3]}, {0, 0}}, all);
  const int l = emu::current % 32;
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 4; i++) {
      const int row = l / 4 + i / 2 * 8, col = n * 8 + l % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) d[n][i] += half_to_float(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2] >> 16 * (k & 1)) * b(k, col);
    }
}
// Half k (0..15) of column `col` of a tile whose 16 rows are k.
DEVICE float tile_column(u64 tile, int col, int k) {
  u16 h;
  memcpy(&h, (const u8 *)tile + k * 128 + ((col / 8 ^ k % 8) * 16) + col % 8 * 2, 2);
  return half_to_float(h);
}
template <bool TRANS = false, int N> void wgmma(float (&d)[N][4], const u32 (&a)[4], u64 b) {
  wgmma_of(d, a, [&](int k, int col) { return TRANS ? tile_column(b, col, k) : tile_value(b, col, k); });
}
template <bool TRANS = false, int N> void wgmma_tiles(float (&d)[N][4], u64 a, u64 b) {
  const int l = emu::current % 32, first = emu::current / 32 % 4 * 16;
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 16; k++) {
        const int row = first + l / 4 + i / 2 * 8;
        d[n][i] += (TRANS ? tile_column(a, row, k) : tile_value(a, row, k)) * tile_value(b, n * 8 + l % 4 * 2 + i % 2, k);
      }
}
DEVICE int warp_add(int v) { int all[32], s = 0; emu::all(v, all); for (int i = 0; i < 32; i++) s += all[i]; return s; }
DEVICE u32 warp_most(u32 v) { u32 all[32], s = 0; emu::all(v, all); for (int i = 0; i < 32; i++) s = max(s, all[i]); return s; }
DEVICE u32 warp_least(u32 v) { return ~warp_most(~v); }
DEVICE void fence() {}
DEVICE u32 atomicOr(u32 *p, u32 v) { u32 o = *p; *p |= v; return o; }
DEVICE int atomicMin(int *p, int v) { int o = *p; *p = min(o, v); return o; }
DEVICE int atomicMax(int *p, int v) { int o = *p; *p = max(o, v); return o; }
DEVICE int atomicAdd(int *p, int v) { int o = *p; *p += v; return o; }
DEVICE long long __double_as_longlong(double d) { long long v; memcpy(&v, &d, 8); return v; }
DEVICE double __longlong_as_double(long long v) { double d; memcpy(&d, &v, 8); return d; }
