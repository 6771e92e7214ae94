// What the CPU kernels, the device kernels and the handlers call by one name. No code.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TYPES_H_
#define JAX_FP4_XLA_FFI_KERNELS_TYPES_H_

#include <stdint.h>

namespace jax_fp4 {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The error by which four-over-six chooses between its two scales; kNone is without four-over-six.
enum class ErrorNorm : int32_t { kNone = 0, kMae = 1, kMse = 2 };

// codes [batch, rows, blocks * 8], block_scale [batch, rows, blocks] -> out [batch, rows, extent].
struct DequantizeProblem {
  const uint8_t* codes;
  const uint8_t* block_scale;
  const float* amax;  // [batch] or [batch, rows]; null = code times block scale, the product form
  bool row_scaled;
  int32_t bound;
  int64_t batch, rows, blocks, extent;  // extent <= blocks * 16
  void* out;
  DType out_dtype;
};

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_KERNELS_TYPES_H_
