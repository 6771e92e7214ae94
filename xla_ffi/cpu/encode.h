// From a tile of sixteen blocks, one a lane, to their scales and codes.
#ifndef JAX_FP4_XLA_FFI_CPU_ENCODE_H_
#define JAX_FP4_XLA_FFI_CPU_ENCODE_H_

#include "tile.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

// TensorScale<F> of sixteen lanes, in memory.
struct LaneScales {
  alignas(64) float amax[kBlock], encode[kBlock], decode[kBlock], per_block[kBlock];
};

// What sixteen blocks become: E4M3 codes of the scales, and 64 bits of E2M1 codes in two halves.
struct LaneCodes {
  alignas(64) uint32_t scale[kBlock], low[kBlock], high[kBlock];
};

// The random bytes of sixteen blocks: byte i % 4 of word i / 4 belongs to element i.
struct LaneRandom {
  alignas(64) uint32_t word[4][kBlock];
};

// amax[i] belongs to lane i; a single one serves all lanes if `shared`.
void fill_scales(const float* amax, bool shared, int64_t count, float bound, LaneScales& scales) {
  alignas(64) float stored[kBlock];
  for (int i = 0; i < kBlock; ++i) stored[i] = shared ? amax[0] : i < count ? amax[i] : 0.0f;
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    const TensorScale<F> scale = tensor_scale(load(stored + lane), bound);
    store(scales.amax + lane, scale.amax);
    store(scales.encode + lane, scale.encode);
    store(scales.decode + lane, scale.decode);
    store(scales.per_block + lane, scale.per_block);
  }
}

JAX_FP4_FN TensorScale<F> lane_scale(const LaneScales& scales, int lane) {
  return {load(scales.amax + lane), load(scales.encode + lane), load(scales.decode + lane),
          load(scales.per_block + lane)};
}

JAX_FP4_FN U block_amax(const Tile& tile, int lane) {
  using L = Lanes<F>;
  U amax = L::bits(load(&tile.v[0][lane])) & kMagnitude;
  for (int i = 1; i < kBlock; ++i)
    amax = L::greater(amax, L::bits(load(&tile.v[i][lane])) & kMagnitude);
  return amax;
}

// Bits of the absolute maximum of each block; of the whole tile in every lane if `tiled`.
JAX_FP4_FN void block_amaxes(const Tile& tile, bool tiled, uint32_t amax[kBlock]) {
  for (int lane = 0; lane < kBlock; lane += kLanes) store(amax + lane, block_amax(tile, lane));
  if (!tiled) return;
  uint32_t most = 0;
  for (int i = 0; i < kBlock; ++i) most = Lanes<float>::greater(most, amax[i]);
  for (int i = 0; i < kBlock; ++i) amax[i] = most;
}

// The error of a 2-D tile in every lane: a tree over the errors of its rows.
JAX_FP4_FN void sum_tile_errors(float error[kBlock]) {
  for (int stride = kBlock / 2; stride > 0; stride /= 2)
    for (int i = 0; i < stride; ++i) error[i] = error[i] + error[i + stride];
  for (int i = 1; i < kBlock; ++i) error[i] = error[0];
}

template <ErrorNorm norm>
void four_over_six_lanes(const Tile& tile, const LaneScales& scales, bool tiled, float six_bound,
                         const uint32_t amax[kBlock], uint32_t scale[kBlock]) {
  alignas(64) uint32_t six[kBlock], four[kBlock];
  alignas(64) float six_error[kBlock], four_error[kBlock];
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    const TensorScale<F> tensor = lane_scale(scales, lane);
    const FourOverSixScales<F> codes = four_over_six_scales<F>(load(amax + lane), tensor);
    const F scale6 = e4m3_decode<F>(codes.six), scale4 = e4m3_decode<F>(codes.four);
    const F multiplier6 = encode_multiplier(scale6, tensor);
    const F multiplier4 = encode_multiplier(scale4, tensor);
    const F bound = Lanes<F>::splat(six_bound);
    F error6{}, error4{};
    for (int i = 0; i < kBlock; ++i) {
      const F a = magnitude(load(&tile.v[i][lane]));
      error6 += four_over_six_error<norm>(a, multiplier6, scale6, tensor.amax, bound);
      error4 += four_over_six_error<norm>(a, multiplier4, scale4, tensor.amax, bound);
    }
    store(six + lane, codes.six);
    store(four + lane, codes.four);
    store(six_error + lane, error6);
    store(four_error + lane, error4);
  }
  if (tiled) {
    sum_tile_errors(six_error);
    sum_tile_errors(four_error);
  }
  for (int i = 0; i < kBlock; ++i)
    scale[i] = amax[i] >= kInfBits ? kNanScale : four_error[i] < six_error[i] ? four[i] : six[i];
}

