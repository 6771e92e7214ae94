// NVFP4 in code: the one codec that the CPU kernels and the device kernels share.
//
// Contract (the words are numerics.md, sections 1.1 to 1.9; the bits are fixed):
//   * every float operation here is one float32 rounding to nearest even, in the order written; no
//     contraction, no fast-math, no flushing of denormals (-ffp-contract=off, -fmad=false
//     -ftz=false; CPU threads clear FTZ and DAZ around the work). Nothing needs an fma: the one
//     that the text writes has an exact product (e2m1_stochastic).
//   * E2M1 codes: 3-bit magnitude 0..7 means 0 .5 1 1.5 2 3 4 6, bit 3 is the input's sign bit.
//   * E4M3 codes: bias 7, subnormals kept, 0x7F is NaN, the largest finite value is 448.
//   * a block with a non-finite element has scale 0x7F and codes 0; a non-finite tensor amax counts
//     as 6 * bound wherever it is read, and is stored as +Inf or as the NaN 0x7FC00000.
//
// F is the lane type: float for one element, or a vector of floats (CPU), for which Lanes<F> is
// specialised. Every function acts on each lane alone, so a result never depends on the width.
// Everything is force-inlined with internal linkage: this header is compiled for several
// instruction sets into one binary and must leave no shared symbol behind.
#ifndef JAX_FP4_XLA_FFI_KERNELS_NVFP4_H_
#define JAX_FP4_XLA_FFI_KERNELS_NVFP4_H_

#include <stdint.h>
#include <string.h>

#include "types.h"

#if defined(__CUDACC__)
#define JAX_FP4_MEMBER __host__ __device__ __forceinline__ static
#define JAX_FP4_FN __host__ __device__ __forceinline__ static
#if defined(__CUDA_ARCH__)
#define JAX_FP4_UNROLL _Pragma("unroll")  // arrays stay in registers
#else
#define JAX_FP4_UNROLL
#endif
#else
#define JAX_FP4_MEMBER [[gnu::always_inline]] inline static
#define JAX_FP4_FN [[gnu::always_inline]] inline static
#define JAX_FP4_UNROLL
#endif

namespace jax_fp4 {

constexpr int kBlock = 16;          // elements that share one E4M3 scale
constexpr int kBlockCodeBytes = 8;  // two codes a byte
constexpr float kE2M1Max = 6.0f;
constexpr float kE4M3Max = 448.0f;
constexpr float kFloatMax = 0x1.fffffep127f;
constexpr float kOneSixth = 1.0f / 6.0f;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint32_t kNanScale = 0x7Fu;
constexpr uint32_t kHadamardSigns = 0xD7E8u;  // bit i: element i is negated first

JAX_FP4_FN int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a stored row of the column-wise form that hold m rows, whatever the sizes of so many
// groups.
JAX_FP4_FN int64_t grouped_blocks(int64_t m, int64_t groups) {
  return (m + (kBlock - 1) * groups) / kBlock;
}

// Words of a seed: of the key, and where x begins. Of split groups it goes on with the row of each
// whole group at which x begins, and then with the rows that each has.
constexpr int kSeedWords = 4;
JAX_FP4_FN int64_t seed_words(bool split_groups, int64_t groups) {
  return kSeedWords + (split_groups ? 2 * groups : 0);
}

// What a lane type must offer. Bit patterns compared by lesser and greater are below 2^31.
template <class F>
struct Lanes;

template <>
struct Lanes<float> {
  using U = uint32_t;
  JAX_FP4_MEMBER U bits(float value) {
    U out;
    memcpy(&out, &value, sizeof(out));
    return out;
  }
  JAX_FP4_MEMBER float from_bits(U value) {
    float out;
    memcpy(&out, &value, sizeof(out));
    return out;
  }
  JAX_FP4_MEMBER float splat(float value) { return value; }
  JAX_FP4_MEMBER U splat_bits(uint32_t value) { return value; }
  JAX_FP4_MEMBER U truncate(float value) { return static_cast<U>(static_cast<int32_t>(value)); }
  JAX_FP4_MEMBER U lesser(U a, U b) { return a < b ? a : b; }
  JAX_FP4_MEMBER U greater(U a, U b) { return a < b ? b : a; }
  // low and high halves of the 64-bit product
  JAX_FP4_MEMBER U multiply(U a, uint32_t b, U* high) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    *high = static_cast<U>(product >> 32);
    return static_cast<U>(product);
  }
};

