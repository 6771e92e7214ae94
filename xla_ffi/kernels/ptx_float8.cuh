// Instructions for 8-bit codes, as ptx.cuh has the others; for the host too.
#ifndef JAX_FP4_XLA_FFI_KERNELS_PTX_FLOAT8_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_PTX_FLOAT8_CUH_

#include "float8.h"

namespace jax_fp4::cuda {

// float8_encode of two values, `low` in the low byte. The instructions have its bits for every
// float32: they saturate, keep signs and subnormals, and make 0x7F of any NaN.
template <Float8Codes codes>
JAX_FP4_FN uint32_t encode_float8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  if constexpr (codes == Float8Codes::kE4M3)
    asm("{ .reg .b16 two, none; mov.b16 none, 0; cvt.rn.satfinite.e4m3x2.f32 two, %1, %2;"
        " mov.b32 %0, {two, none}; }"
        : "=r"(pair)
        : "f"(high), "f"(low));
  else
    asm("{ .reg .b16 two, none; mov.b16 none, 0; cvt.rn.satfinite.e5m2x2.f32 two, %1, %2;"
        " mov.b32 %0, {two, none}; }"
        : "=r"(pair)
        : "f"(high), "f"(low));
  return pair;
#else
  return float8_encode<codes>(low) | float8_encode<codes>(high) << 8;
#endif
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_PTX_FLOAT8_CUH_
