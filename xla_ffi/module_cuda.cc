// The Python module `jax_fp4._cuda`: the CUDA handlers under the names of their targets.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

extern "C" {  // in cuda_handler.cc, float8_cuda_handler.cc and grouped_gemm_handler.cc
XLA_FFI_Error* jax_fp4_cuda_quantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_quantize_transpose(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_activate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_activate_quantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_activate_quantize_transpose(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_amax(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_dequantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_quantize_float8(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_quantize_transpose_float8(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_grouped_matmul(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_grouped_matmul_bf16(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_cuda_grouped_contraction(XLA_FFI_CallFrame* frame);
}

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jax_fp4_quantize"] = capsule(&jax_fp4_cuda_quantize);
  targets["jax_fp4_quantize_transpose"] = capsule(&jax_fp4_cuda_quantize_transpose);
  targets["jax_fp4_activate"] = capsule(&jax_fp4_cuda_activate);
  targets["jax_fp4_activate_quantize"] = capsule(&jax_fp4_cuda_activate_quantize);
  targets["jax_fp4_activate_quantize_transpose"] =
      capsule(&jax_fp4_cuda_activate_quantize_transpose);
  targets["jax_fp4_amax"] = capsule(&jax_fp4_cuda_amax);
  targets["jax_fp4_dequantize"] = capsule(&jax_fp4_cuda_dequantize);
  targets["jax_fp4_quantize_float8"] = capsule(&jax_fp4_cuda_quantize_float8);
  targets["jax_fp4_quantize_transpose_float8"] = capsule(&jax_fp4_cuda_quantize_transpose_float8);
  targets["jax_fp4_grouped_matmul"] = capsule(&jax_fp4_cuda_grouped_matmul);
  targets["jax_fp4_grouped_matmul_bf16"] = capsule(&jax_fp4_cuda_grouped_matmul_bf16);
  targets["jax_fp4_grouped_contraction"] = capsule(&jax_fp4_cuda_grouped_contraction);
  return targets;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.def("registrations", &registrations, "FFI target name -> handler, for platform CUDA.");
  module.def(
      "archs", [] { return std::string(JAX_FP4_ARCHS); },
      "The GPU architectures that the kernels were compiled for.");
}
