// NVFP4 codes and scales back to values on a CUDA device, equal bit for bit to the CPU kernels up
// to the payload of a NaN (numerics.md, section 1.9). Bytes moved per element: 0.5625 read, 2 or 4
// written. The rules for pointers, streams and capture are those of quantize_transpose.h,
// with `out` as its x.
#ifndef JAX_FP4_XLA_FFI_KERNELS_DEQUANTIZE_H_
#define JAX_FP4_XLA_FFI_KERNELS_DEQUANTIZE_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "types.h"

namespace jax_fp4::cuda {

int64_t scratch_bytes(const DequantizeProblem& problem);  // 0

cudaError_t launch_dequantize(const DequantizeProblem& problem, void* scratch, cudaStream_t stream);

// The product form in bfloat16, each 64 elements of a row in the order of gemm_decode.cuh
// (`interleaved`), zeros up to an extent that is whole 64s.
cudaError_t launch_interleave(const DequantizeProblem& problem, void* scratch, cudaStream_t stream);

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_DEQUANTIZE_H_
