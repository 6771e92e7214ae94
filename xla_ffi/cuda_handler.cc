// The quantizers of the module _cuda, for platform CUDA: checks and launch. Nothing is synchronised
// and no device memory is read, so each may be captured in a CUDA graph. A negative given amax is
// therefore not refused here: its block scales are clamped like any other.
#include "cuda_handler.h"

#include <initializer_list>
#include <type_traits>

namespace jax_fp4 {

// The attributes of activate_quantize_transpose: those of quantize_transpose of what is made of h.
struct ActivateAttributes : QuantizeAttributes {
  int32_t activation;
  float limit, alpha, offset, beta1, beta2;
  bool weighted;
};

// Those of activate_quantize.
struct AxisActivateAttributes : ActivateAttributes {
  int32_t axis;
};

namespace {

cuda::QuantizeProblem quantize_problem(const QuantizeOperands& o, const QuantizeAttributes& a) {
  cuda::QuantizeProblem p = {};
  p.x = o.x;
  p.x_dtype = o.x_dtype;
  p.compute = o.compute;
  p.batch = o.batch;
  p.m = o.m;
  p.k = o.k;
  p.tile = a.tile;
  p.row_scaled = a.row_scaled;
  p.seed = o.seed;
  p.split_groups = o.split_groups;
  p.m_total = o.m_total;
  p.k_total = o.k_total;
  p.grouped = a.grouped;
  p.groups = o.groups;
  p.group_sizes = o.group_sizes;
  return p;
}

cuda::StoredForm stored_form(const FormBuffers& from) {
  cuda::StoredForm form = {};
  form.wanted = true;
  form.hadamard = from.hadamard;
  form.four_over_six = from.four_over_six;
  form.bound = from.bound;
  form.blocks = from.blocks;
  form.codes = from.codes;
  form.block_scale = from.block_scale;
  form.amax = from.amax;
  form.given_amax = from.given_amax;
  return form;
}

// Checks h [*B, m, 2 k] or [*B, m, k] and weights [*B, m] or [*B, 0], and makes of operands of h
// those of x [*B, m, k].
cuda::ActivatedInput check_activation(Checks& checks, const ffi::AnyBuffer& weights,
                                      const ActivateAttributes& a, QuantizeOperands& o) {
  cuda::ActivatedInput input = {};
  checks.require(a.activation > 0 && a.activation <= static_cast<int32_t>(Activation::kSquaredRelu),
                 "attribute activation is not 1 to 8");
  if (!checks.ok()) return input;
  input.kind = static_cast<Activation>(a.activation);
  if (input.kind <= kLastGated) {
    checks.require(o.k % 2 == 0, "h has an odd last axis; needs [*B, m, 2 k]");
    o.k /= 2;
  }
  o.k_total = a.k_total < 0 ? o.k : a.k_total;
  checks.shape("weights", weights, ffi::DataType::F32, o.batch_shape, {a.weighted ? o.m : 0});
  input.limit = a.limit;
  input.alpha = a.alpha;
  input.offset = a.offset;
  input.beta1 = a.beta1;
  input.beta2 = a.beta2;
  input.weights = a.weighted ? static_cast<const float*>(weights.untyped_data()) : nullptr;
  return input;
}

// One stored form: its amax operand and its results.
struct Buffers {
  ffi::AnyBuffer amax;
  Out codes, block_scale, amax_out;
};
struct Form {
  bool along_k;
  std::string suffix;  // of the names of its buffers
  Buffers buffers;
};

// A call, whichever target it has: of one form, or of both. `weights` is null without an
// activation.
template <class Attributes>
ffi::Error run_quantize(const char* op, const Context& context, ffi::AnyBuffer x,
                        const ffi::AnyBuffer* weights, ffi::AnyBuffer seed,
                        ffi::AnyBuffer group_sizes, std::initializer_list<Form> forms, Out scratch,
                        const Attributes& attributes) {
  constexpr bool kActivates = std::is_base_of_v<ActivateAttributes, Attributes>;
  Checks checks(op);
  QuantizeOperands operands = check_operands(checks, x, &seed, group_sizes, attributes);
  cuda::ActivatedInput activation = {};
  if constexpr (kActivates) activation = check_activation(checks, *weights, attributes, operands);
  if (!checks.ok()) return checks.error();
  cuda::QuantizeProblem problem = quantize_problem(operands, attributes);
  problem.activation = activation;
  require_aligned(checks, kActivates ? "h" : "x", problem.x);
  for (const auto& [along_k, suffix, buffers] : forms) {
    auto [amax, codes, block_scale, amax_out] = buffers;
    cuda::StoredForm& stored = along_k ? problem.row : problem.column;
    stored = stored_form(check_form(checks, operands, attributes, along_k, suffix.c_str(), amax,
                                    *codes, *block_scale, *amax_out));
    require_aligned(checks, "codes" + suffix, stored.codes);
    require_aligned(checks, "block_scale" + suffix, stored.block_scale);
  }
  if (!checks.ok()) return checks.error();
  require_aligned(checks, "scratch", scratch->untyped_data());
  if (!checks.ok()) return checks.error();
  return launch(op, cuda::launch_quantize_transpose, problem, context, &scratch);
}

// One form along attributes.axis.
template <class Attributes>
ffi::Error run_axis(const char* op, const Context& context, ffi::AnyBuffer x,
                    const ffi::AnyBuffer* weights, ffi::AnyBuffer seed, ffi::AnyBuffer group_sizes,
                    const Buffers& buffers, Out scratch, const Attributes& attributes) {
  Checks checks(op);
  checks.require(attributes.axis == -1 || attributes.axis == 0, "attribute axis is not -1 or 0");
  checks.require(!(attributes.hadamard && attributes.axis == -1), "hadamard needs axis 0");
  if (!checks.ok()) return checks.error();
  return run_quantize(op, context, x, weights, seed, group_sizes,
                      {{attributes.axis == -1, "", buffers}}, scratch, attributes);
}

ffi::Error quantize_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x,
                         ffi::AnyBuffer amax, ffi::AnyBuffer seed, ffi::AnyBuffer group_sizes,
                         Out codes, Out block_scale, Out amax_out, Out scratch,
                         const AxisQuantizeAttributes& attributes) {
  return run_axis("jax_fp4_quantize", {stream, ordinal}, x, nullptr, seed, group_sizes,
                  {amax, codes, block_scale, amax_out}, scratch, attributes);
}

ffi::Error quantize_transpose_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x,
                                   ffi::AnyBuffer amax, ffi::AnyBuffer amax_t, ffi::AnyBuffer seed,
                                   ffi::AnyBuffer group_sizes, Out codes, Out block_scale,
                                   Out amax_out, Out codes_t, Out block_scale_t, Out amax_t_out,
                                   Out scratch, const QuantizeAttributes& attributes) {
  return run_quantize("jax_fp4_quantize_transpose", {stream, ordinal}, x, nullptr, seed,
                      group_sizes,
                      {{true, "", {amax, codes, block_scale, amax_out}},
                       {false, "_t", {amax_t, codes_t, block_scale_t, amax_t_out}}},
                      scratch, attributes);
}

