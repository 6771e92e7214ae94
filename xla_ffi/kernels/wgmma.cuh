// Tensor core products of sm_90a: of a warpgroup, 64 columns by 16 to 256 rows by 16, bfloat16 with
// float32 sums; and the descriptors of their operands in shared memory.
#ifndef JAX_FP4_XLA_FFI_KERNELS_WGMMA_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_WGMMA_CUH_

#include <stdint.h>

namespace jax_fp4::cuda {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of the committed groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Until all are complete, and with them `sums`, of which the compiler knows only by this that they
// come from what it waits for. It must not have cause to copy them before: a loop of products that
// may be passed by is one.
template <int count>
__device__ __forceinline__ void wgmma_finish(float* sums) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The registers of a thread from here on, in a kernel of several roles: fewer, or more.
template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// A warp's own product: sums[16, 8] += a[16, 16] * b[16, 8].
__device__ __forceinline__ void multiply_warp(float* sums, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The lower word of the descriptor of a tile that TMA wrote under the 128-byte swizzle, in lines of
// 128 bytes, eight to a core matrix; the upper word is the same for all. Along its lines lies the
// contraction, or (`across`, the step between the 64 wide parts of the tile) what is not
// contracted.
__device__ __forceinline__ uint32_t describe(uint32_t shared, uint32_t across = 16) {
  return (shared & 0x3FFFFu) >> 4 | across >> 4 << 16;
}
#define JAX_FP4_UPPER_WORD "0x40000040"  // the 128-byte swizzle; eight lines are 1,024 bytes

// d[64, rows] += a[64, 16] * b[16, rows]: wgmma<rows>::from_registers has a in registers,
// from_shared both operands in shared memory, each with the contraction along its lines or
// (`a_across`, `b_across`) across them. One asm statement a shape: the instruction wants every
// register named.
template <int rows>
struct Wgmma;

#define JAX_FP4_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_FP4_NAMES_16 \
  JAX_FP4_NAMES_8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FP4_NAMES_32 \
  JAX_FP4_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_FP4_NAMES_48 \
  JAX_FP4_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_FP4_NAMES_64 \
  JAX_FP4_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FP4_NAMES_96                                                             \
  JAX_FP4_NAMES_64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_FP4_NAMES_128                                                                        \
  JAX_FP4_NAMES_96                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

#define JAX_FP4_SUMS_8(d, i)                                                                    \
  "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), \
      "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
#define JAX_FP4_SUMS_16(d, i) JAX_FP4_SUMS_8(d, i), JAX_FP4_SUMS_8(d, (i) + 8)
#define JAX_FP4_SUMS_32(d, i) JAX_FP4_SUMS_16(d, i), JAX_FP4_SUMS_16(d, (i) + 16)
#define JAX_FP4_SUMS_48(d, i) JAX_FP4_SUMS_32(d, i), JAX_FP4_SUMS_16(d, (i) + 32)
#define JAX_FP4_SUMS_64(d, i) JAX_FP4_SUMS_32(d, i), JAX_FP4_SUMS_32(d, (i) + 32)
#define JAX_FP4_SUMS_96(d, i) JAX_FP4_SUMS_64(d, i), JAX_FP4_SUMS_32(d, (i) + 64)
#define JAX_FP4_SUMS_128(d, i) JAX_FP4_SUMS_64(d, i), JAX_FP4_SUMS_64(d, (i) + 64)

// The operands after the sums, by number: sums, sums + 1, ...
#define JAX_FP4_WGMMA(rows, sums, o0, o1, o2, o3, o4)                                           \
  template <>                                                                                   \
  struct Wgmma<rows> {                                                                          \
    static constexpr int kSums = sums;                                                          \
    static __device__ __forceinline__ void from_registers(float* d, const uint32_t* a,          \
                                                          uint32_t b) {                         \
      asm volatile(                                                                             \
          "{ .reg .pred add; .reg .b64 b; setp.eq.u32 add, 0, 0;"                               \
          " mov.b64 b, {%" #o4 ", " JAX_FP4_UPPER_WORD                                          \
          "};"                                                                                  \
          " wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.bf16.bf16 {" JAX_FP4_NAMES_##sums \
          "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, b, add, 1, 1, 0; }"                     \
          : JAX_FP4_SUMS_##sums(d, 0)                                                           \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                \
    }                                                                                           \
    template <bool a_across, bool b_across>                                                     \
    static __device__ __forceinline__ void from_shared(float* d, uint32_t a, uint32_t b) {      \
      asm volatile(                                                                             \
          "{ .reg .pred add; .reg .b64 a, b; setp.eq.u32 add, 0, 0;"                            \
          " mov.b64 a, {%" #o0 ", " JAX_FP4_UPPER_WORD                                          \
          "};"                                                                                  \
          " mov.b64 b, {%" #o1 ", " JAX_FP4_UPPER_WORD                                          \
          "};"                                                                                  \
          " wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.bf16.bf16 {" JAX_FP4_NAMES_##sums \
          "}, a, b, add, 1, 1, %" #o2 ", %" #o3 "; }"                                           \
          : JAX_FP4_SUMS_##sums(d, 0)                                                           \
          : "r"(a), "r"(b), "n"(a_across), "n"(b_across));                                      \
    }                                                                                           \
  }

JAX_FP4_WGMMA(16, 8, 8, 9, 10, 11, 12);
JAX_FP4_WGMMA(32, 16, 16, 17, 18, 19, 20);
JAX_FP4_WGMMA(64, 32, 32, 33, 34, 35, 36);
JAX_FP4_WGMMA(96, 48, 48, 49, 50, 51, 52);
JAX_FP4_WGMMA(128, 64, 64, 65, 66, 67, 68);
JAX_FP4_WGMMA(192, 96, 96, 97, 98, 99, 100);
JAX_FP4_WGMMA(256, 128, 128, 129, 130, 131, 132);

#undef JAX_FP4_WGMMA
#undef JAX_FP4_UPPER_WORD

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_WGMMA_CUH_
