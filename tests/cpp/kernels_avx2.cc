// The kernels for one instruction set, as CMake's flags would make them.
#if defined(__x86_64__)
#pragma GCC target("avx2")
#define JAX_FP4_ISA avx2
#include "../../xla_ffi/cpu/kernels.cc"
#endif
