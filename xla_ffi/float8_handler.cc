// quantize, quantize_transpose and dequantize of the 8-bit formats. All bind the same operands and
// results: what a format does not have has no elements.
#include <cmath>
#include <new>

#include "cpu/dispatch.h"
#include "cpu/float8.h"
#include "cpu_handler.h"
#include "kernels/float8.h"

namespace jax_fp4 {

// As they arrive.
struct Float8Attributes {
  int32_t scaling, codes, tile, compute;
  bool power_of_two;
  float eps;
  bool given_amax, given_scale, grouped;
};

struct AxisFloat8Attributes : Float8Attributes {
  int32_t axis;
};

namespace {

ffi::DataType code_type(Float8Codes codes) {
  return codes == Float8Codes::kE4M3 ? ffi::DataType::F8E4M3FN : ffi::DataType::F8E5M2;
}

ffi::DataType scale_type(Float8Scaling scaling) {
  return scaling == Float8Scaling::kMxfp8 ? ffi::DataType::F8E8M0FNU : ffi::DataType::F32;
}

void check_scaling(Checks& checks, int32_t scaling, int32_t tile) {
  checks.require(scaling >= 0 && scaling <= 2, "attribute scaling is not 0, 1 or 2");
  if (!checks.ok()) return;
  const int64_t block = float8_block(static_cast<Float8Scaling>(scaling));
  checks.require(tile == 1 || tile == block, "attribute tile is neither 1 nor a block");
}

// The shape of the scales that rows of so many elements have, after the batch dimensions.
std::vector<int64_t> scale_tail(Float8Scaling scaling, int32_t tile, int64_t rows, int64_t extent) {
  switch (scaling) {
    case Float8Scaling::kMxfp8:
      return {rows, extent / float8_block(scaling)};
    case Float8Scaling::kBlock:
      return {ceil_div(rows, tile), extent / float8_block(scaling)};
    case Float8Scaling::kTensor:
      return {};
  }
  return {};
}

struct Operands {
  ffi::AnyBuffer x, amax, scale, group_sizes;
};

struct FormResults {
  ffi::AnyBuffer codes, scale, amax;
};

ffi::Span<const int64_t> batch_shape(const Operands& operands) {
  const auto dimensions = operands.x.dimensions();
  return dimensions.first(dimensions.size() - 2);
}

void check_attributes(Checks& checks, const Float8Attributes& a) {
  check_scaling(checks, a.scaling, a.tile);
  checks.require(a.codes == 0 || a.codes == 1, "attribute codes is not 0 or 1");
  checks.require(a.compute >= 0 && a.compute <= 2, "attribute compute is not 0, 1 or 2");
  checks.require(a.eps >= 0 && std::isfinite(a.eps), "attribute eps is not a finite value >= 0");
  checks.require(!(a.grouped && a.tile != 1), "group_sizes exclude tiles, which are for weights");
  checks.require(!(a.given_amax && a.given_scale), "amax and scale are both given");
  checks.require(a.scaling == 2 || !(a.given_amax || a.given_scale),
                 "amax and scale are for one scale a tensor");
}

// The call without its stored forms.
Float8Call check_call(Checks& checks, const Operands& o, const Float8Attributes& a) {
  Float8Call call = {};
  check_attributes(checks, a);
  Float8Problem& p = call.entry;
  p.x_dtype = checks.dtype("x", o.x);
  const auto dimensions = o.x.dimensions();
  checks.require(dimensions.size() >= 2, "x has rank below 2; needs [*B, m, k]");
  if (!checks.ok()) return call;
  const auto batch = batch_shape(o);
  p.x = o.x.untyped_data();
  p.compute = static_cast<DType>(a.compute);
  p.m = dimensions[dimensions.size() - 2];
  p.k = dimensions[dimensions.size() - 1];
  p.scaling = static_cast<Float8Scaling>(a.scaling);
  p.codes = static_cast<Float8Codes>(a.codes);
  p.tile = a.tile;
  p.power_of_two = a.power_of_two;
  p.eps = a.eps;
  call.batch = product(batch);
  call.grouped = a.grouped;
  call.groups = a.grouped ? last_extent(o.group_sizes) : 1;
  checks.shape("group_sizes", o.group_sizes, ffi::DataType::S32, batch,
               {a.grouped ? call.groups : 0});
  call.group_sizes = static_cast<const int32_t*>(o.group_sizes.untyped_data());

  const std::vector<int64_t> none = {0}, matrices = a.grouped ? std::vector<int64_t>{call.groups}
                                                              : std::vector<int64_t>{};
  checks.shape("amax", o.amax, ffi::DataType::F32, batch, a.given_amax ? matrices : none);
  checks.shape("scale", o.scale, ffi::DataType::F32, batch, a.given_scale ? matrices : none);
  if (!checks.ok()) return call;
  if (a.given_scale) call.given_scale = static_cast<const float*>(o.scale.untyped_data());
  if (a.given_amax) {
    call.given_amax = static_cast<const float*>(o.amax.untyped_data());
    require_not_negative(checks, "amax", call.given_amax, call.batch * call.groups);
  }
  return call;
}

void add_form(Checks& checks, Float8Call& call, const Operands& o, bool along_k, const char* suffix,
              FormResults results) {
  if (!checks.ok()) return;
  Float8Problem& p = call.entry;
  Float8Form& form = along_k ? p.row : p.column;
  const int64_t block = float8_block(p.scaling), length = along_k ? p.k : p.m;
  const auto batch = batch_shape(o);
  form.wanted = true;
  form.rows = along_k ? p.m : p.k;
  form.blocks = call.grouped && !along_k ? (p.m + (block - 1) * call.groups) / block
                                         : ceil_div(length, block);
  form.extent = form.blocks * block;
  const auto named = [suffix](const char* name) { return std::string(name) + suffix; };
  const bool tensor = p.scaling == Float8Scaling::kTensor;
  std::vector<int64_t> scales = scale_tail(p.scaling, p.tile, form.rows, form.extent);
  if (tensor && call.grouped) scales.push_back(call.groups);
  checks.shape(named("codes").c_str(), results.codes, code_type(p.codes), batch,
               {form.rows, form.extent});
  checks.shape(named("block_scale").c_str(), results.scale, scale_type(p.scaling), batch, scales);
  checks.shape(named("result amax").c_str(), results.amax, ffi::DataType::F32, batch,
               tensor ? scales : std::vector<int64_t>{0});
  form.codes = static_cast<uint8_t*>(results.codes.untyped_data());
  form.scale = results.scale.untyped_data();
  (along_k ? call.row_amax : call.column_amax) = static_cast<float*>(results.amax.untyped_data());
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
  const Operands operands = {x, amax, scale, group_sizes};
  Float8Call call = check_call(checks, operands, attributes);
  add_form(checks, call, operands, attributes.axis == -1, "", {*codes, *block_scale, *amax_out});
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
  const Operands operands = {x, amax, scale, group_sizes};
  Float8Call call = check_call(checks, operands, attributes);
  add_form(checks, call, operands, true, "", {*codes, *block_scale, *amax_out});
  add_form(checks, call, operands, false, "_t", {*codes_t, *block_scale_t, *amax_t_out});
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

// The members of Float8Attributes, in their order.
#define JAX_FP4_FLOAT8_ATTRIBUTES                                                                  \
  StructMember<int32_t>("scaling"), StructMember<int32_t>("codes"), StructMember<int32_t>("tile"), \
      StructMember<int32_t>("compute"), StructMember<bool>("power_of_two"),                        \
      StructMember<float>("eps"), StructMember<bool>("given_amax"),                                \
      StructMember<bool>("given_scale"), StructMember<bool>("grouped")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::Float8Attributes, JAX_FP4_FLOAT8_ATTRIBUTES);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::AxisFloat8Attributes, JAX_FP4_FLOAT8_ATTRIBUTES,
                                      StructMember<int32_t>("axis"));

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
