// Quantization to 8-bit codes on a CUDA device: x [batch, m, k] becomes its row-wise form, its
// column-wise form, or both in one pass. Equal bit for bit to the CPU kernels (cpu/float8.h); the
// words are numerics.md, section 3. Groups are not known here.
//
// The rules for pointers, streams and capture are those of quantize_transpose.h: x and codes and
// scales are aligned to 16 bytes, every byte of the outputs is written, no scratch is needed.
//
// Bytes moved per element of x (width w): w, and 1 a form. One scale a tensor needs its amax first,
// w more, unless the amax or the scale is given; under a given scale it is found on the way.
#ifndef JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_FLOAT8_H_
#define JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_FLOAT8_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "types.h"

namespace jax_fp4::cuda {

// codes [batch, rows, extent], rows and extent being m and k rounded up to whole blocks, or k and m
// of the column-wise form. Scales are E8M0 bytes [batch, rows, blocks], or float32, the inverse:
// [batch, rows / tile, blocks], or [batch] for a tensor.
struct StoredFloat8 {
  bool wanted;
  int64_t extent, blocks;
  uint8_t* codes;
  void* scale;
  float* amax;  // [batch]; one scale a tensor only
};

struct Float8Problem {
  const void* x;
  DType x_dtype;
  DType compute;  // x is rounded to it first
  int64_t batch, m, k;
  Float8Scaling scaling;
  Float8Codes codes;
  int32_t tile;  // rows that share a scale: 1, or as many as a block is long
  bool power_of_two;
  float eps;
  // One scale a tensor only, at most one of them, [batch]; null = computed from x. Of an amax, not
  // negative (unchecked), the scale is made; by a scale x is multiplied.
  const float* given_amax;
  const float* given_scale;
  StoredFloat8 row, column;
};

int64_t scratch_bytes(const Float8Problem& problem);  // 0

// cudaErrorInvalidValue: the problem is none that the contract above describes.
cudaError_t launch_quantize_float8(const Float8Problem& problem, void* scratch,
                                   cudaStream_t stream);

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_FLOAT8_H_