// The E4M3 scales of the sixteen blocks. `tiled`: they form one 16x16 tile with one scale, and the
// lanes are rows of x (the orientation in which four-over-six chooses).
void choose_scales(const Tile& tile, const LaneScales& scales, bool tiled, ErrorNorm norm,
                   float bound, uint32_t scale[kBlock]) {
  alignas(64) uint32_t amax[kBlock];
  block_amaxes(tile, tiled, amax);
  switch (norm) {
    case ErrorNorm::kNone:
      for (int lane = 0; lane < kBlock; lane += kLanes)
        store(scale + lane, block_scale<F>(load(amax + lane), lane_scale(scales, lane)));
      return;
    case ErrorNorm::kMae:
      return four_over_six_lanes<ErrorNorm::kMae>(tile, scales, tiled, kE2M1Max * bound, amax,
                                                  scale);
    case ErrorNorm::kMse:
      return four_over_six_lanes<ErrorNorm::kMse>(tile, scales, tiled, kE2M1Max * bound, amax,
                                                  scale);
  }
}

// The codes of elements first to first + 7 of each block, element `first` in the low bits.
template <bool stochastic>
JAX_FP4_FN U encode_half(const Tile& tile, F multiplier, int lane, int first,
                         const LaneRandom* random) {
  U half{};
#pragma GCC unroll 8
  for (int i = 0; i < kBlock / 2; ++i) {
    const F value = load(&tile.v[first + i][lane]) * multiplier;
    U code;
    if constexpr (stochastic) {
      const U word = load(&random->word[(first + i) / 4][lane]);
      code = e2m1_stochastic(value, (word >> (8 * (i % 4))) & 0xFFu);
    } else {
      code = e2m1_nearest(value);
    }
    half |= code << (4 * i);
  }
  return half;
}

// The codes of the sixteen blocks under codes.scale; `random` is null for nearest rounding.
template <bool stochastic>
JAX_FP4_FN void encode_lanes(const Tile& tile, const LaneScales& scales, const LaneRandom* random,
                             LaneCodes& codes) {
  using L = Lanes<F>;
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    const U scale = load(codes.scale + lane);
    const F multiplier = encode_multiplier(e4m3_decode<F>(scale), lane_scale(scales, lane));
    const auto finite = scale != L::splat_bits(kNanScale);
    const U low = encode_half<stochastic>(tile, multiplier, lane, 0, random);
    const U high = encode_half<stochastic>(tile, multiplier, lane, kBlock / 2, random);
    store(codes.low + lane, finite ? low : U{});
    store(codes.high + lane, finite ? high : U{});
  }
}

// index[i]: number of the block of lane i in the global tensor.
void draw(const uint32_t* key, uint32_t direction, uint32_t expert, const uint64_t index[kBlock],
          LaneRandom& random) {
  alignas(64) uint32_t low[kBlock], high[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    low[i] = static_cast<uint32_t>(index[i]);
    high[i] = static_cast<uint32_t>(index[i] >> 32);
  }
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    U counter[4] = {load(low + lane), load(high + lane), Lanes<F>::splat_bits(direction),
                    Lanes<F>::splat_bits(expert)};
    philox<F>(counter, key[0], key[1]);
    for (int w = 0; w < 4; ++w) store(&random.word[w][lane], counter[w]);
  }
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_ENCODE_H_
