// Packed weights to the registers of a warpgroup product.
#ifndef JAX_FP4_XLA_FFI_KERNELS_GEMM_DECODE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_GEMM_DECODE_CUH_

#include <stdint.h>

namespace jax_fp4::cuda {

// A product may take what it contracts in any order, if both operands have the same. This one lets
// a lane decode whole blocks of 16: of 64 elements, place 16 s + 2 t + h + 8 i has element
// 16 t + 8 (s / 2) + 2 (s % 2) + i + 4 h. Lane t of four holds block t, and the pairs of codes that
// one mask finds in a word are four apart.
__host__ __device__ inline int interleaved(int place) {
  const int s = place / 16, i = place / 8 % 2, t = place / 2 % 4, h = place % 2;
  return 16 * t + 8 * (s / 2) + 2 * (s % 2) + i + 4 * h;
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A block scale times 2^118 in both halves, of any E4M3 byte. Its magnitude's bits, four places up,
// are those of a bfloat16 that is 2^120 times smaller, also of a denormal. Too long for the loop
// over blocks, which looks scales up in a table.
__device__ __forceinline__ uint32_t widen_scale(uint32_t byte) {
  constexpr uint32_t kUp127 = 0x7F007F00u, kUp111 = 0x77007700u, kNan = 0x7FC07FC0u;
  const uint32_t magnitude = (byte & 0x7Fu) * 0x00100010u;
  const uint32_t wide = multiply_halves(multiply_halves(magnitude, kUp127), kUp111);
  return ((byte & 0x7Fu) == 0x7Fu ? kNan : wide) | (byte & 0x80u) * 0x01000100u;
}
constexpr int kScaleBytes = 256;        // there are, and so many entries has the table
constexpr float kDecodedUnit = 256.0f;  // code times scale is decoded as so many times smaller

// Eight codes to pairs (j, j + 4). The magnitude of a code, moved to bits 6 to 8, is that of a
// bfloat16 that is 2^126 times smaller; its sign belongs to bit 15. A multiplication makes both
// copies: by places[0] of codes whose nibble is the lowest of a half, by places[1] of the next.
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t scale, const uint32_t places[2],
                                            uint32_t pairs[4]) {
  constexpr uint32_t kSignAndMagnitude = 0x81C081C0u, kFirst = 0x000F000Fu, kSecond = 0x00F000F0u;
  const uint32_t later = word >> 8;
  pairs[0] = (word & kFirst) * places[0];
  pairs[1] = (word & kSecond) * places[1];
  pairs[2] = (later & kFirst) * places[0];
  pairs[3] = (later & kSecond) * places[1];
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = multiply_halves(pairs[j] & kSignAndMagnitude, scale);
}
constexpr uint32_t kFirstPlaces = 1u << 6 | 1u << 12, kSecondPlaces = 1u << 2 | 1u << 8;

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_GEMM_DECODE_CUH_
