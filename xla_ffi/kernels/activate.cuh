// Activations in float32, by the formulas of jax_fp4/_activations.py in their order of operations:
// act(gate, linear), or act(x) where there is no gate.
//
// Finite arguments give NaN nowhere, and what is finite wherever it fits: a factor that may be
// infinite never meets one that underflows to 0. NaN stays NaN.
#ifndef JAX_FP4_XLA_FFI_KERNELS_ACTIVATE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_ACTIVATE_CUH_

#include "ptx.cuh"
#include "quantize_transpose.h"

namespace jax_fp4::cuda {

// 1 / (1 + exp(-x)): 13 instructions without a branch, of which expf is 8. The sum is taken a 16th,
// whose reciprocal `reciprocal` rounds correctly also where the sigmoid is denormal; what
// overflowed gives 0, as in the formula. NaN gives 0 too, which everyone multiplies by a NaN.
//
// Relative error, from a sweep of the same operations on the host (every 23rd float32): below
// 2^-22.5 with an exact ex2 inside expf and below 2^-21.2 with one that is wrong by the 2^-22 that
// PTX allows; for a denormal sigmoid (x < -87.3) 3 units of the last place.
__device__ __forceinline__ float sigmoid(float x) {
  const float sum = fminf(__fmaf_rn(expf(-x), 0x1p-4f, 0x1p-4f), kFloatMax);
  return reciprocal(sum) * 0x1p-4f;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// x sigmoid(2 z) with z of the tanh form; the bound keeps powers of x finite.
__device__ __forceinline__ float gelu(float x) {
  constexpr float kSlope = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  const float bounded = fminf(fmaxf(x, -20.0f), 20.0f);
  const float cube = bounded * (bounded * bounded);
  return x * sigmoid(kSlope * (bounded + 0.044715f * cube));
}

// max(x, 0) that keeps NaN; +0 for both zeros.
__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// min(x, limit) and max(x, limit) that keep NaN.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

__device__ __forceinline__ float softcap(float x, float beta) { return beta * tanhf(x / beta); }

template <Activation kind>
__device__ __forceinline__ float activate(const ActivatedInput& a, float x, float linear) {
  static_assert(kind != Activation::kNone, "x is given");
  if constexpr (kind == Activation::kSwiglu) return silu(x) * linear;
  if constexpr (kind == Activation::kGeglu) return gelu(x) * linear;
  if constexpr (kind == Activation::kClampedQgeglu) {
    const float gate = at_most(x, a.limit);
    const float shifted = at_most(at_least(linear, -a.limit), a.limit) + a.offset;
    return gate * sigmoid(a.alpha * gate) * shifted;
  }
  if constexpr (kind == Activation::kSituGlu)
    return softcap(x, a.beta1) * sigmoid(x) * softcap(linear, a.beta2);
  if constexpr (kind == Activation::kSilu) return silu(x);
  if constexpr (kind == Activation::kGelu) return gelu(x);
  if constexpr (kind == Activation::kRelu) return relu(x);
  if constexpr (kind == Activation::kSquaredRelu) return relu(x) * relu(x);
}

// The activation of the problem, chosen at run time.
__device__ __forceinline__ float activate(const ActivatedInput& a, float x, float linear) {
  switch (a.kind) {
    case Activation::kNone:
      return x;
    case Activation::kSwiglu:
      return activate<Activation::kSwiglu>(a, x, linear);
    case Activation::kGeglu:
      return activate<Activation::kGeglu>(a, x, linear);
    case Activation::kClampedQgeglu:
      return activate<Activation::kClampedQgeglu>(a, x, linear);
    case Activation::kSituGlu:
      return activate<Activation::kSituGlu>(a, x, linear);
    case Activation::kSilu:
      return activate<Activation::kSilu>(a, x, linear);
    case Activation::kGelu:
      return activate<Activation::kGelu>(a, x, linear);
    case Activation::kRelu:
      return activate<Activation::kRelu>(a, x, linear);
    case Activation::kSquaredRelu:
      return activate<Activation::kSquaredRelu>(a, x, linear);
  }
  return x;
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_ACTIVATE_CUH_
