// What the handlers of the 8-bit formats of all platforms share, as common_handler.h does for
// NVFP4. All bind the same operands and results: what a format does not have has no elements.
#ifndef JAX_FP4_XLA_FFI_FLOAT8_COMMON_HANDLER_H_
#define JAX_FP4_XLA_FFI_FLOAT8_COMMON_HANDLER_H_

#include "common_handler.h"

namespace jax_fp4 {

// The attributes of quantize_transpose, as they arrive.
struct Float8Attributes {
  int32_t scaling, codes, tile, compute;
  bool power_of_two;
  float eps;
  bool given_amax, given_scale, grouped;
};

// Those of quantize.
struct AxisFloat8Attributes : Float8Attributes {
  int32_t axis;
};

struct Float8Buffers {
  ffi::AnyBuffer x, amax, scale, group_sizes;
};

// x [*B, m, k], group_sizes [*B, g] (not grouped: [*B, 0]), and amax and scale, [*B] or [*B, g] if
// they are given, else [*B, 0].
struct Float8Operands {
  ffi::Span<const int64_t> batch_shape;
  int64_t batch, m, k;
  const void* x;
  DType x_dtype, compute;
  Float8Scaling scaling;
  Float8Codes codes;
  int64_t groups;  // 1 if not grouped
  const int32_t* group_sizes;
  const float* given_amax;  // null = computed from x
  const float* given_scale;
};

// Complains about what no kernel defines.
Float8Operands check_float8(Checks& checks, const Float8Buffers& buffers,
                            const Float8Attributes& a);

struct Float8Results {
  ffi::AnyBuffer codes, scale, amax;
};

// The results of one stored form.
struct Float8FormBuffers {
  int64_t rows, extent, blocks;
  uint8_t* codes;
  void* scale;
  float* amax;
};

Float8FormBuffers check_float8_form(Checks& checks, const Float8Operands& operands,
                                    const Float8Attributes& a, bool along_k, const char* suffix,
                                    const Float8Results& results);

ffi::DataType code_type(Float8Codes codes);
ffi::DataType scale_type(Float8Scaling scaling);

void check_scaling(Checks& checks, int32_t scaling, int32_t tile);

// The shape of the scales that rows of so many elements have, after the batch dimensions.
std::vector<int64_t> scale_tail(Float8Scaling scaling, int32_t tile, int64_t rows, int64_t extent);

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

#endif  // JAX_FP4_XLA_FFI_FLOAT8_COMMON_HANDLER_H_
