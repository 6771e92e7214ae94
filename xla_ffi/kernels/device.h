// What launchers ask of the current device.
#ifndef JAX_FP4_XLA_FFI_KERNELS_DEVICE_H_
#define JAX_FP4_XLA_FFI_KERNELS_DEVICE_H_

#include <cuda_runtime_api.h>

namespace jax_fp4::cuda {

inline cudaError_t multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

inline cudaError_t is_hopper(bool* answer) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *answer = major == 9 && minor == 0;
  return error;
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_DEVICE_H_
