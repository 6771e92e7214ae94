#include "common_handler.h"

#include "kernels/nvfp4.h"

namespace jax_fp4 {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t extent : shape) text += (text == "[" ? "" : ",") + std::to_string(extent);
  return text + "]";
}

std::vector<int64_t> with_tail(ffi::Span<const int64_t> batch, const std::vector<int64_t>& tail) {
  std::vector<int64_t> shape(batch.begin(), batch.end());
  shape.insert(shape.end(), tail.begin(), tail.end());
  return shape;
}

// numerics.md 1.4, 1.6 and 1.8: what is not defined is refused here too.
void refuse_exclusions(Checks& checks, const QuantizeAttributes& a, bool stochastic) {
  const bool tiled = a.tile != 1, four_over_six = a.four_over_six != 0;
  checks.require(!(a.row_scaled && (a.hadamard || tiled || stochastic)),
                 "row_scaled excludes hadamard, tile 16 and a seed");
  checks.require(!(four_over_six && (a.hadamard || stochastic)),
                 "four_over_six excludes hadamard and a seed");
  checks.require(!(a.grouped && tiled), "group_sizes exclude tile 16, which is for weights");
}

// One value a matrix, or one a stored row of it.
std::vector<int64_t> amax_tail(const QuantizeOperands& o, const QuantizeAttributes& a,
                               bool along_k) {
  std::vector<int64_t> tail;
  if (a.grouped && !(a.row_scaled && along_k)) tail.push_back(o.groups);
  if (a.row_scaled) tail.push_back(along_k ? o.m : o.k);
  return tail;
}

}  // namespace

int64_t product(ffi::Span<const int64_t> extents) {
  int64_t result = 1;
  for (const int64_t extent : extents) result *= extent;
  return result;
}

int64_t last_extent(const ffi::AnyBuffer& buffer) {
  const auto dimensions = buffer.dimensions();
  return dimensions.size() == 0 ? 0 : dimensions[dimensions.size() - 1];
}

ffi::Error Checks::error() const { return ffi::Error::InvalidArgument(text_); }

void Checks::require(bool condition, const std::string& what) {
  if (!condition && ok()) text_ = std::string(op_) + ": " + what;
}

void Checks::shape(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                   ffi::Span<const int64_t> batch, const std::vector<int64_t>& tail,
                   const std::vector<int64_t>* other) {
  const std::vector<int64_t> given = with_tail(buffer.dimensions(), {});
  const std::vector<int64_t> first = with_tail(batch, tail);
  bool same = given == first;
  std::string needed = shape_text(first);
  if (other != nullptr) {
    const std::vector<int64_t> second = with_tail(batch, *other);
    same = same || given == second;
    needed += " or " + shape_text(second);
  }
  require(same, std::string(name) + " is " + shape_text(given) + "; needs " + needed);
  require(buffer.element_type() == dtype, std::string(name) + " has another element type");
}

DType Checks::dtype(const char* name, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    default:  // an open set that is not ours: everything else is refused
      require(false, std::string(name) + " must be float32, bfloat16 or float16");
      return DType::kF32;
  }
}

QuantizeOperands check_operands(Checks& checks, const ffi::AnyBuffer& x, const ffi::AnyBuffer* seed,
                                const ffi::AnyBuffer& group_sizes, const QuantizeAttributes& a) {
  QuantizeOperands o = {};
  o.x = x.untyped_data();
  o.x_dtype = checks.dtype("x", x);
  const auto dimensions = x.dimensions();
  checks.require(dimensions.size() >= 2, "x has rank below 2; needs [*B, m, k]");
  checks.require(a.compute >= 0 && a.compute <= 2, "attribute compute is not 0, 1 or 2");
  checks.require(a.tile == 1 || a.tile == kBlock, "attribute tile is not 1 or 16");
  checks.require(a.four_over_six >= 0 && a.four_over_six <= 2,
                 "attribute four_over_six is not 0, 1 or 2");
  checks.require(a.bound == 256 || a.bound == 448, "attribute bound is not 256 or 448");
  if (!checks.ok()) return o;
  o.batch_shape = dimensions.first(dimensions.size() - 2);
  o.batch = product(o.batch_shape);
  o.m = dimensions[dimensions.size() - 2];
  o.k = dimensions[dimensions.size() - 1];
  o.m_total = a.m_total < 0 ? o.m : a.m_total;
  o.k_total = a.k_total < 0 ? o.k : a.k_total;
  o.compute = static_cast<DType>(a.compute);

  o.groups = a.grouped ? last_extent(group_sizes) : 1;
  const bool stochastic = seed != nullptr && last_extent(*seed) != 0;
  const std::vector<int64_t> split = {seed_words(true, o.groups)};
  if (seed != nullptr)
    checks.shape("seed", *seed, ffi::DataType::U32, o.batch_shape, {stochastic ? kSeedWords : 0},
                 stochastic && a.grouped && o.groups > 0 ? &split : nullptr);
  o.seed = stochastic ? static_cast<const uint32_t*>(seed->untyped_data()) : nullptr;
  o.split_groups = stochastic && last_extent(*seed) != kSeedWords;

  checks.shape("group_sizes", group_sizes, ffi::DataType::S32, o.batch_shape,
               {a.grouped ? o.groups : 0});
  o.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  refuse_exclusions(checks, a, stochastic);
  return o;
}

