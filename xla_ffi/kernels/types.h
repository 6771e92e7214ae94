// Enumerations that the CPU kernels, the device kernels and the handlers share. No code.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TYPES_H_
#define JAX_FP4_XLA_FFI_KERNELS_TYPES_H_

#include <stdint.h>

namespace jax_fp4 {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The error by which four-over-six chooses between its two scales; kNone is without four-over-six.
enum class ErrorNorm : int32_t { kNone = 0, kMae = 1, kMse = 2 };

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_KERNELS_TYPES_H_
