// The instructions that CUDA C++ has no name for, or not on every architecture, each with what an
// architecture without it does.
#ifndef JAX_FP4_XLA_FFI_KERNELS_PTX_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_PTX_CUH_

#include <cuda_bf16.h>
#include <stdint.h>

#include "nvfp4.h"

namespace jax_fp4::cuda {

// ---- Passes ------------------------------------------------------------------------------------

// Every thread of a kernel that `launch_pass` launches does this once. Until here the pass before
// it may be under way; after it that pass, and all before it, is done and seen.
__device__ __forceinline__ void await_pass_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// Once all thread blocks of a pass have done this, or ended, those of the next one may begin, where
// there is room for them, and wait. A pass without it lets them begin as its last blocks end.
__device__ __forceinline__ void let_next_pass_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// ---- Copies to shared memory -------------------------------------------------------------------

// Begins the copy of sixteen bytes from global to shared memory, or of sixteen zeros.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool exists) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}

// Waits for the copies that this thread has begun.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Begins the copy of 4, 8 or 16 bytes, or of so many zeros.
template <int bytes>
__device__ __forceinline__ void copy_few(uint32_t shared, const uint8_t* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes),
               "r"(exists ? bytes : 0)
               : "memory");
}

// ---- Shared memory, by address -----------------------------------------------------------------

__device__ __forceinline__ uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

__device__ __forceinline__ uint64_t load_double_word(uint32_t shared) {
  uint64_t words;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(words) : "r"(shared));
  return words;
}
__device__ __forceinline__ uint32_t load_byte(uint32_t shared) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(shared));
  return byte;
}

__device__ __forceinline__ uint4 load_pieces(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared));
  return v;
}
__device__ __forceinline__ void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
__device__ __forceinline__ void store_pieces(uint32_t shared, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Four matrices of 8 x 8 halves, the lines of each at the addresses of eight lanes.
__device__ __forceinline__ void load_matrices(uint32_t line, uint32_t words[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(line));
}
// The same to memory, transposed.
__device__ __forceinline__ void store_matrices(uint32_t line, const uint32_t words[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#endif
}

// ---- Pairs of bfloat16 -------------------------------------------------------------------------

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// Nearest even; the first argument becomes the low half.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The larger magnitude of each half, under an arbitrary sign; NaN wins.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t most;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
#else
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// Product of the halves; exact where it is used.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero; }"
      : "=r"(product)
      : "r"(a), "r"(b));
  return product;
}

// Halves that are infinite become NaN; others keep their magnitude.
__device__ __forceinline__ uint32_t nan_if_infinite(uint32_t pair) {
  uint32_t out;
  asm("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 %0, %1, zero, %1; }"
      : "=r"(out)
      : "r"(pair));
  return out;
}

// ---- Floats ------------------------------------------------------------------------------------

// min(|a| * b, 1) for b >= 0, one rounding; NaN becomes 0.
__device__ __forceinline__ float saturated_product(float a, float b) {
  float product;
  asm("{ .reg .f32 m; abs.f32 m, %1; mul.rn.sat.f32 %0, m, %2; }" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// 1 / x rounded to nearest for x in [2.4e-38, 8e37] (checked for every such x); NaN for x = 0.
__device__ __forceinline__ float reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  const float miss = __fmaf_rn(x, guess, -1.0f);
  return __fmaf_rn(guess, -miss, guess);
}

// ---- Pairs of E4M3 -----------------------------------------------------------------------------

// Nearest-even codes of two values >= 0, 448 above the range, 0x7F for NaN; `low` in the low byte.
__device__ __forceinline__ uint32_t encode_e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("{ .reg .b16 two, none; mov.b16 none, 0; cvt.rn.satfinite.e4m3x2.f32 two, %1, %2;"
      " mov.b32 %0, {two, none}; }"
      : "=r"(pair)
      : "f"(high), "f"(low));
  return pair;
#else
  const auto code = [](float value) {
    return value != value ? kNanScale : e4m3_encode<float>(fminf(value, kE4M3Max));
  };
  return code(low) | code(high) << 8;
#endif
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_PTX_CUH_
