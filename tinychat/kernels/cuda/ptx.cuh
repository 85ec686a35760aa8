// Everything that is not plain C++: one PTX instruction (or two) per function. No CUDA header is needed, so that NVRTC
// alone compiles the kernels. tests/cuda_emulator.h has the same functions for a CPU.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) V4 {
  u32 x, y, z, w;
};
struct alignas(8) V2 {
  u32 x, y;
};
struct alignas(16) F4 {
  float x, y, z, w;
};
struct alignas(8) F2 {
  float x, y;
};

#define INFINITY __int_as_float(0x7f800000)
#define DEVICE __device__ __forceinline__
#define KERNEL(threads, resident) extern "C" __global__ void __launch_bounds__(threads, resident)
#define DYNAMIC_SHARED(name) extern __shared__ V4 name[]
// Blocks of a cluster run at the same time and reach each other's shared memory.
#define CLUSTER_KERNEL(threads, resident, blocks) \
  extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(threads, resident)
#define CLUSTER_SHARED(type, name) \
  DYNAMIC_SHARED(name##_bytes);    \
  type &name = *(type *)name##_bytes

// Programmatic dependent launch: a kernel's blocks may run before the kernel in front has finished, and load their
// weights until grid_wait(), which returns when that one has finished and its writes are visible. From then on the
// kernel behind may start, or from grid_launch() on (which lets several kernels queue up on the multiprocessors, and
// mostly measured slower). Nothing before compute capability 9.0.
DEVICE void grid_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
  // Behind a branch that is always taken, which ptxas cannot know: it would move the wait in front of those loads.
  u32 blocks;
  asm("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  if (blocks) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Loads of constant data (weights): volatile, so that they stay where they are written, before grid_wait().
DEVICE V4 ldc16(const void *p) {
  V4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
DEVICE V2 ldc8(const void *p) {
  V2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE u32 ldc4(const void *p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE u32 ldc2(const void *p) {
  u16 v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

DEVICE u32 ldc1(const void *p) {
  u32 v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

DEVICE float half_to_float(u32 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
  return f;
}
DEVICE u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEVICE u32 pack_halves(float lo, float hi) {
  u32 h;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
  return h;
}
DEVICE u32 half2_sub(u32 a, u32 b) {
  u32 d;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 half2_mul(u32 a, u32 b) {
  u32 d;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Byte i of the result is byte (selector >> 4 * i & 7) of a (0 to 3) and b (4 to 7), or, where that nibble's highest
// bit is set, 8 times its sign.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
DEVICE u32 bits(float f) { return __float_as_uint(f); }
DEVICE float unbits(u32 u) { return __uint_as_float(u); }
DEVICE int dp4a(u32 a, u32 b, int c) {
  int d;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Both halves of a (signed, 16 bits) times the two low bytes of b, plus c.
DEVICE int dp2a(int a, u32 b, int c) {
  int d;
  asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Rounded once each, whatever stands around them: what has to have the same bits in two kernels.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE int round_int(float x) { return __float2int_rn(x); }
DEVICE float rsqrt_(float x) { return rsqrtf(x); }

DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE int shfl_xor(int v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE int shfl(int v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE float shfl(float v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE int shfl_up(int v, int by) { return __shfl_up_sync(~0u, v, by); }
DEVICE void warp_sync() { __syncwarp(); }

// 16 bytes from global to shared memory in the background; zeros where !valid.
DEVICE void copy_async(void *shared, const void *global, bool valid) {
  u32 s = (u32)__cvta_generic_to_shared(shared), n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(global), "r"(n) : "memory");
}
template <int BYTES> DEVICE void copy_async_few(void *shared, const void *global) {  // 4 or 8
  u32 s = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(s), "l"(global), "n"(BYTES) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// A cluster's barrier in two halves, which also orders accesses of shared memory; and what stands where `p` points to,
// in another block's.
DEVICE int cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_arrive_relaxed() {  // says nothing of what was written before
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <class T> DEVICE T *peer(T *p, int rank) {
  T *there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return there;
}

// Matrices of 8x8 halves from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE V4 ldmatrix4(const void *p) {
  V4 v;
  u32 s = (u32)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(s));
  return v;
}
DEVICE V2 ldmatrix2(const void *p) {
  V2 v;
  u32 s = (u32)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(s));
  return v;
}
DEVICE V2 ldmatrix2_trans(const void *p) {
  V2 v;
  u32 s = (u32)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(s));
  return v;
}
DEVICE V4 ldmatrix4_trans(const void *p) {
  V4 v;
  u32 s = (u32)__cvta_generic_to_shared(p);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(s));
  return v;
}

// Tensor cores: d (16x8) += a (16xk) * b (kx8). Rows of a: lane / 4 and + 8; columns of b: lane / 4.
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_s8_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_s8_k16(int (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Hopper: a warpgroup (4 warps) multiplies its 64 rows at once, d (64xN) += a (64x16) * b (16xN), in the background. d
// and a lie in the warps as those of mma_f16 do, warp i having rows 16 * i and on. b, and a where it is not in
// registers, are `tile`s in shared memory: rows of 128 bytes from a multiple of 1024 bytes on, whose 16-byte vector c
// stands at c ^ (row % 8). Rows are b's columns (a's rows), or, for TRANS, its 16 rows. The other threads' writes to
// a tile must be behind fence_tiles() and a barrier.
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// Values that blocks of a cluster send into each other's shared memory. An inbox is told once how many bytes will come,
// before a barrier of the cluster; inbox_wait() returns when they are there. The addresses for send() are this block's.
// A barrier instead would wait for a fence of the whole GPU.
DEVICE void inbox_open(u64 *inbox, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inbox)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)), "r"(bytes)
      : "memory");
}
DEVICE void send(float *to, float v, u64 *inbox, int rank) {
  asm volatile(
      "{ .reg .u32 there, box; mapa.shared::cluster.u32 there, %0, %3; mapa.shared::cluster.u32 box, %2, %3; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [box]; }" ::"r"(shared_address(to)),
      "r"(bits(v)), "r"(shared_address(inbox)), "r"(rank)
      : "memory");
}
DEVICE void inbox_wait(u64 *inbox) {
  asm volatile(
      "{ .reg .pred there; again: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], 0; @!there bra again; }" ::"r"(
          shared_address(inbox))
      : "memory");
}
DEVICE u64 tile_at(const void *p) {  // 1 << 62: this order; 64 << 32, 64 << 16: 1024 bytes from 8 rows to the next
  return (u64)1 << 62 | (u64)64 << 32 | (u64)64 << 16 | (shared_address(p) & 0x3FFFF) >> 4;
}
DEVICE void fence_tiles() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#define WGMMA_SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
DEVICE void wgmma(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
      : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <bool TRANS = false> DEVICE void wgmma(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37; }"
      : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5), WGMMA_SUMS(6),
      WGMMA_SUMS(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS));
}
DEVICE void wgmma(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
      : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5), WGMMA_SUMS(6),
      WGMMA_SUMS(7), WGMMA_SUMS(8), WGMMA_SUMS(9), WGMMA_SUMS(10), WGMMA_SUMS(11), WGMMA_SUMS(12), WGMMA_SUMS(13),
      WGMMA_SUMS(14), WGMMA_SUMS(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// TRANS: 16 rows of the tile a are its columns.
template <bool TRANS = false> DEVICE void wgmma_tiles(float (&d)[4][4], u64 a, u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %18, 0; }"
      : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3)
      : "l"(a), "l"(b), "n"(TRANS));
}
DEVICE void wgmma_tiles(float (&d)[8][4], u64 a, u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5), WGMMA_SUMS(6),
      WGMMA_SUMS(7)
      : "l"(a), "l"(b));
}

DEVICE int warp_add(int v) { return __reduce_add_sync(~0u, v); }
DEVICE u32 warp_most(u32 v) { return __reduce_max_sync(~0u, v); }
DEVICE u32 warp_least(u32 v) { return __reduce_min_sync(~0u, v); }
DEVICE void fence() { __threadfence(); }