template <class F>
using Bits = typename Lanes<F>::U;

template <class F>
JAX_FP4_FN F lesser(F a, F b) {
  return a < b ? a : b;
}

template <class F>
JAX_FP4_FN F magnitude(F value) {
  return Lanes<F>::from_bits(Lanes<F>::bits(value) & kMagnitude);
}

// ---- E2M1 ------------------------------------------------------------------------------------

// |value| clamped to 6, by integers so that NaN lands on 6 too.
template <class F>
JAX_FP4_FN F e2m1_clamped_magnitude(F value) {
  using L = Lanes<F>;
  const Bits<F> six = L::splat_bits(0x40C00000u);
  return L::from_bits(L::lesser(L::bits(value) & kMagnitude, six));
}

// Nearest-even magnitude code of a in [0, 6], in the low three bits (bits above are not zero).
// The grid is three lines, and the code is the lowest of them:
//   min(rne(2a), rne(a) + 2, rne(a/2) + 4).
// Adding 2^22, 2^23 + 2 and 2^24 + 8 rounds a to steps of .5, 1 and 2 with ties to even and leaves
// the counts in the low bits; the integer additions give the three sums one exponent.
template <class F>
JAX_FP4_FN Bits<F> e2m1_nearest_magnitude(F a) {
  using L = Lanes<F>;
  const Bits<F> halves = L::bits(a + 0x1p22f) + 0x00800000u;
  const Bits<F> ones = L::bits(a + (0x1p23f + 2.0f));
  const Bits<F> twos = L::bits(a + (0x1p24f + 8.0f)) - 0x00800000u;
  return L::lesser(L::lesser(halves, ones), twos);
}

template <class F>
JAX_FP4_FN Bits<F> e2m1_nearest(F value) {
  const Bits<F> code = e2m1_nearest_magnitude(e2m1_clamped_magnitude(value));
  return (code & 7u) | ((Lanes<F>::bits(value) >> 28) & 8u);
}

// One random byte in `random` chooses the neighbour. u * step is a byte times a power of two, so
// it is exact and fma(u, step, a) is the rounded sum written here.
template <class F>
JAX_FP4_FN Bits<F> e2m1_stochastic(F value, Bits<F> random) {
  using L = Lanes<F>;
  const F a = e2m1_clamped_magnitude(value);
  const F u = L::from_bits(random | 0x4B000000u) - 0x1p23f;  // the byte as a float
  const auto below2 = a < L::splat(2.0f);
  const auto below4 = a < L::splat(4.0f);
  const F step = below2 ? L::splat(0x1p-9f) : below4 ? L::splat(0x1p-8f) : L::splat(0x1p-7f);
  const F inverse = below2 ? L::splat(2.0f) : below4 ? L::splat(1.0f) : L::splat(0.5f);
  const Bits<F> first = below2 ? L::splat_bits(0) : below4 ? L::splat_bits(2) : L::splat_bits(4);
  const Bits<F> count = L::truncate((a + u * step) * inverse);  // at most 4, 4 and 3
  return (count + first) | ((L::bits(value) >> 28) & 8u);
}

// The value of a magnitude code 0..7.
template <class F>
JAX_FP4_FN F e2m1_decode_magnitude(Bits<F> code) {
  using L = Lanes<F>;
  const Bits<F> normal = (code << 22) + 0x3F000000u;
  const Bits<F> subnormal = (L::splat_bits(0) - code) & 0x3F000000u;  // 0 or .5
  return L::from_bits(code < L::splat_bits(2) ? subnormal : normal);
}

