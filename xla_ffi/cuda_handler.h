// What the handlers for platform CUDA share: the device of the call, its scratch, and what a launch
// may report.
#ifndef JAX_FP4_XLA_FFI_CUDA_HANDLER_H_
#define JAX_FP4_XLA_FFI_CUDA_HANDLER_H_

#include <cuda_runtime_api.h>

#include <string>

#include "common_handler.h"
#include "kernels/dequantize.h"
#include "kernels/grouped_gemm.h"
#include "kernels/quantize_float8.h"
#include "kernels/quantize_transpose.h"

namespace jax_fp4 {

using Out = ffi::Result<ffi::AnyBuffer>;

// What every handler gets from its context.
struct Context {
  cudaStream_t stream;
  int32_t ordinal;
};

// Makes the device of the call current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != ordinal) {
      status_ = cudaSetDevice(ordinal);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

inline ffi::Error failed(const char* op, const char* what) {
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + what);
}

// `scratch` is a result of the call: memory of the allocator of XLA's context would be free again
// when the handler returns, and a CUDA graph that was captured meanwhile would go on to write
// there.
template <class Problem>
ffi::Error launch(const char* op, cudaError_t (*launcher)(const Problem&, void*, cudaStream_t),
                  const Problem& problem, const Context& context, Out* scratch = nullptr) {
  const int64_t needed = cuda::scratch_bytes(problem);
  const int64_t given = scratch == nullptr ? 0 : static_cast<int64_t>((*scratch)->size_bytes());
  if (given < needed)
    return ffi::Error::InvalidArgument(std::string(op) + ": scratch has " + std::to_string(given) +
                                       " bytes; needs " + std::to_string(needed));
  const OnDevice device(context.ordinal);
  if (device.status() != cudaSuccess) return failed(op, cudaGetErrorString(device.status()));
  void* memory = scratch == nullptr ? nullptr : (*scratch)->untyped_data();
  const cudaError_t status = launcher(problem, memory, context.stream);
  // The second is what queries about a kernel say of it.
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
    return failed(op, "this build has no kernel for the GPU's architecture; it has " JAX_FP4_ARCHS
                      ". Build with JAX_FP4_CUDA_ARCHS.");
  if (status == cudaErrorNotSupported)
    return failed(op,
                  "its kernel needs a Hopper GPU, of compute capability 9.0, and this is another. "
                  "Lower the program where the GPU is visible.");
  return status == cudaSuccess ? ffi::Error::Success() : failed(op, cudaGetErrorString(status));
}

// The kernels' contract for such buffers is 16: several of them move what they can in such pieces.
inline void require_aligned(Checks& checks, const std::string& name, const void* data) {
  checks.require(reinterpret_cast<uintptr_t>(data) % 16 == 0,
                 name + " does not begin at a multiple of 16 bytes");
}

// The binding of a Context.
inline auto in_context() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CUDA_HANDLER_H_
