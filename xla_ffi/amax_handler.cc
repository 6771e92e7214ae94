#include "cpu_handler.h"

namespace jax_fp4 {
namespace {

constexpr const char* kOp = "jax_fp4_amax";

ffi::Error amax_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer group_sizes,
                     ffi::Result<ffi::AnyBuffer> row, ffi::Result<ffi::AnyBuffer> column,
                     const AmaxAttributes& attributes) {
  Checks checks(kOp);
  const QuantizeAttributes of_quantize = quantize_attributes(attributes);
  const QuantizeOperands operands = check_operands(checks, x, nullptr, group_sizes, of_quantize);
  if (!checks.ok()) return checks.error();
  QuantizeCall call = cpu_call(operands, of_quantize);
  for (const bool along_k : {true, false}) {
    StoredForm& form = along_k ? call.entry.row : call.entry.column;
    form.amax = check_amax(checks, operands, attributes, along_k, along_k ? *row : *column);
    form.wanted = form.amax != nullptr && operands.batch > 0;
    form.hadamard = attributes.hadamard && !along_k;
  }
  return checks.ok() ? run_amax(kOp, pool, call) : checks.error();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_amax, jax_fp4::amax_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // amax_t
                                  .Attrs<jax_fp4::AmaxAttributes>());
