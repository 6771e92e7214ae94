#include "cpu_handler.h"

namespace jax_fp4 {
namespace {

constexpr const char* kOp = "jax_fp4_quantize";

ffi::Error quantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax,
                         ffi::AnyBuffer seed, ffi::AnyBuffer group_sizes,
                         ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> block_scale,
                         ffi::Result<ffi::AnyBuffer> amax_out,
                         const AxisQuantizeAttributes& attributes) {
  Checks checks(kOp);
  checks.require(attributes.axis == -1 || attributes.axis == 0, "attribute axis is not -1 or 0");
  checks.require(!(attributes.hadamard && attributes.axis == -1), "hadamard needs axis 0");
  const QuantizeOperands operands = check_operands(checks, x, &seed, group_sizes, attributes);
  if (!checks.ok()) return checks.error();
  const bool along_k = attributes.axis == -1;
  QuantizeCall call = cpu_call(operands, attributes);
  add_form(
      checks, call,
      check_form(checks, operands, attributes, along_k, "", amax, *codes, *block_scale, *amax_out),
      along_k, "");
  return checks.ok() ? run_quantize(kOp, pool, call) : checks.error();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_quantize, jax_fp4::quantize_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Attrs<jax_fp4::AxisQuantizeAttributes>());
