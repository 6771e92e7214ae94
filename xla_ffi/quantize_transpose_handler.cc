#include "common_handler.h"
#include "cpu/dispatch.h"
#include "cpu/quantize.h"

namespace jax_fp4 {
namespace {

ffi::Error quantize_transpose_impl(
    ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer amax_t,
    ffi::AnyBuffer seed, ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> block_scale,
    ffi::Result<ffi::AnyBuffer> amax_out, ffi::Result<ffi::AnyBuffer> codes_t,
    ffi::Result<ffi::AnyBuffer> block_scale_t, ffi::Result<ffi::AnyBuffer> amax_t_out,
    const QuantizeAttributes& attributes) {
  Checks checks("jax_fp4_quantize_transpose");
  ffi::Span<const int64_t> batch;
  QuantizeProblem problem = quantize_problem(checks, x, seed, attributes, batch);
  if (!checks.ok()) return checks.error();
  problem.row = stored_form(checks, problem, attributes, batch, true, "", amax, *codes,
                            *block_scale, *amax_out);
  problem.column = stored_form(checks, problem, attributes, batch, false, "_t", amax_t, *codes_t,
                               *block_scale_t, *amax_t_out);
  if (!checks.ok()) return checks.error();

  GivenAmax given = {};
  if (attributes.given_amax)
    given = {static_cast<const float*>(amax.untyped_data()),
             static_cast<const float*>(amax_t.untyped_data())};
  PoolExecutor<ffi::ThreadPool> executor(pool);
  quantize(kernels(), executor, problem, given);
  return ffi::Error::Success();
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
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // codes_t
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale_t
                                  .Ret<xla::ffi::AnyBuffer>()  // amax_t
                                  .Attrs<jax_fp4::QuantizeAttributes>());
