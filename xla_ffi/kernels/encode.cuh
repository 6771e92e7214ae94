// The fast arithmetic of the tile and row kernels: sixteen-element blocks of bfloat16 values, a
// pair a register. Equal to nvfp4.h on calm scales; everything else is found by scale 0x7F and
// done again by the words of nvfp4.h.
#ifndef JAX_FP4_XLA_FFI_KERNELS_ENCODE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_ENCODE_CUH_

#include "nvfp4.h"
#include "ptx.cuh"

namespace jax_fp4::cuda {

// Two E4M3 scales from a pair of block maxima (any sign): 0x7F where one is not finite.
__device__ __forceinline__ uint32_t scale_pair(uint32_t most, float per_block_low,
                                               float per_block_high) {
  most = nan_if_infinite(most);
  return encode_e4m3_pair(fabsf(low_half(most)) * per_block_low,
                          fabsf(high_half(most)) * per_block_high);
}

// The value of a scale byte below 0x7F, subnormals too.
__device__ __forceinline__ float e4m3_value(uint32_t scale) {
  return __uint_as_float(scale << 20) * 0x1p120f;
}

// An eighth of the encode multiplier under a calm scale, for scale bytes below 0x7F; the eighth is
// taken of the reciprocal's argument, eight times as large.
__device__ __forceinline__ float eighth_multiplier(uint32_t scale, float decode) {
  const float eightfold = __uint_as_float(scale << 20) * 0x1p123f * decode;
  return fminf(reciprocal(eightfold), kFloatMax * 0.125f);
}

// True if a byte of the four is 0x7F; none is larger.
__device__ __forceinline__ bool has_nan_scale(uint32_t scales) {
  return ((scales + 0x01010101u) & 0x80808080u) != 0;
}

// Magnitude codes 0..7 of |v| / 8 = a in [0, 1], plus 0x40000000. The grid is three lines, and the
// code is the lowest of them (nvfp4.h): each fma rounds to the step of its line, since 2 + code *
// 2^-22 has the code in its last bits. The third only tells 6 from 7, at |v| = 5: it is 6 + |v| /
// 10, a hair less, so that 5 itself goes down.
__device__ __forceinline__ uint32_t nearest_bits(float a) {
  constexpr float kUnit = 0x1p-22f;
  const float halves = __fmaf_rn(a, 16.0f * kUnit, 2.0f);
  const float ones = __fmaf_rn(a, 8.0f * kUnit, 2.0f + 2.0f * kUnit);
  const float twos = __fmaf_rn(a, 0x1.999998p-4f * 8.0f * kUnit, 2.0f + 6.0f * kUnit);
  return __vimin3_u32(__float_as_uint(halves), __float_as_uint(ones), __float_as_uint(twos));
}
constexpr uint32_t kNearestOffset = 0x40000000u;  // its multiples by places beyond 0 vanish

// The stochastic code of a = |v| / 8 in [0, 1] and byte `which` of `random`, 0 to 8, in the top
// byte, plus kStochasticOffset there. From |v| = 1 on, the bits of a float are its place on the
// grid, two codes a binade, 2^22 a code; below, those of (|v| + 1) / 2 are. There the random
// number, added as bits, carries as |v| + u * step(|v|) does. Only where |v| < 1/4 is that sum
// inexact: it rounds to 1/2 from 2^-26 below it on. Adding 2^-26 to |v| first does the same, and
// larger |v| lose it.
__device__ __forceinline__ uint32_t stochastic_byte(float a, uint32_t random, int which) {
  const float twice = __fadd_rz(__fadd_rz(a, 0x1p-29f), 0x1p-3f);  // (|v| + 1) / 8
  const uint32_t place =
      max(__float_as_uint(a), __float_as_uint(twice) - 0x00800000u);  // one exponent less
  return place * 4u + __byte_perm(random, 0, 0x4044u | which << 8);   // the byte under the top one
}
constexpr uint32_t kStochasticOffset = 246;  // top byte of code 0, whose place is that of 1/16

// Eight such codes, low nibble first, with the signs; 8, which stands for more than 6, becomes 7.
__device__ __forceinline__ uint32_t pack_top_bytes(const uint32_t code[8], uint32_t signs) {
  // 10 in each byte takes the offset back to 256; each byte but the lowest gets the carry of the
  // one below it.
  constexpr uint32_t kBack = (256 - kStochasticOffset) * 0x01010101u - 0x01010100u;
  static_assert(kBack == 0x0909090Au);
  const auto four = [&](int first) {
    return __byte_perm(__byte_perm(code[first], code[first + 2], 0x0073),
                       __byte_perm(code[first + 4], code[first + 6], 0x0073), 0x5410);
  };
  const uint32_t codes = four(1) * 16u + four(0) + kBack * 17u;
  return (codes - ((codes & 0x88888888u) >> 3)) | signs;
}

// 16^0 to 16^7, from a kernel parameter: known constants would become shifts and additions, which
// the busier pipe executes.
struct Places {
  uint32_t of[8];

