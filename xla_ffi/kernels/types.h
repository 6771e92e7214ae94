// What the CPU kernels, the device kernels and the handlers call by one name. No code.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TYPES_H_
#define JAX_FP4_XLA_FFI_KERNELS_TYPES_H_

#include <stdint.h>

namespace jax_fp4 {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The error by which four-over-six chooses between its two scales; kNone is without four-over-six.
enum class ErrorNorm : int32_t { kNone = 0, kMae = 1, kMse = 2 };

// What x is made of h by, before it is quantized; kNone: x is given. Those up to kLastGated have a
// gate: h has twice the columns of x, gate columns first.
enum class Activation : int32_t {
  kNone = 0,
  kSwiglu = 1,
  kGeglu = 2,
  kClampedQgeglu = 3,
  kSituGlu = 4,
  kSilu = 5,
  kGelu = 6,
  kRelu = 7,
  kSquaredRelu = 8,
};
constexpr Activation kLastGated = Activation::kSituGlu;

// The 8-bit formats: an E8M0 scale for 32 elements (MXFP8), or a float32 scale for 128 elements, or
// for a whole matrix; and what their codes are.
enum class Float8Scaling : int32_t { kMxfp8 = 0, kBlock = 1, kTensor = 2 };
enum class Float8Codes : int32_t { kE4M3 = 0, kE5M2 = 1 };

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
