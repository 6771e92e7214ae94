// One call of quantize, quantize_transpose or dequantize on the CPU: amaxes first, then the codes.
#ifndef JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_
#define JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_

#include "kernels.h"
#include "parallel.h"
#include "parts.h"

namespace jax_fp4 {

// x [batch, m, k] and its stored forms; with groups, group_sizes [batch, groups] splits the m rows
// of each batch entry. Sizes are data, and any are legal: a negative one counts as 0, and groups
// end at row m. Rows after the last group are not read. Each group is a matrix of its own: its
// blocks of the column-wise form follow those of the group before it, the last one padded with
// zeros. Every other byte of the forms becomes 0.
struct QuantizeCall {
  QuantizeProblem entry;  // the first batch entry as one matrix, without key, expert and origins
  int64_t batch;
  const uint32_t* seed;  // [batch, 4]: two words of the key, m origin (grouped: number of the first
                         // group, m_total is unread), k origin; null = nearest rounding
  // x has a part of each group, and seed is [batch, 4 + 2 groups]: after the four words, the row of
  // each whole group at which x begins, then the rows that each has.
  bool split_groups;
  bool grouped;
  int64_t groups;  // 1 if not grouped
  const int32_t* group_sizes;
  // The amaxes of the wanted forms, copied as they are stored. Both null = computed from x.
  const float* given_row_amax;
  const float* given_column_amax;
};

// Values in the amaxes of a form: one a matrix; under row scaling [batch, m] of the row-wise form,
// and k a matrix of the column-wise one.
int64_t amax_count(const QuantizeCall& call, bool row_wise);

// May throw std::bad_alloc, before anything is written; never without groups.
void quantize(const Kernels& kernels, Executor& executor, const QuantizeCall& call);

// The amaxes of the wanted forms alone, computed. Of a form wanted, hadamard and amax are read.
void amaxes(const Kernels& kernels, Executor& executor, const QuantizeCall& call);

// What the formats share: bits of the maximum |x|, rounded to `compute`, of each part of x
// [batch, m, k], in the order of their numbers; and amaxes with every NaN as kNanBits.
void tensor_amaxes(const Kernels& kernels, Executor& executor, Parts& parts, const void* x,
                   DType dtype, DType compute, int64_t m, int64_t k, float* amax);
void store_amax(float* amax, int64_t count);

void dequantize(const Kernels& kernels, Executor& executor, const DequantizeProblem& problem);

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_
