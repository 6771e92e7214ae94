// One call of quantize, quantize_transpose or dequantize on the CPU: amaxes first, then the codes.
#ifndef JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_
#define JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_

#include "kernels.h"
#include "parallel.h"

namespace jax_fp4 {

// The amaxes of the wanted forms are given: row_amax and column_amax, copied as they are stored.
// Both null = computed from x.
struct GivenAmax {
  const float* row;
  const float* column;
};

// Values in one batch of amaxes of a form of x.
int64_t amax_count(const QuantizeProblem& problem, const StoredForm& form);

void quantize(const Kernels& kernels, Executor& executor, const QuantizeProblem& problem,
              const GivenAmax& given);

void dequantize(const Kernels& kernels, Executor& executor, const DequantizeProblem& problem);

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_QUANTIZE_H_