  static Places make() {
    Places places;
    for (int i = 0; i < 8; ++i) places.of[i] = 1u << (4 * i);
    return places;
  }
};

// Adds the nearest code of element i to those that its line of eight has so far, from element 0 on.
__device__ __forceinline__ void add_code(uint32_t& codes, uint32_t code, int i,
                                         const Places& places) {
  codes = i == 0 ? codes + code - kNearestOffset : code * places.of[i] + codes;
}

// Codes of eight elements under one multiplier, low nibble first: value(i) is asked for in order,
// `signs` has bit 4 i + 3 of each.
template <bool kStochastic, class Value>
__device__ __forceinline__ uint32_t encode_eight(const Value& value, float multiplier,
                                                 uint32_t signs, const Places& places,
                                                 const uint32_t random[2]) {
  uint32_t codes = signs, code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = saturated_product(value(i), multiplier);
    if (kStochastic)
      code[i] = stochastic_byte(a, random[i / 4], i % 4);
    else
      add_code(codes, nearest_bits(a), i, places);
  }
  return kStochastic ? pack_top_bytes(code, signs) : codes;
}

// The sign bits of the eight values of a row, at the top of each nibble.
__device__ __forceinline__ uint32_t row_signs(const uint32_t pair[4]) {
  const uint32_t low = __byte_perm(pair[0], pair[1], 0x7351);   // bytes of elements 0 2 1 3
  const uint32_t high = __byte_perm(pair[2], pair[3], 0x7351);  // of 4 6 5 7
  const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
  return ((odd & 0xF0F0F0F0u) | ((even >> 4) & 0x0F0F0F0Fu)) & 0x88888888u;
}

// Byte c of word r becomes byte r of word c.
__device__ __forceinline__ void transpose_bytes(const uint32_t in[4], uint32_t out[4]) {
  const uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

// Nibble c of word r becomes nibble r of word c.
__device__ __forceinline__ void transpose_nibbles(const uint32_t in[8], uint32_t out[8]) {
  constexpr uint32_t kLow = 0x0F0F0F0Fu;
  uint32_t even[4], odd[4];  // byte j: nibbles 2 j, or 2 j + 1, of words 2 i and 2 i + 1
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = (in[2 * i] & kLow) | ((in[2 * i + 1] << 4) & ~kLow);
    odd[i] = ((in[2 * i] >> 4) & kLow) | (in[2 * i + 1] & ~kLow);
  }
  transpose_bytes(even, even);
  transpose_bytes(odd, odd);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
}

// Eight codes times their block scale, as pairs of bfloat16, with the signs of `pair`.
__device__ __forceinline__ uint4 product_values(uint32_t codes, float scale,
                                                const uint32_t pair[4]) {
  // The two bytes of 0 .5 1 1.5 2 3 4 6 in bfloat16.
  constexpr uint32_t kHigh0 = 0x3F3F3F00u, kHigh1 = 0x40404040u;
  constexpr uint32_t kLow0 = 0xC0800000u, kLow1 = 0xC0804000u;
  const uint32_t factor = pack_bfloat16(scale, scale), magnitudes = codes & 0x77777777u;
  uint32_t out[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t which = magnitudes >> (16 * half);
    const uint32_t high = __byte_perm(kHigh0, kHigh1, which);
    const uint32_t low = __byte_perm(kLow0, kLow1, which);
    const uint32_t first = __byte_perm(low, high, 0x5140), second = __byte_perm(low, high, 0x7362);
    out[2 * half] = multiply_pairs(first, factor) | (pair[2 * half] & 0x80008000u);
    out[2 * half + 1] = multiply_pairs(second, factor) | (pair[2 * half + 1] & 0x80008000u);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// ---- By the words of nvfp4.h -------------------------------------------------------------------

// A block done again: its scale, and its sixteen codes.
struct ExactBlock {
  uint32_t scale;
  uint64_t codes;

  // Of value(i) for 16 elements. `random` null = nearest.
  template <class Value>
  __device__ static ExactBlock of(const Value& value, uint32_t scale,
                                  const TensorScale<float>& tensor, const uint32_t* random) {
    ExactBlock block = {scale, 0};
    if (scale == kNanScale) return block;
    const float multiplier = encode_multiplier(e4m3_decode<float>(scale), tensor);
#pragma unroll 1
    for (int i = 0; i < kBlock; ++i) {
      const float v = value(i) * multiplier;
      const uint32_t byte = random == nullptr ? 0 : (random[i / 4] >> (i % 4 * 8)) & 0xFFu;
      const uint64_t code = random == nullptr ? e2m1_nearest(v) : e2m1_stochastic(v, byte);
      block.codes |= code << (4 * i);
    }
    return block;
  }
};

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_ENCODE_CUH_
