// Output buffers are usually fresh memory, where the first touch of each page is a fault of its
// own. Asking for huge pages makes it one fault for 2 MiB instead of one for 4 KiB (NumPy asks
// too).
#ifndef JAX_FP4_XLA_FFI_CPU_HUGE_PAGES_H_
#define JAX_FP4_XLA_FFI_CPU_HUGE_PAGES_H_

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_fp4 {

// A hint for [data, data + bytes); contents and correctness do not depend on it.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  if (bytes < (int64_t{4} << 20)) return;  // at most one whole huge page lies in less
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_HUGE_PAGES_H_
