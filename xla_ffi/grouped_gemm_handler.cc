// The products of the module _cuda, for platform CUDA: checks and launch. Their kernels are for
// sm_90a; a program that was lowered without knowing the GPU is refused here on another.
#include "cuda_handler.h"

namespace jax_fp4 {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;

int64_t extent(const AnyBuffer& buffer, size_t axis) {
  const auto dimensions = buffer.dimensions();
  return axis < dimensions.size() ? dimensions[axis] : 0;
}

const float* floats(const AnyBuffer& buffer) {
  return static_cast<const float*>(buffer.untyped_data());
}

// float32 [*shape], or [0] for none.
const float* optional_floats(Checks& checks, const char* name, const AnyBuffer& buffer,
                             const std::vector<int64_t>& shape) {
  if (buffer.dimensions().size() == 1 && extent(buffer, 0) == 0) return nullptr;
  checks.shape(name, buffer, DataType::F32, {}, shape);
  return floats(buffer);
}

// float32 [groups] or, which `wide` becomes, [groups, along]; [0] for none.
const float* factor(Checks& checks, const char* name, const AnyBuffer& buffer, int64_t groups,
                    int64_t along, bool& wide) {
  wide = buffer.dimensions().size() == 2;
  if (wide) return optional_floats(checks, name, buffer, {groups, along});
  return optional_floats(checks, name, buffer, {groups});
}

// Checks what all have, and launches.
ffi::Error run(const char* op, Checks& checks, const AnyBuffer& group_sizes, AnyBuffer out,
               const std::vector<int64_t>& shape, Out scratch, const std::string& lhs,
               const std::string& rhs, cuda::GemmProblem& p, const Context& context) {
  checks.shape("group_sizes", group_sizes, DataType::S32, {}, {p.groups});
  p.out_dtype = checks.dtype("out", out);
  checks.shape("out", out, out.element_type(), {}, shape);
  p.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  p.out = out.untyped_data();
  const std::string why = cuda::why_not(p);
  checks.require(why.empty(), why);
  require_aligned(checks, lhs, p.lhs);
  require_aligned(checks, rhs, p.rhs);
  require_aligned(checks, "block_scale", p.block_scale);
  require_aligned(checks, "out", p.out);
  if (!checks.ok()) return checks.error();
  return launch(op, cuda::launch_grouped_gemm, p, context, &scratch);
}

ffi::Error grouped_matmul_impl(cudaStream_t stream, int32_t ordinal, AnyBuffer values,
                               AnyBuffer codes, AnyBuffer block_scale, AnyBuffer lhs_factor,
                               AnyBuffer rhs_factor, AnyBuffer bias, AnyBuffer row_weights,
                               AnyBuffer group_sizes, Out out, Out scratch, bool lhs_of_rows) {
  constexpr const char* op = "jax_fp4_grouped_matmul";
  Checks checks(op);
  cuda::GemmProblem p = {};
  p.kind = cuda::Gemm::kPacked;
  p.contracts_last = true;
  p.parts = 1;
  p.m = extent(values, 0), p.k = extent(values, 1);
  p.groups = extent(codes, 0), p.n = extent(codes, 1);
  checks.shape("values", values, DataType::BF16, {}, {p.m, p.k});
  checks.shape("codes", codes, DataType::U8, {}, {p.groups, p.n, p.k / 2});
  checks.shape("block_scale", block_scale, DataType::F8E4M3FN, {}, {p.groups, p.n, p.k / 16});
  p.lhs_by_row = lhs_of_rows;
  checks.shape("lhs_factor", lhs_factor, DataType::F32, {}, {lhs_of_rows ? p.m : p.groups});
  p.lhs_factor = floats(lhs_factor);
  p.rhs_factor = factor(checks, "rhs_factor", rhs_factor, p.groups, p.n, p.rhs_by_column);
  p.bias = optional_floats(checks, "bias", bias, {p.groups, p.n});
  p.row_weights = optional_floats(checks, "row_weights", row_weights, {p.m});
  p.lhs = values.untyped_data(), p.rhs = codes.untyped_data();
  p.block_scale = static_cast<const uint8_t*>(block_scale.untyped_data());
  return run(op, checks, group_sizes, *out, {p.m, p.n}, scratch, "values", "codes", p,
             {stream, ordinal});
}

ffi::Error grouped_matmul_bf16_impl(cudaStream_t stream, int32_t ordinal, AnyBuffer x, AnyBuffer w,
                                    AnyBuffer bias, AnyBuffer row_weights, AnyBuffer group_sizes,
                                    Out out, Out scratch, bool transposed) {
  constexpr const char* op = "jax_fp4_grouped_matmul_bf16";
  Checks checks(op);
  cuda::GemmProblem p = {};
  p.kind = cuda::Gemm::kRows;
  p.contracts_last = transposed;
  p.parts = 1;
  p.m = extent(x, 0), p.k = extent(x, 1);
  p.groups = extent(w, 0), p.n = extent(w, transposed ? 1 : 2);
  checks.shape("x", x, DataType::BF16, {}, {p.m, p.k});
  checks.shape("w", w, DataType::BF16, {},
               transposed ? std::vector<int64_t>{p.groups, p.n, p.k}
                          : std::vector<int64_t>{p.groups, p.k, p.n});
  p.bias = optional_floats(checks, "bias", bias, {p.groups, p.n});
  p.row_weights = optional_floats(checks, "row_weights", row_weights, {p.m});
  p.lhs = x.untyped_data(), p.rhs = w.untyped_data();
  return run(op, checks, group_sizes, *out, {p.m, p.n}, scratch, "x", "w", p, {stream, ordinal});
}

ffi::Error grouped_contraction_impl(cudaStream_t stream, int32_t ordinal, AnyBuffer lhs,
                                    AnyBuffer rhs, AnyBuffer lhs_factor, AnyBuffer rhs_factor,
                                    AnyBuffer group_sizes, Out out, Out scratch, bool rows_last,
                                    int64_t m, int64_t parts) {
  constexpr const char* op = "jax_fp4_grouped_contraction";
  Checks checks(op);
  cuda::GemmProblem p = {};
  p.kind = cuda::Gemm::kContraction;
  p.contracts_last = rows_last;
  p.m = m;
  p.parts = parts;
  p.groups = extent(group_sizes, 0);
  p.k = extent(lhs, rows_last ? 0 : 1), p.n = extent(rhs, rows_last ? 0 : 1);
  p.stored = rows_last ? extent(lhs, 1) : 0;
  // Groups of m rows, each padded to blocks of 16.
  checks.require(!rows_last || p.stored == (m + 15 * p.groups) / 16 * 16,
                 "lhs does not hold m rows in blocks of 16");
  const auto shape = [&](int64_t columns) {
    return rows_last ? std::vector<int64_t>{columns, p.stored} : std::vector<int64_t>{m, columns};
  };
  checks.shape("lhs", lhs, DataType::BF16, {}, shape(p.k));
  checks.shape("rhs", rhs, DataType::BF16, {}, shape(p.n));
  p.lhs_factor = factor(checks, "lhs_factor", lhs_factor, p.groups, p.k, p.lhs_by_row);
  p.rhs_factor = factor(checks, "rhs_factor", rhs_factor, p.groups, p.n, p.rhs_by_column);
  p.lhs = lhs.untyped_data(), p.rhs = rhs.untyped_data();
  checks.require(parts > 0, "attribute parts is not positive");
  if (!checks.ok()) return checks.error();
  std::vector<int64_t> result = {p.groups, p.k / parts, p.n};
  if (parts > 1) result.insert(result.begin(), parts);
  return run(op, checks, group_sizes, *out, result, scratch, "lhs", "rhs", p, {stream, ordinal});
}

}  // namespace
}  // namespace jax_fp4

using xla::ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_grouped_matmul, jax_fp4::grouped_matmul_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // values
                                  .Arg<AnyBuffer>()  // codes
                                  .Arg<AnyBuffer>()  // block_scale
                                  .Arg<AnyBuffer>()  // lhs_factor
                                  .Arg<AnyBuffer>()  // rhs_factor
                                  .Arg<AnyBuffer>()  // bias
                                  .Arg<AnyBuffer>()  // row_weights
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // out
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attr<bool>("lhs_of_rows"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_grouped_matmul_bf16, jax_fp4::grouped_matmul_bf16_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // w
                                  .Arg<AnyBuffer>()  // bias
                                  .Arg<AnyBuffer>()  // row_weights
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // out
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attr<bool>("transposed"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_grouped_contraction, jax_fp4::grouped_contraction_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // lhs
                                  .Arg<AnyBuffer>()  // rhs
                                  .Arg<AnyBuffer>()  // lhs_factor
                                  .Arg<AnyBuffer>()  // rhs_factor
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // out
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attr<bool>("rows_last")
                                  .Attr<int64_t>("m")
                                  .Attr<int64_t>("parts"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
