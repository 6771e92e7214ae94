// Codes and scales back to values: 9/16 byte read, 2 or 4 bytes written per element.
#ifndef JAX_FP4_XLA_FFI_CPU_DEQUANTIZE_KERNEL_H_
#define JAX_FP4_XLA_FFI_CPU_DEQUANTIZE_KERNEL_H_

#include "tile.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

// Stores values of dtype T, one rounding to nearest even.
template <class T>
JAX_FP4_FN void store_as(typename T::Word* to, F value) {
  using L = Lanes<F>;
  if constexpr (T::dtype == DType::kF32) {
    const U bits = L::bits(value);
    memcpy(to, &bits, sizeof(bits));
  }
  if constexpr (T::dtype == DType::kBF16) store_halves(to, L::bits(round_to_bfloat16(value)) >> 16);
  if constexpr (T::dtype == DType::kF16) {
    const U u = L::bits(round_to_float16(value)), body = u & kMagnitude;
    const U normal = (body >> 13) - (112u << 10);  // exponent bias 127 becomes 15
    const U subnormal = L::bits(L::from_bits(body) + 0.5f) - 0x3F000000u;  // steps of 2^-24
    const U finite = body < L::splat_bits(0x38800000u) ? subnormal : normal;
    const U special = L::splat_bits(0x7C00u) | ((body >> 13) & 0x3FFu);
    store_halves(to, (body < L::splat_bits(kInfBits) ? finite : special) | (u >> 31 << 15));
  }
}

template <class T>
JAX_FP4_FN void decode_block(const uint8_t* codes, float multiplier, typename T::Word* out) {
  uint64_t packed;
  memcpy(&packed, codes, sizeof(packed));
  for (int lane = 0; lane < kBlock; lane += kLanes)
    store_as<T>(out + lane, code_values(unpack_codes(packed, lane)) * multiplier);
}

// What a row's codes are multiplied by, sixteen blocks at a time.
JAX_FP4_FN void row_multipliers(const DequantizeProblem& p, const uint8_t* block_scale,
                                int64_t count, float amax, float multipliers[kBlock]) {
  alignas(64) uint32_t scale[kBlock];
  for (int i = 0; i < kBlock; ++i) scale[i] = i < count ? block_scale[i] : 0;
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    const F value = e4m3_decode_signed<F>(load(scale + lane));
    if (p.amax == nullptr)
      store(multipliers + lane, value);
    else
      store(multipliers + lane,
            decode_multiplier(value, Lanes<F>::splat(amax), static_cast<float>(p.bound)));
  }
}

template <class T>
void dequantize_row(const DequantizeProblem& p, int64_t row) {
  using Word = typename T::Word;
  const uint8_t* codes = p.codes + row * p.blocks * kBlockCodeBytes;
  const uint8_t* block_scale = p.block_scale + row * p.blocks;
  Word* out = static_cast<Word*>(p.out) + row * p.extent;
  const float amax = p.amax == nullptr ? 0.0f : p.amax[p.row_scaled ? row : row / p.rows];
  alignas(64) float multipliers[kBlock];
  const int64_t whole = p.extent / kBlock, last = p.extent % kBlock;
  for (int64_t block = 0; block < whole + (last != 0); ++block) {
    if (block % kBlock == 0)
      row_multipliers(p, block_scale + block, p.blocks - block, amax, multipliers);
    const uint8_t* from = codes + block * kBlockCodeBytes;
    if (block < whole) {
      decode_block<T>(from, multipliers[block % kBlock], out + block * kBlock);
    } else {
      Word values[kBlock];
      decode_block<T>(from, multipliers[block % kBlock], values);
      memcpy(out + block * kBlock, values, static_cast<size_t>(last) * sizeof(Word));
    }
  }
}

void dequantize(const DequantizeProblem& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) switch (p.out_dtype) {
      case DType::kF32:
        dequantize_row<F32>(p, row);
        break;
      case DType::kBF16:
        dequantize_row<BF16>(p, row);
        break;
      case DType::kF16:
        dequantize_row<F16>(p, row);
        break;
    }
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_DEQUANTIZE_KERNEL_H_
