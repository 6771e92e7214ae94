#include "common_handler.h"
#include "cpu/dispatch.h"
#include "cpu/quantize.h"

namespace jax_fp4 {
namespace {

ffi::Error dequantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer block_scale,
                           ffi::AnyBuffer amax, ffi::Result<ffi::AnyBuffer> out, int32_t bound,
                           bool row_scaled, bool product_form) {
  Checks checks("jax_fp4_dequantize");
  const DequantizeProblem problem =
      check_dequantize(checks, codes, block_scale, amax, *out, bound, row_scaled, product_form);
  if (!checks.ok()) return checks.error();
  PoolExecutor<ffi::ThreadPool> executor(pool);
  dequantize(kernels(), executor, problem);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_dequantize, jax_fp4::dequantize_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // block_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Attr<int32_t>("bound")
                                  .Attr<bool>("row_scaled")
                                  .Attr<bool>("product_form"));
