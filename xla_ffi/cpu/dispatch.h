// Which compiled instruction set runs on this machine.
#ifndef JAX_FP4_XLA_FFI_CPU_DISPATCH_H_
#define JAX_FP4_XLA_FFI_CPU_DISPATCH_H_

#include "kernels.h"

namespace jax_fp4 {

// Number of compiled tables, from the baseline up; and the i-th, or null if this machine lacks it.
int compiled_kernels();
const Kernels* compiled_kernels(int i);

// The widest that this machine has; the same at every call.
const Kernels& kernels();

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_DISPATCH_H_
