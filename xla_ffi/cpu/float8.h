// One call of quantize, quantize_transpose or dequantize in an 8-bit format on the CPU.
#ifndef JAX_FP4_XLA_FFI_CPU_FLOAT8_H_
#define JAX_FP4_XLA_FFI_CPU_FLOAT8_H_

#include "kernels.h"
#include "parallel.h"

namespace jax_fp4 {

// x [batch, m, k] and its stored forms; groups as in quantize.h. What belongs to no group is zero,
// codes and scales. Under Float8Scaling::kTensor each matrix, [batch] or [batch, groups], has a
// scale and an amax.
struct Float8Call {
  Float8Problem entry;  // the first batch entry as one matrix
  int64_t batch;
  bool grouped;
  int64_t groups;  // 1 if not grouped
  const int32_t* group_sizes;
  // kTensor only; of each wanted form.
  float* row_amax;
  float* column_amax;
  const float* given_amax;   // null = computed from x
  const float* given_scale;  // what x is multiplied by; null = computed from the amax
};

// May throw std::bad_alloc, before anything is written; never without groups.
void quantize_float8(const Kernels& kernels, Executor& executor, const Float8Call& call);

void dequantize_float8(const Kernels& kernels, Executor& executor,
                       const Float8DequantizeProblem& problem);

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_FLOAT8_H_
