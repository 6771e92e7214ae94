#include "dispatch.h"

namespace jax_fp4 {

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// What is asked of the machine is exactly what CMake passes to the compiler.
int kernel_tables() {
#if defined(__x86_64__)
  return 3;
#else
  return 1;
#endif
}

const Kernels* kernel_table(int i) {
#if defined(__x86_64__)
  if (i == 1) return __builtin_cpu_supports("avx2") ? &kernels_avx2 : nullptr;
  if (i == 2) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has ? &kernels_avx512 : nullptr;
  }
#endif
  return i == 0 ? &kernels_baseline : nullptr;
}

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const Kernels* best = &kernels_baseline;
    for (int i = 0; i < kernel_tables(); ++i)
      if (const Kernels* table = kernel_table(i)) best = table;
    return best;
  }();
  return *chosen;
}

}  // namespace jax_fp4
