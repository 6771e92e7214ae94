// Which compiled instruction set runs on this machine.
#ifndef JAX_FP4_XLA_FFI_CPU_DISPATCH_H_
#define JAX_FP4_XLA_FFI_CPU_DISPATCH_H_

#include "kernels.h"

namespace jax_fp4 {

// Number of compiled tables.
int kernel_tables();

// The i-th of them, from the baseline up, or null if this machine lacks it.
const Kernels* kernel_table(int i);

// The widest that this machine has; the same at every call.
const Kernels& kernels();

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_DISPATCH_H_
