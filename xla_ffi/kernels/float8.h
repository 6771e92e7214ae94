// The 8-bit formats in code (numerics.md, section 3), on the terms of nvfp4.h: each float operation
// is one float32 rounding, denormals are kept, every lane acts alone, nothing is shared by the
// linker. Codes saturate and round to nearest even, subnormals are kept, the sign is copied; NaN is
// 0x7F, and so is every NaN that is decoded one: 0x7FC00000.
#ifndef JAX_FP4_XLA_FFI_KERNELS_FLOAT8_H_
#define JAX_FP4_XLA_FFI_KERNELS_FLOAT8_H_

#include "nvfp4.h"

namespace jax_fp4 {

constexpr float kE5M2Max = 57344.0f;
constexpr uint32_t kE8M0Nan = 255;

JAX_FP4_FN float largest_code(Float8Codes codes) {
  return codes == Float8Codes::kE4M3 ? kE4M3Max : kE5M2Max;
}

// Elements along the blocked axis that share a scale; 1 where the whole matrix does.
JAX_FP4_FN int64_t float8_block(Float8Scaling scaling) {
  switch (scaling) {
    case Float8Scaling::kMxfp8:
      return 32;
    case Float8Scaling::kBlock:
      return 128;
    case Float8Scaling::kTensor:
      return 1;
  }
  return 1;
}

// ---- Codes -----------------------------------------------------------------------------------

// Nearest-even code of value in [0, 57344].
template <class F>
JAX_FP4_FN Bits<F> e5m2_encode(F value) {
  using L = Lanes<F>;
  const Bits<F> u = L::bits(value);
  const Bits<F> normal = ((u + 0xFFFFFu + ((u >> 21) & 1u)) >> 21) - (112u << 2);
  const Bits<F> subnormal = L::bits(value + 0x1p7f) - 0x43000000u;  // steps of 2^-16
  return value < L::splat(0x1p-14f) ? subnormal : normal;
}

// The value of any byte: the upper half of a float16.
template <class F>
JAX_FP4_FN F e5m2_decode_signed(Bits<F> byte) {
  using L = Lanes<F>;
  const Bits<F> code = byte & 0x7Fu, inf = L::splat_bits(0x7Cu);
  const F subnormal = L::from_bits(code + 0x43000000u) - 0x1p7f;
  const F normal = L::from_bits((code << 21) + (112u << 23));
  const Bits<F> finite = L::bits(code < L::splat_bits(4) ? subnormal : normal);
  const Bits<F> magnitude = code < inf ? finite : L::splat_bits(kInfBits);
  const Bits<F> signed_bits = magnitude | ((byte & 0x80u) << 24);
  return L::from_bits(code > inf ? L::splat_bits(kNanBits) : signed_bits);
}

template <Float8Codes codes, class F>
JAX_FP4_FN Bits<F> float8_encode(F value) {
  using L = Lanes<F>;
  constexpr bool e4m3 = codes == Float8Codes::kE4M3;
  const Bits<F> u = L::bits(value) & kMagnitude;
  // Integers, so that NaN and Inf land on the largest value.
  const F a = L::from_bits(L::lesser(u, L::splat_bits(e4m3 ? 0x43E00000u : 0x47600000u)));
  Bits<F> code;
  if constexpr (e4m3)
    code = e4m3_encode(a);
  else
    code = e5m2_encode(a);
  const Bits<F> number = code | ((L::bits(value) >> 24) & 0x80u);
  return u > L::splat_bits(kInfBits) ? L::splat_bits(0x7Fu) : number;
}

template <Float8Codes codes, class F>
JAX_FP4_FN F float8_decode(Bits<F> byte) {
  if constexpr (codes == Float8Codes::kE4M3)
    return e4m3_decode_signed<F>(byte);
  else
    return e5m2_decode_signed<F>(byte);
}

// ---- Scales ----------------------------------------------------------------------------------

// The E8M0 scale of a block whose absolute maximum has these bits: fl(amax * fl(1/largest)) rounded
// up to a power of two; Inf gives 254, NaN 255.
template <class F>
JAX_FP4_FN Bits<F> e8m0_scale(Bits<F> amax_bits, float largest) {
  using L = Lanes<F>;
  const Bits<F> bits = L::bits(L::from_bits(amax_bits) * (1.0f / largest)) & kMagnitude;
  const Bits<F> exponent = bits >> 23, mantissa = bits & 0x7FFFFFu, zero = L::splat_bits(0);
  const Bits<F> up = exponent + (mantissa == zero ? zero : L::splat_bits(1));
  // 2^-127, the least scale, is denormal in float32.
  const Bits<F> e = bits <= L::splat_bits(0x400000u) ? zero : up;
  const Bits<F> capped = L::lesser(e, L::splat_bits(254));
  return bits > L::splat_bits(kInfBits) ? L::splat_bits(kE8M0Nan) : capped;
}

// 2^(exponent - 127) for exponent 0 to 254; of any larger one NaN.
template <class F>
JAX_FP4_FN F power_of_two(Bits<F> exponent) {
  using L = Lanes<F>;
  const Bits<F> zero = L::splat_bits(0);
  const Bits<F> bits = exponent == zero ? L::splat_bits(0x400000u) : exponent << 23;
  return L::from_bits(exponent > L::splat_bits(254) ? L::splat_bits(kNanBits) : bits);
}

// What the elements of a block under an E8M0 scale are multiplied by: 2^(127 - scale).
template <class F>
JAX_FP4_FN F e8m0_multiplier(Bits<F> scale) {
  using L = Lanes<F>;
  const Bits<F> exponent = 254u - scale;
  return power_of_two<F>(scale == L::splat_bits(kE8M0Nan) ? scale : exponent);
}

// What elements are multiplied by whose absolute maximum has these bits:
// fl(largest / max(amax, eps)), at most FLT_MAX; 1 where that maximum is 0 or not finite.
template <class F>
JAX_FP4_FN F float8_scale(Bits<F> amax_bits, float largest, float eps, bool powers_of_two) {
  using L = Lanes<F>;
  const F amax = L::from_bits(amax_bits);
  const F counted = amax < L::splat(eps) ? L::splat(eps) : amax;  // NaN stays
  const F quotient = lesser(L::splat(largest) / counted, L::splat(kFloatMax));
  const Bits<F> bits = L::bits(counted) & kMagnitude;
  const F finite = bits < L::splat_bits(kInfBits) ? quotient : L::splat(1.0f);
  const F scale = bits == L::splat_bits(0) ? L::splat(1.0f) : finite;
  return powers_of_two ? L::from_bits(L::bits(scale) & kInfBits) : scale;
}

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_KERNELS_FLOAT8_H_
