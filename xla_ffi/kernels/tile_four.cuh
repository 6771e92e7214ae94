// Four-over-six in the tile kernel: each block, or 16x16 tile, is encoded under both scales, and
// the one with the smaller error stays. Equal to nvfp4.h on calm scales.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_FOUR_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_FOUR_CUH_

#include "tile_work.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// A form's maxima as scales for 6 and for 4: those of lines 2 i and 2 i + 1 in each word.
__device__ __forceinline__ void scales_of_six_and_four(uint32_t most, float encode, uint32_t& six,
                                                       uint32_t& four) {
  most = nan_if_infinite(most);
  const float low = __fdiv_rn(fabsf(low_half(most)), kE2M1Max) * encode;
  const float high = __fdiv_rn(fabsf(high_half(most)), kE2M1Max) * encode;
  six = encode_e4m3_pair(low, high);
  four = encode_e4m3_pair(low * 1.5f, high * 1.5f);
}

// |code * scale * A / (6 B) - magnitude|, or its square. The quotient is rounded as a division is:
// a product with the rounded reciprocal and one correction do so for both values of 6 B, of any
// dividend that is calm (test_quotient of tests/cpp/fuzz_kernels.cc: for all significands).
template <ErrorNorm norm>
__device__ __forceinline__ float error_of(uint32_t code, float magnitude, float scale,
                                          const FourOverSixScale& tensor) {
  // 0 .5 1 1.5 2 3 4 6: from code 2 on a float whose bits are linear in the code; below, half as
  // far.
  const float linear = __uint_as_float(code * 0x400000u + 0x3F000000u);
  const float value = fminf(linear, __fmaf_rn(2.0f, linear, -1.0f));
  const float wide = (value * scale) * tensor.amax;
  const float guess = wide * tensor.inverse;
  const float quotient =
      __fmaf_rn(__fmaf_rn(-guess, tensor.six_bound, wide), tensor.inverse, guess);
  const float d = quotient - magnitude;
  return norm == ErrorNorm::kMae ? fabsf(d) : d * d;
}

// Eight elements of a line under one scale: their codes, and the sum of the errors of the whole
// block in the order of its elements, in both lanes that hold its halves.
template <ErrorNorm norm, class Value>
__device__ __forceinline__ float try_scale(const Value& value, float multiplier, float scale,
                                           const FourOverSixScale& tensor, const Places& places,
                                           int half, int partner, uint32_t& codes) {
  float error[kPatch], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const float v = value(i);
    const uint32_t code = nearest_bits(saturated_product(v, multiplier));
    add_code(codes, code, i, places);
    error[i] = error_of<norm>(code, fabsf(v), scale, tensor);
    sum += error[i];
  }
  // The second half goes on from where the first one ended.
  const float before = __shfl_xor_sync(~0u, sum, partner);
  float whole = half == 0 ? 0.0f : before;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) whole += error[i];
  const float other = __shfl_xor_sync(~0u, whole, partner);
  return half == 0 ? other : whole;
}

// The error of a 16x16 tile from those of a lane's rows: a tree with strides 8, 4, 2, 1.
__device__ __forceinline__ float tile_error(float error[kPatch]) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r) error[r] += __shfl_xor_sync(~0u, error[r], kDownLanes);
#pragma unroll
  for (int stride = kPatch / 2; stride > 0; stride /= 2)
#pragma unroll
    for (int r = 0; r < stride; ++r) error[r] += error[r + stride];
  return error[0];
}

// Codes, and scale bytes, of a patch's rows, which are a half of their blocks; `partner` has the
// other. `codes` holds the signs.
template <ErrorNorm norm>
__device__ __forceinline__ void encode_four_over_six(const Patch& x, int half, int partner,
                                                     const uint32_t most[4], bool tiled,
                                                     const FourOverSixScale& tensor,
                                                     const float* table, const Places& places,
                                                     uint32_t scales[2], uint32_t codes[kPatch]) {
  uint32_t six[4], four[4], with_four[kPatch];
  float six_error[kPatch], four_error[kPatch];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales_of_six_and_four(most[i], tensor.encode, six[i], four[i]);
#pragma unroll
  for (int line = 0; line < kPatch; ++line) {
    const auto value = [&](int i) { return value_of(x, line, i); };
    const auto attempt = [&](uint32_t pair, uint32_t& line_codes) {
      const uint32_t byte = line % 2 == 0 ? pair & 0xFFu : pair >> 8;
      return try_scale<norm>(value, table[byte], e4m3_value(byte), tensor, places, half, partner,
                             line_codes);
    };
    with_four[line] = codes[line];
    six_error[line] = attempt(six[line / 2], codes[line]);
    four_error[line] = attempt(four[line / 2], with_four[line]);
  }
  bool of_tile = false;
  if (tiled) of_tile = tile_error(four_error) < tile_error(six_error);
  scales[0] = scales[1] = 0;
#pragma unroll
  for (int line = 0; line < kPatch; ++line) {
    const bool takes_four = tiled ? of_tile : four_error[line] < six_error[line];
    const uint32_t pair = takes_four ? four[line / 2] : six[line / 2];
    codes[line] = takes_four ? with_four[line] : codes[line];
    scales[line / 4] |= (line % 2 == 0 ? pair & 0xFFu : pair >> 8) << (line % 4 * 8);
  }
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_FOUR_CUH_
