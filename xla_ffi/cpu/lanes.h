// The widest vector of floats of the instruction set this translation unit is compiled for.
#ifndef JAX_FP4_XLA_FFI_CPU_LANES_H_
#define JAX_FP4_XLA_FFI_CPU_LANES_H_

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../kernels/nvfp4.h"

#if defined(__AVX512F__)
#define JAX_FP4_LANES 16
#elif defined(__AVX2__)
#define JAX_FP4_LANES 8
#else
#define JAX_FP4_LANES 4
#endif

namespace jax_fp4 {

constexpr int kLanes = JAX_FP4_LANES;
static_assert(kBlock % kLanes == 0, "a 16x16 tile is a whole number of vectors");

using F = float __attribute__((vector_size(4 * JAX_FP4_LANES)));
using I = int32_t __attribute__((vector_size(4 * JAX_FP4_LANES)));
using U = uint32_t __attribute__((vector_size(4 * JAX_FP4_LANES)));
using Wide = uint64_t __attribute__((vector_size(4 * JAX_FP4_LANES)));

// Lanes of a, then of b, by number. (__builtin_shufflevector is in clang, and in GCC since 12.)
template <int... lane, class V>
JAX_FP4_FN V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane...);
#else
  using Numbers = decltype(a < b);  // the vector of int32_t of V's size
  return __builtin_shuffle(a, b, Numbers{lane...});
#endif
}

// 64-bit products of the even 32-bit lanes with b.
JAX_FP4_FN Wide multiply_even(Wide a, uint32_t b) {
#if defined(__AVX512F__)
  // masked: g++ 12 takes the unmasked form for a use of an uninitialised value
  return (Wide)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__x86_64__)
  return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFull) * static_cast<uint64_t>(b);
#endif
}

template <>
struct Lanes<F> {
  using U = jax_fp4::U;
  JAX_FP4_MEMBER U bits(F value) { return (U)value; }
  JAX_FP4_MEMBER F from_bits(U value) { return (F)value; }
  JAX_FP4_MEMBER F splat(float value) { return value - F{}; }
  JAX_FP4_MEMBER U splat_bits(uint32_t value) { return value - U{}; }
  JAX_FP4_MEMBER U truncate(F value) { return (U) __builtin_convertvector(value, I); }
  JAX_FP4_MEMBER U lesser(U a, U b) { return (U)((I)a < (I)b ? (I)a : (I)b); }
  JAX_FP4_MEMBER U greater(U a, U b) { return (U)((I)a < (I)b ? (I)b : (I)a); }
  JAX_FP4_MEMBER U multiply(U a, uint32_t b, U* high) {
    const Wide even = multiply_even((Wide)a, b), odd = multiply_even((Wide)a >> 32, b);
    *high = (U)((even >> 32) | (odd & 0xFFFFFFFF00000000ull));
    return (U)((even & 0xFFFFFFFFull) | (odd << 32));
  }
};

JAX_FP4_FN F load(const float* from) {
  F value;
  memcpy(&value, from, sizeof(value));
  return value;
}

JAX_FP4_FN U load(const uint32_t* from) {
  U value;
  memcpy(&value, from, sizeof(value));
  return value;
}

using Half = uint16_t __attribute__((vector_size(2 * JAX_FP4_LANES)));

// Words of memory, each in the low bits of a lane.
JAX_FP4_FN U load_words(const uint32_t* from) { return load(from); }
JAX_FP4_FN U load_words(const uint16_t* from) {
  Half half;
  memcpy(&half, from, sizeof(half));
  return __builtin_convertvector(half, U);
}

// E2M1 codes 8 bytes wide become 16 lanes; this is the vector that starts at code `lane`.
JAX_FP4_FN U unpack_codes(uint64_t packed, int lane) {
  Wide shift;
  for (int i = 0; i < kLanes / 2; ++i) shift[i] = static_cast<uint64_t>(4 * lane + 8 * i);
  const Wide byte = (packed - Wide{}) >> shift;
  return (U)((byte & 0xFull) | (byte << 28 & 0xF00000000ull));
}

// The value of each code, by table where there is one in registers.
JAX_FP4_FN F code_values(U code) {
#if defined(__AVX512F__)
  const U all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (F)_mm512_maskz_permutexvar_ps(0xFFFF, (__m512i)code, (__m512)e2m1_decode<F>(all));
#elif defined(__AVX2__)
  const U all = {0, 1, 2, 3, 4, 5, 6, 7};
  const U value = (U)_mm256_permutevar8x32_ps((__m256)e2m1_decode<F>(all), (__m256i)code);
  return (F)(value | ((code & 8u) << 28));
#else
  return e2m1_decode<F>(code);
#endif
}

// The low halves of 32-bit lanes.
JAX_FP4_FN void store_halves(uint16_t* to, U value) {
  const Half half = __builtin_convertvector(value, Half);
  memcpy(to, &half, sizeof(half));
}

// low[0], high[0], low[1], high[1], ...
JAX_FP4_FN void store_interleaved(uint32_t* to, U low, U high) {
#if JAX_FP4_LANES == 16
  const U first = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(low, high);
  const U second = shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(low, high);
#elif JAX_FP4_LANES == 8
  const U first = shuffle<0, 8, 1, 9, 2, 10, 3, 11>(low, high);
  const U second = shuffle<4, 12, 5, 13, 6, 14, 7, 15>(low, high);
#else
  const U first = shuffle<0, 4, 1, 5>(low, high);
  const U second = shuffle<2, 6, 3, 7>(low, high);
#endif
  memcpy(to, &first, sizeof(first));
  memcpy(to + kLanes, &second, sizeof(second));
}

JAX_FP4_FN void store(float* to, F value) { memcpy(to, &value, sizeof(value)); }
JAX_FP4_FN void store(uint32_t* to, U value) { memcpy(to, &value, sizeof(value)); }

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_LANES_H_
