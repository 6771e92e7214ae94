// What the handlers of all platforms share: checks that guard memory, and what the operands of a
// quantize call say once they are checked. A handler reads and writes only what a check has
// measured, so a wrong call is an error and never a crash.
#ifndef JAX_FP4_XLA_FFI_COMMON_HANDLER_H_
#define JAX_FP4_XLA_FFI_COMMON_HANDLER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/types.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp4 {

namespace ffi = xla::ffi;

// The first complaint about a call of `op`; later ones are dropped.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  bool ok() const { return text_.empty(); }
  ffi::Error error() const;

  // Complains unless the condition holds: "<op>: <what>".
  void require(bool condition, const std::string& what);

  // `buffer` must be `dtype` [*batch, *tail], where the leading dimensions of `batch` count; or
  // [*batch, *other], if there is another.
  void shape(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
             ffi::Span<const int64_t> batch, const std::vector<int64_t>& tail,
             const std::vector<int64_t>* other = nullptr);

  // The dtype of values, or a complaint.
  DType dtype(const char* name, const ffi::AnyBuffer& buffer);

 private:
  const char* op_;
  std::string text_;
};

int64_t product(ffi::Span<const int64_t> extents);

// The extent of the last dimension; 0 of a scalar.
int64_t last_extent(const ffi::AnyBuffer& buffer);

// The attributes of quantize_transpose, as they arrive.
struct QuantizeAttributes {
  int32_t tile;
  bool row_scaled;
  bool hadamard;
  int32_t four_over_six;
  int32_t bound;
  int32_t compute;
  int64_t m_total;
  int64_t k_total;
  bool given_amax;
  bool grouped;
};

// Those of quantize.
struct AxisQuantizeAttributes : QuantizeAttributes {
  int32_t axis;
};

// x [*B, m, k], seed [*B, 4] or [*B, 0] (grouped: or [*B, 4 + 2 g]) and group_sizes [*B, g] (not
// grouped: [*B, 0]). The words of a seed: two of the key; where x begins in the global tensor,
// along m (grouped: the number of the first group) and along k; then, if `split_groups`, where x
// begins in each group along m, and how many rows each group has, of which x has group_sizes.
struct QuantizeOperands {
  ffi::Span<const int64_t> batch_shape;
  int64_t batch, m, k, m_total, k_total;
  const void* x;
  DType x_dtype, compute;
  const uint32_t* seed;  // null = nearest rounding
  bool split_groups;     // the seed is [*B, 4 + 2 g]
  int64_t groups;        // 1 if not grouped
  const int32_t* group_sizes;
};

// Complains about what no kernel defines. No seed is as good as one without words.
QuantizeOperands check_operands(Checks& checks, const ffi::AnyBuffer& x, const ffi::AnyBuffer* seed,
                                const ffi::AnyBuffer& group_sizes, const QuantizeAttributes& a);

// Those of amax: which of the two it finds, and what of quantize_transpose's decides about them.
struct AmaxAttributes {
  bool row;
  bool column;
  bool row_scaled;
  bool hadamard;
  int32_t compute;
  bool grouped;
};

// Of the quantization that would compute them.
QuantizeAttributes quantize_attributes(const AmaxAttributes& a);

// The result of amax for one form: float32 [*B, 0] if it is not wanted; then null.
float* check_amax(Checks& checks, const QuantizeOperands& operands, const AmaxAttributes& a,
                  bool along_k, ffi::AnyBuffer amax);

// Of a stored row: column-wise, with groups, each of these has its own.
int64_t stored_blocks(const QuantizeOperands& operands, const QuantizeAttributes& a, bool along_k);

// The results of one stored form, and its amax operand.
struct FormBuffers {
  int64_t rows, blocks;
  bool hadamard;
  ErrorNorm four_over_six;
  int32_t bound;
  uint8_t* codes;
  uint8_t* block_scale;
  float* amax;
  const float* given_amax;  // null = computed from x
};

FormBuffers check_form(Checks& checks, const QuantizeOperands& operands,
                       const QuantizeAttributes& a, bool along_k, const char* suffix,
                       const ffi::AnyBuffer& given, ffi::AnyBuffer codes,
                       ffi::AnyBuffer block_scale, ffi::AnyBuffer amax);

DequantizeProblem check_dequantize(Checks& checks, const ffi::AnyBuffer& codes,
                                   const ffi::AnyBuffer& block_scale, const ffi::AnyBuffer& amax,
                                   ffi::AnyBuffer out, int32_t bound, bool row_scaled,
                                   bool product_form, bool interleaved = false);

}  // namespace jax_fp4

// The members of QuantizeAttributes, in their order.
#define JAX_FP4_QUANTIZE_ATTRIBUTES                                                                \
  StructMember<int32_t>("tile"), StructMember<bool>("row_scaled"), StructMember<bool>("hadamard"), \
      StructMember<int32_t>("four_over_six"), StructMember<int32_t>("bound"),                      \
      StructMember<int32_t>("compute"), StructMember<int64_t>("m_total"),                          \
      StructMember<int64_t>("k_total"), StructMember<bool>("given_amax"),                          \
      StructMember<bool>("grouped")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::QuantizeAttributes, JAX_FP4_QUANTIZE_ATTRIBUTES);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::AxisQuantizeAttributes, JAX_FP4_QUANTIZE_ATTRIBUTES,
                                      StructMember<int32_t>("axis"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp4::AmaxAttributes, StructMember<bool>("row"),
                                      StructMember<bool>("column"),
                                      StructMember<bool>("row_scaled"),
                                      StructMember<bool>("hadamard"),
                                      StructMember<int32_t>("compute"),
                                      StructMember<bool>("grouped"));

#endif  // JAX_FP4_XLA_FFI_COMMON_HANDLER_H_
