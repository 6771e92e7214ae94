// One thread a block of sixteen: 9 bytes in, 32 or 64 out.
#include <cuda_fp16.h>

#include "dequantize.h"
#include "nvfp4.h"
#include "ptx.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kThreads = 256;

// NaN has one pattern, whatever made it.
__device__ __forceinline__ float canonical(float value) {
  return value != value ? __uint_as_float(kNanBits) : value;
}

struct F32 {
  using Word = float;
  __device__ static Word of(float value) { return canonical(value); }
};
struct BF16 {
  using Word = uint16_t;
  __device__ static Word of(float value) {
    return static_cast<uint16_t>(__float_as_uint(round_to_bfloat16(value)) >> 16);
  }
};
struct F16 {
  using Word = uint16_t;
  __device__ static Word of(float value) {
    return value != value ? 0x7E00u : __half_as_ushort(__float2half_rn(value));
  }
};

__device__ float multiplier(const DequantizeProblem& p, int64_t row, int64_t index) {
  const float scale = e4m3_decode_signed<float>(p.block_scale[index]);
  if (p.amax == nullptr) return scale;
  const float amax = p.amax[p.row_scaled ? row : row / p.rows];
  return decode_multiplier(scale, amax, static_cast<float>(p.bound));
}

// kWhole: the extent is whole blocks, so that every store is 16 bytes wide.
template <class Out, bool kWhole>
__global__ void __launch_bounds__(kThreads) dequantize(DequantizeProblem p, int64_t used) {
  using Word = typename Out::Word;
  constexpr int kVector = 16 / sizeof(Word);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.batch * p.rows * used) return;
  const int64_t row = i / used, block = i % used, index = row * p.blocks + block;
  const uint64_t codes = reinterpret_cast<const uint64_t*>(p.codes)[index];
  const float factor = multiplier(p, row, index);
  Word* out = static_cast<Word*>(p.out) + row * p.extent + block * kBlock;
  const auto value = [&](int j) {
    return Out::of(e2m1_decode<float>(static_cast<uint32_t>(codes >> (4 * j)) & 15u) * factor);
  };
  if constexpr (kWhole) {
#pragma unroll
    for (int first = 0; first < kBlock; first += kVector) {
      alignas(16) Word words[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) words[j] = value(first + j);
      *reinterpret_cast<uint4*>(out + first) = *reinterpret_cast<const uint4*>(words);
    }
  } else {
    const int64_t left = p.extent - block * kBlock;
#pragma unroll
    for (int j = 0; j < kBlock; ++j)
      if (j < left) out[j] = value(j);
  }
}

template <class Out>
cudaError_t launch(const DequantizeProblem& p, cudaStream_t stream) {
  const int64_t used = ceil_div(p.extent, kBlock), total = p.batch * p.rows * used;
  if (total == 0) return cudaSuccess;
  const int64_t grid = ceil_div(total, kThreads);
  if (grid > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (p.extent % kBlock == 0)
    dequantize<Out, true><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, used);
  else
    dequantize<Out, false><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, used);
  return cudaGetLastError();
}

}  // namespace

int64_t scratch_bytes(const DequantizeProblem&) { return 0; }

cudaError_t launch_dequantize(const DequantizeProblem& problem, void*, cudaStream_t stream) {
  const bool valid = problem.batch >= 0 && problem.rows >= 0 && problem.extent >= 0 &&
                     problem.extent <= problem.blocks * kBlock &&
                     (problem.bound == 448 || problem.bound == 256);
  if (!valid) return cudaErrorInvalidValue;
  switch (problem.out_dtype) {
    case DType::kF32:
      return launch<F32>(problem, stream);
    case DType::kBF16:
      return launch<BF16>(problem, stream);
    case DType::kF16:
      return launch<F16>(problem, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
