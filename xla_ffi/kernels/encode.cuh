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

// An eighth of the encode multiplier under a calm scale, for scale bytes below 0x7F.
__device__ __forceinline__ float eighth_multiplier(uint32_t scale, float decode) {
  return fminf(reciprocal(e4m3_value(scale) * decode), kFloatMax) * 0.125f;
}

// True if a byte of the four is 0x7F; none is larger.
__device__ __forceinline__ bool has_nan_scale(uint32_t scales) {
  return ((scales + 0x01010101u) & 0x80808080u) != 0;
}

// Magnitude codes 0..7 of |v| / 8 = a in [0, 1], plus 0x40000000. The grid is three lines, and the
// code is the lowest of them (nvfp4.h): each fma rounds to the step of its line, since 2 + code *
// 2^-22 has the code in its last bits. The third is a hair below a / 2 so that its ties, all of
// which go down or to 6 by the other lines, agree.
__device__ __forceinline__ uint32_t nearest_bits(float a) {
  constexpr float kUnit = 0x1p-22f;
  const float halves = __fmaf_rn(a, 16.0f * kUnit, 2.0f);
  const float ones = __fmaf_rn(a, 8.0f * kUnit, 2.0f + 2.0f * kUnit);
  const float twos = __fmaf_rn(a, 0x1.999998p-4f * 8.0f * kUnit, 2.0f + 6.0f * kUnit);
  return __vimin3_u32(__float_as_uint(halves), __float_as_uint(ones), __float_as_uint(twos));
}
constexpr uint32_t kNearestOffset = 0x40000000u;

// Stochastic codes of a = |v| / 8 and byte `which` of `random`, plus kStochasticOffset. With p the
// power of two at or below max(a, 1/8), a * (2 / p) is |v| in units of the step there, and the sum
// with the byte rounds as |v| + u * step does, because a power of two apart.
__device__ __forceinline__ uint32_t stochastic_bits(float a, uint32_t random, int which) {
  a = fminf(a, 0.75f);
  const uint32_t power = max(__float_as_uint(a), 0x3E000000u) & 0x7F800000u;
  const float inverse = __uint_as_float(0x7F800000u - power);
  // 2^15 + byte / 256
  const float byte = __uint_as_float(__byte_perm(random, 0x47000000u, 0x7440u | which));
  const float count = __fmaf_rn(a, inverse, byte - 0x1p15f);
  return __float_as_uint(__fadd_rz(count, 0x1p23f)) + (power >> 22);
}
constexpr uint32_t kStochasticOffset = 0x4B000000u + 248u;

// 16^0 to 16^7, from a kernel parameter: known constants would become shifts and additions, which
// the busier pipe executes.
struct Places {
  uint32_t of[8];
};

// Codes of eight elements under one multiplier or eight, low nibble first: value(i) and
// multiplier(i) are asked for in order, `signs` has bit 4 i + 3 of each.
template <bool kStochastic, class Value, class Multiplier>
__device__ __forceinline__ uint32_t encode_eight(const Value& value, const Multiplier& multiplier,
                                                 uint32_t signs, const Places& places,
                                                 const uint32_t random[2]) {
  constexpr uint32_t kOffset = kStochastic ? kStochasticOffset : kNearestOffset;
  uint32_t codes = signs - kOffset * 0x11111111u;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = saturated_product(value(i), multiplier(i));
    const uint32_t code = kStochastic ? stochastic_bits(a, random[i / 4], i % 4) : nearest_bits(a);
    codes = code * places.of[i] + codes;
  }
  return codes;
}

// The sign bits of the eight values of a row, at the top of each nibble.
__device__ __forceinline__ uint32_t row_signs(const uint32_t pair[4]) {
  uint32_t sign[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sign[i] = pair[i] & 0x80008000u;
  return (__byte_perm(sign[0], sign[2], 0x5410) >> 12) +
         (__byte_perm(sign[0], sign[2], 0x7632) >> 8) +
         (__byte_perm(sign[1], sign[3], 0x5410) >> 4) + __byte_perm(sign[1], sign[3], 0x7632);
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

  // value(i) for 16 elements; `amax` may be that of a larger tile. `random` null = nearest.
  template <class Value>
  __device__ static ExactBlock of(const Value& value, uint32_t amax, float tensor_amax, float bound,
                                  const uint32_t* random) {
    const TensorScale<float> tensor = tensor_scale(tensor_amax, bound);
    ExactBlock block = {block_scale<float>(amax, tensor), 0};
    if (block.scale == kNanScale) return block;
    const float multiplier = encode_multiplier(e4m3_decode<float>(block.scale), tensor);
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
