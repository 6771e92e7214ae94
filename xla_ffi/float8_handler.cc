// quantize, quantize_transpose and dequantize of the 8-bit formats, for platform Host.
#include <new>

#include "cpu/dispatch.h"
#include "cpu/float8.h"
#include "cpu_handler.h"
#include "float8_common_handler.h"
#include "kernels/float8.h"

namespace jax_fp4 {

namespace {

// The call without its stored forms.
Float8Call cpu_call(Checks& checks, const Float8Operands& o, const Float8Attributes& a) {
  Float8Call call = {};
  if (!checks.ok()) return call;
  Float8Problem& p = call.entry;
  p.x = o.x;
  p.x_dtype = o.x_dtype;
  p.compute = o.compute;
  p.m = o.m;
  p.k = o.k;
  p.scaling = o.scaling;
  p.codes = o.codes;
  p.tile = a.tile;
  p.power_of_two = a.power_of_two;
  p.eps = a.eps;
  call.batch = o.batch;
  call.grouped = a.grouped;
  call.groups = o.groups;
  call.group_sizes = o.group_sizes;
  call.given_amax = o.given_amax;
  call.given_scale = o.given_scale;
  if (o.given_amax != nullptr)
    require_not_negative(checks, "amax", o.given_amax, o.batch * o.groups);
  return call;
}

void add_form(Checks& checks, Float8Call& call, const Float8Operands& operands,
              const Float8Attributes& a, bool along_k, const char* suffix,
              const Float8Results& results) {
  const Float8FormBuffers from = check_float8_form(checks, operands, a, along_k, suffix, results);
  Float8Form& form = along_k ? call.entry.row : call.entry.column;
  form = {true, from.rows, from.extent, from.blocks, from.codes, from.scale};
  (along_k ? call.row_amax : call.column_amax) = from.amax;
}

ffi::Error run(const char* op, const Checks& checks, ffi::ThreadPool pool, const Float8Call& call) {
  if (!checks.ok()) return checks.error();
  try {
    PoolExecutor<ffi::ThreadPool> executor(pool);
    quantize_float8(kernels(), executor, call);
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return no_memory_for_groups(op);
  }
}

ffi::Error quantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax,
                         ffi::AnyBuffer scale, ffi::AnyBuffer group_sizes,
                         ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> block_scale,
                         ffi::Result<ffi::AnyBuffer> amax_out,
                         const AxisFloat8Attributes& attributes) {
  constexpr const char* kOp = "jax_fp4_quantize_float8";
  Checks checks(kOp);
  checks.require(attributes.axis == -1 || attributes.axis == 0, "attribute axis is not -1 or 0");
  const Float8Operands operands = check_float8(checks, {x, amax, scale, group_sizes}, attributes);
  Float8Call call = cpu_call(checks, operands, attributes);
  add_form(checks, call, operands, attributes, attributes.axis == -1, "",
           {*codes, *block_scale, *amax_out});
  return run(kOp, checks, pool, call);
}

ffi::Error quantize_transpose_impl(
    ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer scale,
    ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> codes,
    ffi::Result<ffi::AnyBuffer> block_scale, ffi::Result<ffi::AnyBuffer> amax_out,
    ffi::Result<ffi::AnyBuffer> codes_t, ffi::Result<ffi::AnyBuffer> block_scale_t,
    ffi::Result<ffi::AnyBuffer> amax_t_out, const Float8Attributes& attributes) {
  constexpr const char* kOp = "jax_fp4_quantize_transpose_float8";
  Checks checks(kOp);
  const Float8Operands operands = check_float8(checks, {x, amax, scale, group_sizes}, attributes);
  Float8Call call = cpu_call(checks, operands, attributes);
  add_form(checks, call, operands, attributes, true, "", {*codes, *block_scale, *amax_out});
  add_form(checks, call, operands, attributes, false, "_t",
           {*codes_t, *block_scale_t, *amax_t_out});
  return run(kOp, checks, pool, call);
}

ffi::Error dequantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer block_scale,
                           ffi::Result<ffi::AnyBuffer> out, int32_t scaling, int32_t tile) {
  Checks checks("jax_fp4_dequantize_float8");
  check_scaling(checks, scaling, tile);
  Float8DequantizeProblem p = {};
  p.out_dtype = checks.dtype("out", *out);
  const auto stored = codes.dimensions(), values = out->dimensions();
  checks.require(stored.size() >= 2, "codes has rank below 2; needs [*B, r, p]");
  checks.require(values.size() >= 2, "out has rank below 2; needs [*B, r, extent]");
  if (!checks.ok()) return checks.error();
  const auto batch = stored.first(stored.size() - 2);
  p.scaling = static_cast<Float8Scaling>(scaling);
  p.code_type =
      codes.element_type() == ffi::DataType::F8E5M2 ? Float8Codes::kE5M2 : Float8Codes::kE4M3;
  p.tile = tile;
  p.batch = product(batch);
  p.rows = stored[stored.size() - 2];
  p.padded = stored[stored.size() - 1];
  p.extent = values[values.size() - 1];
  checks.shape("codes", codes, code_type(p.code_type), batch, {p.rows, p.padded});
  checks.shape("block_scale", block_scale, scale_type(p.scaling), batch,
               scale_tail(p.scaling, tile, p.rows, p.padded));
  checks.shape("out", *out, out->element_type(), batch, {p.rows, p.extent});
  checks.require(p.padded % float8_block(p.scaling) == 0, "codes are no whole blocks");
  checks.require(p.extent <= p.padded, "out is wider than the codes");
  if (!checks.ok()) return checks.error();
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = block_scale.untyped_data();
  p.out = out->untyped_data();
  PoolExecutor<ffi::ThreadPool> executor(pool);
  dequantize_float8(kernels(), executor, p);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_fp4

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_quantize_float8, jax_fp4::quantize_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Attrs<jax_fp4::AxisFloat8Attributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_quantize_transpose_float8, jax_fp4::quantize_transpose_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // amax
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // amax
                                  .Ret<xla::ffi::AnyBuffer>()  // codes_t
                                  .Ret<xla::ffi::AnyBuffer>()  // block_scale_t
                                  .Ret<xla::ffi::AnyBuffer>()  // amax_t
                                  .Attrs<jax_fp4::Float8Attributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_dequantize_float8, jax_fp4::dequantize_impl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // block_scale
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Attr<int32_t>("scaling")
                                  .Attr<int32_t>("tile"));
