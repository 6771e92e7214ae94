// The kernels for one instruction set, as CMake's flags would make them.
#if defined(__x86_64__)
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl")
#define JAX_FP4_ISA avx512
#include "../../xla_ffi/cpu/kernels.cc"
#endif
