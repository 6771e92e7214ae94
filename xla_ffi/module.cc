// The Python module `jax_fp4._cpu`: the handlers under the names of their targets.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cpu/dispatch.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

extern "C" {  // each in the *_handler.cc of its name, those of the 8-bit formats in one
XLA_FFI_Error* jax_fp4_quantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_quantize_transpose(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_amax(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_dequantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_quantize_float8(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_quantize_transpose_float8(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jax_fp4_dequantize_float8(XLA_FFI_CallFrame* frame);
}

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jax_fp4_quantize"] = capsule(&jax_fp4_quantize);
  targets["jax_fp4_quantize_transpose"] = capsule(&jax_fp4_quantize_transpose);
  targets["jax_fp4_amax"] = capsule(&jax_fp4_amax);
  targets["jax_fp4_dequantize"] = capsule(&jax_fp4_dequantize);
  targets["jax_fp4_quantize_float8"] = capsule(&jax_fp4_quantize_float8);
  targets["jax_fp4_quantize_transpose_float8"] = capsule(&jax_fp4_quantize_transpose_float8);
  targets["jax_fp4_dequantize_float8"] = capsule(&jax_fp4_dequantize_float8);
  return targets;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("registrations", &registrations, "FFI target name -> handler, for platform cpu.");
  module.def(
      "isa", [] { return std::string(jax_fp4::kernels().isa); },
      "Name of the instruction set that the kernels use on this machine.");
}
