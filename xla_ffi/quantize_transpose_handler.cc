#include "cpu_handler.h"

namespace jax_fp4 {
namespace {

constexpr const char* kOp = "jax_fp4_quantize_transpose";

ffi::Error quantize_transpose_impl(
    ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer amax_t,
    ffi::AnyBuffer seed, ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> codes,
    ffi::Result<ffi::AnyBuffer> block_scale, ffi::Result<ffi::AnyBuffer> amax_out,
    ffi::Result<ffi::AnyBuffer> codes_t, ffi::Result<ffi::AnyBuffer> block_scale_t,
    ffi::Result<ffi::AnyBuffer> amax_t_out, const QuantizeAttributes& attributes) {
  Checks checks(kOp);
  const QuantizeOperands operands = check_operands(checks, x, &seed, group_sizes, attributes);
  if (!checks.ok()) return checks.error();
  QuantizeCall call = cpu_call(operands, attributes);
  add_form(
      checks, call,
      check_form(checks, operands, attributes, true, "", amax, *codes, *block_scale, *amax_out),
      true, "");
  add_form(checks, call,
           check_form(checks, operands, attributes, false, "_t", amax_t, *codes_t, *block_scale_t,
                      *amax_t_out),
           false, "_t");
  return checks.ok() ? run_quantize(kOp, pool, call) : checks.error();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_quantize_transpose, jax_fp4::quantize_transpose_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Arg<xla::ffi::AnyBuffer>()  // amax_t
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // codes_t
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale_t
                                  .Ret<xla::ffi::AnyBuffer>()  // amax_t
                                  .Attrs<jax_fp4::QuantizeAttributes>());
