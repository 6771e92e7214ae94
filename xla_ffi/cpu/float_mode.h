// Default floating-point mode while it lives: nearest rounding, denormals kept, traps off.
// XLA runs its threads with FTZ and DAZ; numerics.md keeps every denormal.
#ifndef JAX_FP4_XLA_FFI_CPU_FLOAT_MODE_H_
#define JAX_FP4_XLA_FFI_CPU_FLOAT_MODE_H_

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_fp4 {

class ExactFloatMode {
 public:
#if defined(__x86_64__)
  ExactFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ExactFloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  ExactFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~ExactFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }
#else
#error "jax_fp4 knows the floating-point mode of x86-64 and aarch64 only"
#endif
  ExactFloatMode(const ExactFloatMode&) = delete;
  ExactFloatMode& operator=(const ExactFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned int saved_;
#else
  uint64_t saved_;
#endif
};

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_FLOAT_MODE_H_
