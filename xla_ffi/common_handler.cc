#include "common_handler.h"

#include <new>

#include "cpu/dispatch.h"
#include "kernels/nvfp4.h"

namespace jax_fp4 {
namespace {

std::string shape_text(const int64_t* dimensions, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ",") + std::to_string(dimensions[i]);
  return text + "]";
}

int64_t last_extent(const ffi::AnyBuffer& buffer) {
  const auto dimensions = buffer.dimensions();
  return dimensions.size() == 0 ? 0 : dimensions[dimensions.size() - 1];
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

}  // namespace

ffi::Error Checks::error() const { return ffi::Error::InvalidArgument(text_); }

void Checks::require(bool condition, const std::string& what) {
  if (!condition && ok()) text_ = std::string(op_) + ": " + what;
}

void Checks::shape(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                   ffi::Span<const int64_t> batch, const std::vector<int64_t>& tail) {
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

QuantizeCall quantize_call(Checks& checks, const ffi::AnyBuffer& x, const ffi::AnyBuffer& seed,
                           const ffi::AnyBuffer& group_sizes, const QuantizeAttributes& a,
                           ffi::Span<const int64_t>& batch) {
  QuantizeCall call = {};
  QuantizeProblem& p = call.entry;
  p.x = x.untyped_data();
  p.x_dtype = checks.dtype("x", x);
  const auto dimensions = x.dimensions();
  checks.require(dimensions.size() >= 2, "x has rank below 2; needs [*B, m, k]");
  checks.require(a.compute >= 0 && a.compute <= 2, "attribute compute is not 0, 1 or 2");
  checks.require(a.tile == 1 || a.tile == kBlock, "attribute tile is not 1 or 16");
  checks.require(a.four_over_six >= 0 && a.four_over_six <= 2,
                 "attribute four_over_six is not 0, 1 or 2");
  checks.require(a.bound == 256 || a.bound == 448, "attribute bound is not 256 or 448");
  if (!checks.ok()) return call;
  batch = dimensions.first(dimensions.size() - 2);
  call.batch = 1;
  for (const int64_t extent : batch) call.batch *= extent;
  p.m = dimensions[dimensions.size() - 2];
  p.k = dimensions[dimensions.size() - 1];
  p.m_total = a.m_total < 0 ? p.m : a.m_total;
  p.k_total = a.k_total < 0 ? p.k : a.k_total;
  p.compute = static_cast<DType>(a.compute);
  p.tile = a.tile;
  p.row_scaled = a.row_scaled;

  const bool stochastic = last_extent(seed) != 0;
  checks.shape("seed", seed, ffi::DataType::U32, batch, {stochastic ? 4 : 0});
  call.seed = stochastic ? static_cast<const uint32_t*>(seed.untyped_data()) : nullptr;

  call.grouped = a.grouped;
  call.groups = a.grouped ? last_extent(group_sizes) : 1;
  checks.shape("group_sizes", group_sizes, ffi::DataType::S32, batch,
               {a.grouped ? call.groups : 0});
  call.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  refuse_exclusions(checks, a, stochastic);
  return call;
}

void add_stored_form(Checks& checks, QuantizeCall& call, const QuantizeAttributes& a,
                     ffi::Span<const int64_t> batch, bool along_k, const char* suffix,
                     const ffi::AnyBuffer& given, ffi::AnyBuffer codes, ffi::AnyBuffer block_scale,
                     ffi::AnyBuffer amax) {
  const QuantizeProblem& p = call.entry;
  const int64_t rows = along_k ? p.m : p.k;
  const int64_t blocks = along_k     ? ceil_div(p.k, kBlock)
                         : a.grouped ? grouped_blocks(p.m, call.groups)
                                     : ceil_div(p.m, kBlock);
  const auto named = [suffix](const char* name) { return std::string(name) + suffix; };
  std::vector<int64_t> amax_tail;  // one value a matrix, or one a stored row of it
  if (a.grouped && !(a.row_scaled && along_k)) amax_tail.push_back(call.groups);
  if (a.row_scaled) amax_tail.push_back(rows);
  checks.shape(named("amax").c_str(), given, ffi::DataType::F32, batch,
               a.given_amax ? amax_tail : std::vector<int64_t>{0});
  if (a.given_amax) checks.not_negative(named("amax").c_str(), given);
  checks.shape(named("codes").c_str(), codes, ffi::DataType::U8, batch,
               {rows, blocks * kBlockCodeBytes});
  checks.shape(named("block_scale").c_str(), block_scale, ffi::DataType::F8E4M3FN, batch,
               {rows, blocks});
  checks.shape(named("result amax").c_str(), amax, ffi::DataType::F32, batch, amax_tail);

  StoredForm& form = along_k ? call.entry.row : call.entry.column;
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
  if (a.given_amax)
    (along_k ? call.given_row_amax : call.given_column_amax) =
        static_cast<const float*>(given.untyped_data());
}

ffi::Error run_quantize(const char* op, ffi::ThreadPool pool, const QuantizeCall& call) {
  try {
    PoolExecutor<ffi::ThreadPool> executor(pool);
    quantize(kernels(), executor, call);
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(op) + ": no memory for the table of groups");
  }
}

}  // namespace jax_fp4