ffi::Error activate_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer h,
                         ffi::AnyBuffer weights, ffi::AnyBuffer group_sizes, Out made, Out scratch,
                         const ActivateAttributes& attributes) {
  constexpr const char* op = "jax_fp4_activate";
  Checks checks(op);
  QuantizeOperands operands = check_operands(checks, h, nullptr, group_sizes, attributes);
  const cuda::ActivatedInput input = check_activation(checks, weights, attributes, operands);
  if (!checks.ok()) return checks.error();
  checks.require(checks.dtype("made", *made) == operands.compute, "made is not of compute's type");
  checks.shape("made", *made, made->element_type(), operands.batch_shape, {operands.m, operands.k});
  cuda::QuantizeProblem problem = quantize_problem(operands, attributes);
  problem.activation = input;
  problem.activation.made = made->untyped_data();
  require_aligned(checks, "h", problem.x);
  require_aligned(checks, "made", problem.activation.made);
  require_aligned(checks, "scratch", scratch->untyped_data());
  if (!checks.ok()) return checks.error();
  return launch(op, cuda::launch_activation, problem, {stream, ordinal}, &scratch);
}

ffi::Error activate_quantize_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer h,
                                  ffi::AnyBuffer weights, ffi::AnyBuffer amax, ffi::AnyBuffer seed,
                                  ffi::AnyBuffer group_sizes, Out codes, Out block_scale,
                                  Out amax_out, Out scratch,
                                  const AxisActivateAttributes& attributes) {
  return run_axis("jax_fp4_activate_quantize", {stream, ordinal}, h, &weights, seed, group_sizes,
                  {amax, codes, block_scale, amax_out}, scratch, attributes);
}

ffi::Error activate_quantize_transpose_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer h,
                                            ffi::AnyBuffer weights, ffi::AnyBuffer amax,
                                            ffi::AnyBuffer amax_t, ffi::AnyBuffer seed,
                                            ffi::AnyBuffer group_sizes, Out codes, Out block_scale,
                                            Out amax_out, Out codes_t, Out block_scale_t,
                                            Out amax_t_out, Out scratch,
                                            const ActivateAttributes& attributes) {
  return run_quantize("jax_fp4_activate_quantize_transpose", {stream, ordinal}, h, &weights, seed,
                      group_sizes,
                      {{true, "", {amax, codes, block_scale, amax_out}},
                       {false, "_t", {amax_t, codes_t, block_scale_t, amax_t_out}}},
                      scratch, attributes);
}