QuantizeAttributes quantize_attributes(const AmaxAttributes& a) {
  QuantizeAttributes of = {};  // no amax depends on tile, bound and totals: any legal ones
  of.tile = 1;
  of.row_scaled = a.row_scaled;
  of.hadamard = a.hadamard;
  of.bound = 448;
  of.compute = a.compute;
  of.m_total = of.k_total = -1;
  of.grouped = a.grouped;
  return of;
}

float* check_amax(Checks& checks, const QuantizeOperands& operands, const AmaxAttributes& a,
                  bool along_k, ffi::AnyBuffer amax) {
  const bool wanted = along_k ? a.row : a.column;
  checks.shape(
      along_k ? "result amax" : "result amax_t", amax, ffi::DataType::F32, operands.batch_shape,
      wanted ? amax_tail(operands, quantize_attributes(a), along_k) : std::vector<int64_t>{0});
  return wanted ? static_cast<float*>(amax.untyped_data()) : nullptr;
}

int64_t stored_blocks(const QuantizeOperands& o, const QuantizeAttributes& a, bool along_k) {
  if (along_k) return ceil_div(o.k, kBlock);
  return a.grouped ? grouped_blocks(o.m, o.groups) : ceil_div(o.m, kBlock);
}

FormBuffers check_form(Checks& checks, const QuantizeOperands& o, const QuantizeAttributes& a,
                       bool along_k, const char* suffix, const ffi::AnyBuffer& given,
                       ffi::AnyBuffer codes, ffi::AnyBuffer block_scale, ffi::AnyBuffer amax) {
  FormBuffers form = {};
  form.rows = along_k ? o.m : o.k;
  form.blocks = stored_blocks(o, a, along_k);
  const auto named = [suffix](const char* name) { return std::string(name) + suffix; };
  const std::vector<int64_t> tail = amax_tail(o, a, along_k);
  checks.shape(named("amax").c_str(), given, ffi::DataType::F32, o.batch_shape,
               a.given_amax ? tail : std::vector<int64_t>{0});
  checks.shape(named("codes").c_str(), codes, ffi::DataType::U8, o.batch_shape,
               {form.rows, form.blocks * kBlockCodeBytes});
  checks.shape(named("block_scale").c_str(), block_scale, ffi::DataType::F8E4M3FN, o.batch_shape,
               {form.rows, form.blocks});
  checks.shape(named("result amax").c_str(), amax, ffi::DataType::F32, o.batch_shape, tail);

  form.hadamard = a.hadamard && !along_k;
  // The column-wise copy of a row-scaled tensor is made without four-over-six (numerics.md 1.4).
  const bool plain = a.row_scaled && !along_k;
  form.four_over_six = plain ? ErrorNorm::kNone : static_cast<ErrorNorm>(a.four_over_six);
  form.bound = plain ? 448 : a.bound;
  form.codes = static_cast<uint8_t*>(codes.untyped_data());
  form.block_scale = static_cast<uint8_t*>(block_scale.untyped_data());
  form.amax = static_cast<float*>(amax.untyped_data());
  form.given_amax = a.given_amax ? static_cast<const float*>(given.untyped_data()) : nullptr;
  return form;
}

DequantizeProblem check_dequantize(Checks& checks, const ffi::AnyBuffer& codes,
                                   const ffi::AnyBuffer& block_scale, const ffi::AnyBuffer& amax,
                                   ffi::AnyBuffer out, int32_t bound, bool row_scaled,
                                   bool product_form, bool interleaved) {
  DequantizeProblem o = {};
  o.bound = bound;
  o.row_scaled = row_scaled;
  o.out_dtype = checks.dtype("out", out);
  const auto stored = block_scale.dimensions(), values = out.dimensions();
  checks.require(stored.size() >= 2, "block_scale has rank below 2; needs [*B, r, blocks]");
  checks.require(values.size() >= 2, "out has rank below 2; needs [*B, r, extent]");
  checks.require(bound == 256 || bound == 448, "attribute bound is not 256 or 448");
  if (!checks.ok()) return o;
  const auto batch = stored.first(stored.size() - 2);
  o.batch = product(batch);
  o.rows = stored[stored.size() - 2];
  o.blocks = stored[stored.size() - 1];
  o.extent = values[values.size() - 1];
  checks.shape("block_scale", block_scale, ffi::DataType::F8E4M3FN, batch, {o.rows, o.blocks});
  checks.shape("codes", codes, ffi::DataType::U8, batch, {o.rows, o.blocks * kBlockCodeBytes});
  checks.shape("out", out, out.element_type(), batch, {o.rows, o.extent});
  if (interleaved) {
    checks.require(o.extent == ceil_div(o.blocks, 4) * 64, "out is not whole 64s of the codes");
    checks.require(o.out_dtype == DType::kBF16, "out must be bfloat16 where it is interleaved");
  } else {
    checks.require(o.extent <= o.blocks * kBlock, "out is wider than the codes");
  }
  std::vector<int64_t> amax_tail;
  if (product_form) amax_tail.push_back(0);
  if (!product_form && row_scaled) amax_tail.push_back(o.rows);
  checks.shape("amax", amax, ffi::DataType::F32, batch, amax_tail);
  o.codes = static_cast<const uint8_t*>(codes.untyped_data());
  o.block_scale = static_cast<const uint8_t*>(block_scale.untyped_data());
  o.amax = product_form ? nullptr : static_cast<const float*>(amax.untyped_data());
  o.out = out.untyped_data();
  return o;
}

}  // namespace jax_fp4
