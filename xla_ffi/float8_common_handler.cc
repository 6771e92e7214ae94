#include "float8_common_handler.h"

#include <cmath>

#include "kernels/float8.h"

namespace jax_fp4 {

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

namespace {

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

// The given amax or scale of each matrix, null where none is given.
const float* check_given(Checks& checks, const char* name, const ffi::AnyBuffer& buffer,
                         ffi::Span<const int64_t> batch, bool given,
                         const std::vector<int64_t>& matrices) {
  checks.shape(name, buffer, ffi::DataType::F32, batch, given ? matrices : std::vector<int64_t>{0});
  return given && checks.ok() ? static_cast<const float*>(buffer.untyped_data()) : nullptr;
}

}  // namespace

Float8Operands check_float8(Checks& checks, const Float8Buffers& b, const Float8Attributes& a) {
  Float8Operands o = {};
  check_attributes(checks, a);
  o.x_dtype = checks.dtype("x", b.x);
  const auto dimensions = b.x.dimensions();
  checks.require(dimensions.size() >= 2, "x has rank below 2; needs [*B, m, k]");
  if (!checks.ok()) return o;
  const auto batch = o.batch_shape = dimensions.first(dimensions.size() - 2);
  o.batch = product(batch);
  o.m = dimensions[dimensions.size() - 2];
  o.k = dimensions[dimensions.size() - 1];
  o.x = b.x.untyped_data();
  o.compute = static_cast<DType>(a.compute);
  o.scaling = static_cast<Float8Scaling>(a.scaling);
  o.codes = static_cast<Float8Codes>(a.codes);
  o.groups = a.grouped ? last_extent(b.group_sizes) : 1;
  checks.shape("group_sizes", b.group_sizes, ffi::DataType::S32, batch, {a.grouped ? o.groups : 0});
  o.group_sizes = static_cast<const int32_t*>(b.group_sizes.untyped_data());
  const auto matrices = a.grouped ? std::vector<int64_t>{o.groups} : std::vector<int64_t>{};
  o.given_amax = check_given(checks, "amax", b.amax, batch, a.given_amax, matrices);
  o.given_scale = check_given(checks, "scale", b.scale, batch, a.given_scale, matrices);
  return o;
}

Float8FormBuffers check_float8_form(Checks& checks, const Float8Operands& o,
                                    const Float8Attributes& a, bool along_k, const char* suffix,
                                    const Float8Results& results) {
  Float8FormBuffers form = {};
  if (!checks.ok()) return form;
  const int64_t block = float8_block(o.scaling), length = along_k ? o.k : o.m;
  form.rows = along_k ? o.m : o.k;
  form.blocks =
      a.grouped && !along_k ? (o.m + (block - 1) * o.groups) / block : ceil_div(length, block);
  form.extent = form.blocks * block;
  const auto named = [suffix](const char* name) { return std::string(name) + suffix; };
  const bool tensor = o.scaling == Float8Scaling::kTensor;
  std::vector<int64_t> scales = scale_tail(o.scaling, a.tile, form.rows, form.extent);
  if (tensor && a.grouped) scales.push_back(o.groups);
  checks.shape(named("codes").c_str(), results.codes, code_type(o.codes), o.batch_shape,
               {form.rows, form.extent});
  checks.shape(named("block_scale").c_str(), results.scale, scale_type(o.scaling), o.batch_shape,
               scales);
  checks.shape(named("result amax").c_str(), results.amax, ffi::DataType::F32, o.batch_shape,
               tensor ? scales : std::vector<int64_t>{0});
  form.codes = static_cast<uint8_t*>(results.codes.untyped_data());
  form.scale = results.scale.untyped_data();
  form.amax = static_cast<float*>(results.amax.untyped_data());
  return form;
}

}  // namespace jax_fp4
