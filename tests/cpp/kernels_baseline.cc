// The kernels for one instruction set, as CMake's flags would make them.
#define JAX_FP4_ISA baseline
#include "../../xla_ffi/cpu/kernels.cc"
