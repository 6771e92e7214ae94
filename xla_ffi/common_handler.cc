#include "common_handler.h"

#include <vector>

#include "kernels/nvfp4.h"

namespace jax_fp4 {
namespace {

std::string shape_text(const int64_t* dimensions, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ",") + std::to_string(dimensions[i]);
  return text + "]";
}

}  // namespace

ffi::Error Checks::error() const { return ffi::Error::InvalidArgument(text_); }

void Checks::require(bool condition, const std::string& what) {
  if (!condition && ok()) text_ = std::string(op_) + ": " + what;
}

void Checks::shape(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                   ffi::Span<const int64_t> batch, std::initializer_list<int64_t> tail) {
  const auto dimensions = buffer.dimensions();
  std::vector<int64_t> needed(batch.begin(), batch.end());
  needed.insert(needed.end(), tail.begin(), tail.end());
  const bool same = std::vector<int64_t>(dimensions.begin(), dimensions.end()) == needed;
  require(same, std::string(name) + " is " + shape_text(dimensions.begin(), dimensions.size()) +
                    "; needs " + shape_text(needed.data(), needed.size()));
  require(buffer.element_type() == dtype, std::string(name) + " has another element type");
}

void Checks::not_negative(const char* name, const ffi::AnyBuffer& amax) {
  if (!ok()) return;
  const float* values = static_cast<const float*>(amax.untyped_data());
  bool negative = false;
  for (size_t i = 0; i < amax.element_count(); ++i) {
    const uint32_t bits = Lanes<float>::bits(values[i]), magnitude = bits & kMagnitude;
    negative |= bits != magnitude && magnitude != 0 && magnitude <= kInfBits;
  }
  require(!negative, std::string(name) +
                         " has a negative element; needs values >= 0 because it is an absolute "
                         "maximum. Try jnp.abs(amax).");
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

QuantizeProblem quantize_problem(Checks& checks, const ffi::AnyBuffer& x,
                                 const ffi::AnyBuffer& seed, const QuantizeAttributes& a,
                                 ffi::Span<const int64_t>& batch) {
  QuantizeProblem p = {};
  p.x = x.untyped_data();
  p.x_dtype = checks.dtype("x", x);
  const auto dimensions = x.dimensions();
  checks.require(dimensions.size() >= 2, "x has rank below 2; needs [*B, m, k]");
  checks.require(a.compute >= 0 && a.compute <= 2, "attribute compute is not 0, 1 or 2");
  checks.require(a.tile == 1 || a.tile == kBlock, "attribute tile is not 1 or 16");
  checks.require(a.four_over_six >= 0 && a.four_over_six <= 2,
                 "attribute four_over_six is not 0, 1 or 2");
  checks.require(a.bound == 256 || a.bound == 448, "attribute bound is not 256 or 448");
  if (!checks.ok()) return p;
  batch = dimensions.first(dimensions.size() - 2);
  p.batch = 1;
  for (const int64_t extent : batch) p.batch *= extent;
  p.m = dimensions[dimensions.size() - 2];
  p.k = dimensions[dimensions.size() - 1];
  p.m_total = a.m_total < 0 ? p.m : a.m_total;
  p.k_total = a.k_total < 0 ? p.k : a.k_total;
  p.compute = static_cast<DType>(a.compute);
  p.tile = a.tile;
  p.row_scaled = a.row_scaled;

  const auto words = seed.dimensions();
  const bool stochastic = words.size() > 0 && words[words.size() - 1] != 0;
  checks.shape("seed", seed, ffi::DataType::U32, batch, {stochastic ? 4 : 0});
  p.seed = stochastic ? static_cast<const uint32_t*>(seed.untyped_data()) : nullptr;

  // numerics.md 1.4, 1.6 and 1.8: what is not defined is refused here too.
  const bool tiled = a.tile != 1, four_over_six = a.four_over_six != 0;
  checks.require(!(a.row_scaled && (a.hadamard || tiled || stochastic)),
                 "row_scaled excludes hadamard, tile 16 and a seed");
  checks.require(!(four_over_six && (a.hadamard || stochastic)),
                 "four_over_six excludes hadamard and a seed");
  return p;
}

StoredForm stored_form(Checks& checks, const QuantizeProblem& p, const QuantizeAttributes& a,
                       ffi::Span<const int64_t> batch, bool along_k, const char* suffix,
                       const ffi::AnyBuffer& given, ffi::AnyBuffer codes,
                       ffi::AnyBuffer block_scale, ffi::AnyBuffer amax) {
  const int64_t rows = along_k ? p.m : p.k, blocks = ceil_div(along_k ? p.k : p.m, kBlock);
  const auto named = [suffix](const char* name) { return std::string(name) + suffix; };
  const auto amax_shape = [&](const std::string& name, const ffi::AnyBuffer& buffer) {
    if (a.row_scaled)
      checks.shape(name.c_str(), buffer, ffi::DataType::F32, batch, {rows});
    else
      checks.shape(name.c_str(), buffer, ffi::DataType::F32, batch, {});
  };
  if (a.given_amax) {
    amax_shape(named("amax"), given);
    checks.not_negative(named("amax").c_str(), given);
  } else {
    checks.shape(named("amax").c_str(), given, ffi::DataType::F32, batch, {0});
  }
  checks.shape(named("codes").c_str(), codes, ffi::DataType::U8, batch,
               {rows, blocks * kBlockCodeBytes});
  checks.shape(named("block_scale").c_str(), block_scale, ffi::DataType::F8E4M3FN, batch,
               {rows, blocks});
  amax_shape(named("result amax"), amax);

  StoredForm form = {};
  form.wanted = true;
  form.rows = rows;
  form.blocks = blocks;
  form.hadamard = a.hadamard && !along_k;
  // The column-wise copy of a row-scaled tensor is made without four-over-six (numerics.md 1.4).
  const bool plain = a.row_scaled && !along_k;
  form.four_over_six = plain ? ErrorNorm::kNone : static_cast<ErrorNorm>(a.four_over_six);
  form.bound = plain ? 448 : a.bound;
  form.codes = static_cast<uint8_t*>(codes.untyped_data());
  form.block_scale = static_cast<uint8_t*>(block_scale.untyped_data());
  form.amax = static_cast<float*>(amax.untyped_data());
  return form;
}

}  // namespace jax_fp4
