#include "common_handler.h"
#include "cpu/dispatch.h"
#include "cpu/quantize.h"
#include "kernels/nvfp4.h"

namespace jax_fp4 {
namespace {

ffi::Error dequantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer block_scale,
                           ffi::AnyBuffer amax, ffi::Result<ffi::AnyBuffer> out, int32_t bound,
                           bool row_scaled, bool product_form) {
  Checks checks("jax_fp4_dequantize");
  DequantizeProblem problem = {};
  problem.out_dtype = checks.dtype("out", *out);
  const auto stored = block_scale.dimensions(), values = out->dimensions();
  checks.require(stored.size() >= 2, "block_scale has rank below 2; needs [*B, r, blocks]");
  checks.require(values.size() >= 2, "out has rank below 2; needs [*B, r, extent]");
  checks.require(bound == 256 || bound == 448, "attribute bound is not 256 or 448");
  if (!checks.ok()) return checks.error();
  const auto batch = stored.first(stored.size() - 2);
  const int64_t rows = stored[stored.size() - 2], blocks = stored[stored.size() - 1];
  const int64_t extent = values[values.size() - 1];
  checks.shape("block_scale", block_scale, ffi::DataType::F8E4M3FN, batch, {rows, blocks});
  checks.shape("codes", codes, ffi::DataType::U8, batch, {rows, blocks * kBlockCodeBytes});
  checks.shape("out", *out, out->element_type(), batch, {rows, extent});
  checks.require(extent <= blocks * kBlock, "out is wider than the codes");
  if (product_form)
    checks.shape("amax", amax, ffi::DataType::F32, batch, {0});
  else if (row_scaled)
    checks.shape("amax", amax, ffi::DataType::F32, batch, {rows});
  else
    checks.shape("amax", amax, ffi::DataType::F32, batch, {});
  if (!checks.ok()) return checks.error();

  problem.codes = static_cast<const uint8_t*>(codes.untyped_data());
  problem.block_scale = static_cast<const uint8_t*>(block_scale.untyped_data());
  problem.amax = product_form ? nullptr : static_cast<const float*>(amax.untyped_data());
  problem.row_scaled = row_scaled;
  problem.bound = bound;
  problem.batch = 1;
  for (const int64_t size : batch) problem.batch *= size;
  problem.rows = rows;
  problem.blocks = blocks;
  problem.extent = extent;
  problem.out = out->untyped_data();
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