ffi::Error amax_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x,
                     ffi::AnyBuffer group_sizes, Out amax, Out amax_t, Out scratch,
                     const AmaxAttributes& attributes) {
  constexpr const char* op = "jax_fp4_amax";
  Checks checks(op);
  const QuantizeAttributes of_quantize = quantize_attributes(attributes);
  const QuantizeOperands operands = check_operands(checks, x, nullptr, group_sizes, of_quantize);
  if (!checks.ok()) return checks.error();
  cuda::QuantizeProblem problem = quantize_problem(operands, of_quantize);
  for (const bool along_k : {true, false}) {
    cuda::StoredForm& form = along_k ? problem.row : problem.column;
    form.amax = check_amax(checks, operands, attributes, along_k, along_k ? *amax : *amax_t);
    form.wanted = along_k ? attributes.row : attributes.column;
    form.hadamard = attributes.hadamard && !along_k;
    form.bound = of_quantize.bound;
    form.blocks = stored_blocks(operands, of_quantize, along_k);
  }
  require_aligned(checks, "x", problem.x);
  require_aligned(checks, "scratch", scratch->untyped_data());
  if (!checks.ok()) return checks.error();
  return launch(op, cuda::launch_amax, problem, {stream, ordinal}, &scratch);
}

ffi::Error dequantize_impl(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer codes,
                           ffi::AnyBuffer block_scale, ffi::AnyBuffer amax, Out out, int32_t bound,
                           bool row_scaled, bool product_form, bool interleaved) {
  constexpr const char* op = "jax_fp4_dequantize";
  Checks checks(op);
  checks.require(!interleaved || product_form, "interleaved needs product_form");
  const DequantizeProblem problem = check_dequantize(checks, codes, block_scale, amax, *out, bound,
                                                     row_scaled, product_form, interleaved);
  require_aligned(checks, "codes", problem.codes);
  require_aligned(checks, "block_scale", problem.block_scale);
  require_aligned(checks, "out", problem.out);
  if (!checks.ok()) return checks.error();
  return launch(op, interleaved ? cuda::launch_interleave : cuda::launch_dequantize, problem,
                {stream, ordinal});
}

}  // namespace
}  // namespace jax_fp4

// The members of ActivateAttributes, in their order.
#define JAX_FP4_ACTIVATE_ATTRIBUTES                                                               \
  JAX_FP4_QUANTIZE_ATTRIBUTES, StructMember<int32_t>("activation"), StructMember<float>("limit"), \
      StructMember<float>("alpha"), StructMember<float>("offset"), StructMember<float>("beta1"),  \
      StructMember<float>("beta2"), StructMember<bool>("weighted")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::ActivateAttributes, JAX_FP4_ACTIVATE_ATTRIBUTES);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::AxisActivateAttributes, JAX_FP4_ACTIVATE_ATTRIBUTES,
                                      StructMember<int32_t>("axis"));

using xla::ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_quantize, jax_fp4::quantize_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // seed
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::AxisQuantizeAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_quantize_transpose, jax_fp4::quantize_transpose_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // amax_t
                                  .Arg<AnyBuffer>()  // seed
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // codes_t
                                  .Ret<AnyBuffer>()  // block_scale_t
                                  .Ret<AnyBuffer>()  // amax_t
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::QuantizeAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_activate, jax_fp4::activate_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // h
                                  .Arg<AnyBuffer>()  // weights
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // made
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::ActivateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_activate_quantize, jax_fp4::activate_quantize_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // h
                                  .Arg<AnyBuffer>()  // weights
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // seed
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::AxisActivateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_activate_quantize_transpose,
                              jax_fp4::activate_quantize_transpose_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // h
                                  .Arg<AnyBuffer>()  // weights
                                  .Arg<AnyBuffer>()  // amax
                                  .Arg<AnyBuffer>()  // amax_t
                                  .Arg<AnyBuffer>()  // seed
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // codes
                                  .Ret<AnyBuffer>()  // block_scale
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // codes_t
                                  .Ret<AnyBuffer>()  // block_scale_t
                                  .Ret<AnyBuffer>()  // amax_t
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::ActivateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_amax, jax_fp4::amax_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // x
                                  .Arg<AnyBuffer>()  // group_sizes
                                  .Ret<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // amax_t
                                  .Ret<AnyBuffer>()  // scratch
                                  .Attrs<jax_fp4::AmaxAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fp4_cuda_dequantize, jax_fp4::dequantize_impl,
                              jax_fp4::in_context()
                                  .Arg<AnyBuffer>()  // codes
                                  .Arg<AnyBuffer>()  // block_scale
                                  .Arg<AnyBuffer>()  // amax
                                  .Ret<AnyBuffer>()  // out
                                  .Attr<int32_t>("bound")
                                  .Attr<bool>("row_scaled")
                                  .Attr<bool>("product_form")
                                  .Attr<bool>("interleaved"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
