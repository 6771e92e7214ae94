// quantize and quantize_transpose of the 8-bit formats for platform CUDA, without groups: checks
// and launch, on the terms of cuda_handler.cc.
#include <initializer_list>

#include "cuda_handler.h"
#include "float8_common_handler.h"

namespace jax_fp4 {
namespace {

cuda::Float8Problem cuda_problem(const Float8Operands& o, const Float8Attributes& a) {
  cuda::Float8Problem p = {};
  p.x = o.x;
  p.x_dtype = o.x_dtype;
  p.compute = o.compute;
  p.batch = o.batch;
  p.m = o.m;
  p.k = o.k;
  p.scaling = o.scaling;
  p.codes = o.codes;
  p.tile = a.tile;
  p.power_of_two = a.power_of_two;
  p.eps = a.eps;
  p.given_amax = o.given_amax;
  p.given_scale = o.given_scale;
  return p;
}

struct Form {
  bool along_k;
  std::string suffix;  // of the names of its buffers
  Float8Results results;
};

ffi::Error run(const char* op, const Context& context, const Float8Buffers& buffers,
               std::initializer_list<Form> forms, const Float8Attributes& a) {
  Checks checks(op);
  checks.require(!a.grouped, "group_sizes have no kernel on CUDA");
  const Float8Operands operands = check_float8(checks, buffers, a);
  if (!checks.ok()) return checks.error();
  cuda::Float8Problem problem = cuda_problem(operands, a);
  require_aligned(checks, "x", problem.x);
  for (const auto& [along_k, suffix, results] : forms) {
    const Float8FormBuffers from =
        check_float8_form(checks, operands, a, along_k, suffix.c_str(), results);
    require_aligned(checks, "codes" + suffix, from.codes);
    require_aligned(checks, "block_scale" + suffix, from.scale);
    (along_k ? problem.row : problem.column) = {true,       from.extent, from.blocks,
                                                from.codes, from.scale,  from.amax};
  }
  if (!checks.ok()) return checks.error();
  return launch(op, cuda::launch_quantize_float8, problem, context);
}

ffi::Error quantize_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x,
                         ffi::AnyBuffer amax, ffi::AnyBuffer scale, ffi::AnyBuffer group_sizes,
                         Out codes, Out block_scale, Out amax_out,
                         const AxisFloat8Attributes& attributes) {
  constexpr const char* kOp = "jax_fp4_quantize_float8";
  Checks checks(kOp);
  checks.require(attributes.axis == -1 || attributes.axis == 0, "attribute axis is not -1 or 0");
  if (!checks.ok()) return checks.error();
  return run(kOp, {stream, ordinal}, {x, amax, scale, group_sizes},
             {{attributes.axis == -1, "", {*codes, *block_scale, *amax_out}}}, attributes);
}

ffi::Error quantize_transpose_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x,
                                   ffi::AnyBuffer amax, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer group_sizes, Out codes, Out block_scale,
                                   Out amax_out, Out codes_t, Out block_scale_t, Out amax_t_out,
                                   const Float8Attributes& attributes) {
  return run("jax_fp4_quantize_transpose_float8", {stream, ordinal}, {x, amax, scale, group_sizes},
             {{true, "", {*codes, *block_scale, *amax_out}},
              {false, "_t", {*codes_t, *block_scale_t, *amax_t_out}}},
             attributes);
}

}  // namespace
}  // namespace jax_fp4

using xla::ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_quantize_float8, jax_fp4::quantize_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // scale
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Attrs<jax_fp4::AxisFloat8Attributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_quantize_transpose_float8,
                              jax_fp4::quantize_transpose_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // scale
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // codes_t
                                  .Ret<AnyBuffer>()  // block_scale_t
                                  .Ret<AnyBuffer>()  // amax_t
                                  .Attrs<jax_fp4::Float8Attributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
