// What the CPU kernels are asked to do, in plain structs, and the table that one instruction set
// offers. No XLA, no Python, no inline code: this header is seen by translation units that are
// compiled for different instruction sets.
#ifndef JAX_FP4_XLA_FFI_CPU_KERNELS_H_
#define JAX_FP4_XLA_FFI_CPU_KERNELS_H_

#include <stdint.h>

#include "../kernels/types.h"

namespace jax_fp4 {

// One stored form of x. codes [rows, blocks * 8], block_scale [rows, blocks], of which a group's
// column-wise form begins at a block of its own and fills as many as it has. All may be zero in a
// form that is not wanted.
struct StoredForm {
  bool wanted;
  int64_t rows, blocks;
  bool hadamard;
  ErrorNorm four_over_six;
  int32_t bound;
  uint8_t* codes;
  uint8_t* block_scale;
  float* amax;  // one value, or [rows] under row scaling
};

// One matrix x [m, k], dense. The amaxes are known when a quantize item runs.
struct QuantizeProblem {
  const void* x;
  DType x_dtype;
  DType compute;  // x is rounded to it first
  int64_t m, k;
  int32_t tile;  // rows that share a scale: 1 or 16
  bool row_scaled;
  const uint32_t* key;          // two words; null = nearest rounding
  uint32_t expert;              // Philox counter word 3
  uint32_t m_origin, k_origin;  // where x begins in the tensor of which it is a part
  int64_t m_total, k_total;     // extents of that tensor
  StoredForm row;               // blocks along k
  StoredForm column;            // blocks along m, stored transposed
};

// One stored form in an 8-bit format: codes [rows, extent], and scale, of so many blocks a row:
// E8M0 bytes [rows, blocks], or inverse scales, float32, [rows / tile, blocks] or one for all.
struct Float8Form {
  bool wanted;
  int64_t rows, extent, blocks;
  uint8_t* codes;
  void* scale;
};

// One matrix x [m, k], dense, in an 8-bit format.
struct Float8Problem {
  const void* x;
  DType x_dtype;
  DType compute;  // x is rounded to it first
  int64_t m, k;
  Float8Scaling scaling;
  Float8Codes codes;
  int32_t tile;  // rows that share a scale: 1, or as many as a block is long
  bool power_of_two;
  float eps;
  float tensor_scale;  // what x is multiplied by under Float8Scaling::kTensor
  Float8Form row;      // blocks along k
  Float8Form column;   // blocks along m, stored transposed
};

// codes [batch, rows, padded] and scale, as above for each batch entry -> out [batch, rows,
// extent].
struct Float8DequantizeProblem {
  const uint8_t* codes;
  const void* scale;
  Float8Scaling scaling;
  Float8Codes code_type;
  int32_t tile;
  int64_t batch, rows, padded, extent;  // extent <= padded
  void* out;
  DType out_dtype;
};

// Work is cut into items that may run in any order and on any thread: every output byte belongs to
// one item.
constexpr int64_t kItemBlocks = 2048;  // blocks of an item of the row-wise form alone
constexpr int64_t kItemRows = 128;     // rows and columns of x in any other item: a column's codes
constexpr int64_t kItemColumns = 256;  // are then one cache line
constexpr int64_t kFlatElements = 1 << 16;
constexpr int64_t kFloat8Piece = 128;  // rows and columns of x in an item of an 8-bit format: whole
                                       // blocks and tiles of each, and two cache lines of codes

// The row-wise form alone needs no tiles of x: its items are runs of kItemBlocks blocks in memory
// order. All other items are kItemRows x kItemColumns pieces of x, row after row of pieces.
bool quantize_in_block_order(const QuantizeProblem& problem);

struct Kernels {
  const char* isa;
  // The stored forms of items [begin, end) of one matrix.
  void (*quantize)(const QuantizeProblem& problem, int64_t begin, int64_t end);
  // Bits of the maximum |x|, rounded to `compute`; NaN wins, as an integer.
  uint32_t (*amax)(const void* x, DType dtype, DType compute, int64_t count);
  // The same for each column of x [rows, columns]; columns <= kItemColumns.
  void (*column_amax)(const void* x, DType dtype, DType compute, int64_t stride, int64_t rows,
                      int64_t columns, uint32_t* bits);
  // The same over the Hadamard transform of the columns; rows >= 1, columns as above.
  uint32_t (*hadamard_amax)(const void* x, DType dtype, DType compute, int64_t stride, int64_t rows,
                            int64_t columns);
  // Rows [begin, end) of batch * rows.
  void (*dequantize)(const DequantizeProblem& problem, int64_t begin, int64_t end);
  // Pieces [begin, end) of one matrix, row after row of pieces: its stored forms.
  void (*quantize_float8)(const Float8Problem& problem, int64_t begin, int64_t end);
  // Rows [begin, end) of batch * rows.
  void (*dequantize_float8)(const Float8DequantizeProblem& problem, int64_t begin, int64_t end);
};

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_KERNELS_H_