// The value of a code 0..15.
template <class F>
JAX_FP4_FN F e2m1_decode(Bits<F> code) {
  using L = Lanes<F>;
  const F value = e2m1_decode_magnitude<F>(code & 7u);
  return L::from_bits(L::bits(value) | ((code & 8u) << 28));
}

// ---- E4M3 ------------------------------------------------------------------------------------

// Nearest-even code of value in [0, 448].
template <class F>
JAX_FP4_FN Bits<F> e4m3_encode(F value) {
  using L = Lanes<F>;
  const Bits<F> u = L::bits(value);
  const Bits<F> normal = ((u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
  const Bits<F> subnormal = L::bits(value + 0x1p14f) - 0x46800000u;  // steps of 2^-9
  return value < L::splat(0x1p-6f) ? subnormal : normal;
}

// The value of a code 0..0x7F, which is every scale that quantization makes; 0x7F is NaN.
template <class F>
JAX_FP4_FN F e4m3_decode(Bits<F> code) {
  using L = Lanes<F>;
  const F subnormal = L::from_bits(code + 0x46800000u) - 0x1p14f;
  const F normal = L::from_bits((code << 20) + (120u << 23));
  const F finite = code < L::splat_bits(8) ? subnormal : normal;
  return code == L::splat_bits(kNanScale) ? L::from_bits(L::splat_bits(kNanBits)) : finite;
}

// The value of any byte: bit 7 is the sign, 0x7F and 0xFF are the same NaN.
template <class F>
JAX_FP4_FN F e4m3_decode_signed(Bits<F> byte) {
  using L = Lanes<F>;
  const Bits<F> code = byte & 0x7Fu;
  const Bits<F> sign = code == L::splat_bits(kNanScale) ? L::splat_bits(0) : (byte & 0x80u) << 24;
  return L::from_bits(L::bits(e4m3_decode<F>(code)) | sign);
}

// ---- Scales ----------------------------------------------------------------------------------

// The amax that is stored, from the integer maximum of the |bits|.
template <class F>
JAX_FP4_FN Bits<F> stored_amax(Bits<F> bits) {
  using L = Lanes<F>;
  return bits > L::splat_bits(kInfBits) ? L::splat_bits(kNanBits) : bits;
}

// The amax that is read: a non-finite one counts as 6 * bound.
template <class F>
JAX_FP4_FN F counted_amax(F amax, float bound) {
  using L = Lanes<F>;
  const auto finite = (L::bits(amax) & kMagnitude) < L::splat_bits(kInfBits);
  return finite ? amax : L::splat(bound * kE2M1Max);
}

// What a tensor's (or row's) amax says about its blocks.
template <class F>
struct TensorScale {
  F amax;       // finite
  F encode;     // S_enc
  F decode;     // S_dec
  F per_block;  // m
};

template <class F>
JAX_FP4_FN TensorScale<F> tensor_scale(F stored, float bound) {
  using L = Lanes<F>;
  TensorScale<F> scale;
  scale.amax = counted_amax(stored, bound);
  const F quotient = lesser(L::splat(bound * kE2M1Max) / scale.amax, L::splat(kFloatMax));
  scale.encode = scale.amax == L::splat(0.0f) ? L::splat(1.0f) : quotient;
  scale.decode = L::splat(1.0f) / scale.encode;
  scale.per_block = scale.encode * kOneSixth;
  return scale;
}

// The E4M3 scale of a block whose absolute maximum has these bits.
template <class F>
JAX_FP4_FN Bits<F> block_scale(Bits<F> amax_bits, const TensorScale<F>& tensor) {
  using L = Lanes<F>;
  // min(., FMAX) of the text is contained in min(., 448)
  const F t = lesser(L::from_bits(amax_bits) * tensor.per_block, L::splat(kE4M3Max));
  return amax_bits < L::splat_bits(kInfBits) ? e4m3_encode(t) : L::splat_bits(kNanScale);
}

// What the elements of a block are multiplied by before rounding to E2M1.
template <class F>
JAX_FP4_FN F encode_multiplier(F scale, const TensorScale<F>& tensor) {
  using L = Lanes<F>;
  return lesser(L::splat(1.0f) / (scale * tensor.decode), L::splat(kFloatMax));
}

// What the values of a block's codes are multiplied by.
template <class F>
JAX_FP4_FN F decode_multiplier(F scale, F amax, float bound) {
  return (scale * counted_amax(amax, bound)) * (1.0f / (kE2M1Max * bound));
}

// ---- Four over six -----------------------------------------------------------------------------

template <class F>
struct FourOverSixScales {
  Bits<F> six, four;
};

template <class F>
JAX_FP4_FN FourOverSixScales<F> four_over_six_scales(Bits<F> amax_bits,
                                                     const TensorScale<F>& tensor) {
  using L = Lanes<F>;
  const F base = (L::from_bits(amax_bits) / L::splat(kE2M1Max)) * tensor.encode;
  const F limit = L::splat(kE4M3Max);
  return {e4m3_encode(lesser(base, limit)), e4m3_encode(lesser(base * 1.5f, limit))};
}

// The error of one element of magnitude a under scale `scale` and its multiplier; the sign of the
// element changes neither |d| nor d * d. six_bound is 6 * bound.
template <ErrorNorm norm, class F>
JAX_FP4_FN F four_over_six_error(F a, F multiplier, F scale, F amax, F six_bound) {
  static_assert(norm != ErrorNorm::kNone, "no error without a norm");
  const Bits<F> code = e2m1_nearest_magnitude(e2m1_clamped_magnitude(a * multiplier)) & 7u;
  const F d = ((e2m1_decode_magnitude<F>(code) * scale) * amax) / six_bound - a;
  return norm == ErrorNorm::kMae ? magnitude(d) : d * d;
}

// ---- Random bytes ------------------------------------------------------------------------------

template <class F>
JAX_FP4_FN void philox_round(Bits<F> counter[4], uint32_t key0, uint32_t key1) {
  using L = Lanes<F>;
  Bits<F> high0, high1;
  const Bits<F> low0 = L::multiply(counter[0], 0xD2511F53u, &high0);
  const Bits<F> low1 = L::multiply(counter[2], 0xCD9E8D57u, &high1);
  counter[0] = high1 ^ counter[1] ^ key0;
  counter[2] = high0 ^ counter[3] ^ key1;
  counter[1] = low1;
  counter[3] = low0;
}

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

// Philox4x32-10. `counter` becomes the four output words.
template <class F>
JAX_FP4_FN void philox(Bits<F> counter[4], uint32_t key0, uint32_t key1) {
  JAX_FP4_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round<F>(counter, key0, key1);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

// ---- Hadamard ----------------------------------------------------------------------------------

// Nearest-even rounding to bfloat16, kept as float32. NaN stays NaN.
template <class F>
JAX_FP4_FN F round_to_bfloat16(F value) {
  using L = Lanes<F>;
  const Bits<F> u = L::bits(value);
  const Bits<F> rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u;
  const auto nan = (u & kMagnitude) > L::splat_bits(kInfBits);
  return L::from_bits(nan ? L::splat_bits(kNanBits) : rounded);
}

// Sixteen bfloat16 values become H16 of the signed values / 4.
template <class F>
JAX_FP4_FN void hadamard16_unrounded(F v[kBlock]) {
  using L = Lanes<F>;
  JAX_FP4_UNROLL
  for (int i = 0; i < kBlock; ++i)
    if ((kHadamardSigns >> i) & 1u) v[i] = L::from_bits(L::bits(v[i]) ^ ~kMagnitude);
  JAX_FP4_UNROLL
  for (int stride = 1; stride < kBlock; stride *= 2) JAX_FP4_UNROLL
  for (int i = 0; i < kBlock; ++i)
    if ((i & stride) == 0) {
      const F a = v[i], b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  JAX_FP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = v[i] * 0.25f;
}

// The same, rounded to bfloat16.
template <class F>
JAX_FP4_FN void hadamard16(F v[kBlock]) {
  hadamard16_unrounded(v);
  JAX_FP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = round_to_bfloat16(v[i]);
}

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_KERNELS_NVFP4_H_
