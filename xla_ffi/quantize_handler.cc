#include "common_handler.h"
#include "cpu/dispatch.h"
#include "cpu/quantize.h"

namespace jax_fp4 {
namespace {

ffi::Error quantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax,
                         ffi::AnyBuffer seed, ffi::Result<ffi::AnyBuffer> codes,
                         ffi::Result<ffi::AnyBuffer> block_scale,
                         ffi::Result<ffi::AnyBuffer> amax_out,
                         const AxisQuantizeAttributes& attributes) {
  Checks checks("jax_fp4_quantize");
  checks.require(attributes.axis == -1 || attributes.axis == 0, "attribute axis is not -1 or 0");
  checks.require(!(attributes.hadamard && attributes.axis == -1), "hadamard needs axis 0");
  ffi::Span<const int64_t> batch;
  QuantizeProblem problem = quantize_problem(checks, x, seed, attributes, batch);
  if (!checks.ok()) return checks.error();
  const bool along_k = attributes.axis == -1;
  StoredForm& form = along_k ? problem.row : problem.column;
  form = stored_form(checks, problem, attributes, batch, along_k, "", amax, *codes, *block_scale,
                     *amax_out);
  if (!checks.ok()) return checks.error();

  const float* given =
      attributes.given_amax ? static_cast<const float*>(amax.untyped_data()) : nullptr;
  PoolExecutor<ffi::ThreadPool> executor(pool);
  quantize(kernels(), executor, problem, {given, given});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_quantize, jax_fp4::quantize_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Attrs<jax_fp4::AxisQuantizeAttributes>());
