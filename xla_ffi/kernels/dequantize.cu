// One thread a block of sixteen: 9 bytes in, 32 or 64 out.
#include <cuda_fp16.h>

#include "dequantize.h"
#include "nvfp4.h"
#include "ptx.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kThreads = 256;

// Two values of a block as they are stored; NaN has one pattern in float32.
struct F32 {
  using Word = float;
  __device__ __forceinline__ static void put(float low, float high, Word* to) {
    to[0] = low != low ? __uint_as_float(kNanBits) : low;
    to[1] = high != high ? __uint_as_float(kNanBits) : high;
  }
};
struct BF16 {
  using Word = uint16_t;
  __device__ __forceinline__ static void put(float low, float high, Word* to) {
    *reinterpret_cast<uint32_t*>(to) = pack_bfloat16(low, high);
  }
};
struct F16 {
  using Word = uint16_t;
  __device__ __forceinline__ static void put(float low, float high, Word* to) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low, high);
  }
};

__device__ __forceinline__ float multiplier(const DequantizeProblem& p, int64_t row,
                                            int64_t index) {
  const float scale = e4m3_decode_signed<float>(p.block_scale[index]);
  if (p.amax == nullptr) return scale;
  const float amax = p.amax[p.row_scaled ? row : p.batch == 1 ? 0 : row / p.rows];
  return decode_multiplier(scale, amax, static_cast<float>(p.bound));
}

// kWhole: the extent is whole blocks, so that every store is 16 bytes wide. A row has 2^across_log
// threads of a thread block, and as many thread blocks as it needs on the grid's second dimension.
template <class Out, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    dequantize(DequantizeProblem p, int32_t used, int across_log) {
  using Word = typename Out::Word;
  constexpr int kVector = 16 / sizeof(Word);
  const int32_t block = (blockIdx.y << across_log) + (threadIdx.x & ((1 << across_log) - 1));
  const int64_t row =
      blockIdx.x * static_cast<int64_t>(kThreads >> across_log) + (threadIdx.x >> across_log);
  if (row >= p.batch * p.rows || block >= used) return;
  const int64_t index = row * p.blocks + block;
  const uint64_t codes = reinterpret_cast<const uint64_t*>(p.codes)[index];
  const float factor = multiplier(p, row, index);
  Word* out = static_cast<Word*>(p.out) + row * p.extent + static_cast<int64_t>(block) * kBlock;
  const auto value = [&](int j) {
    return e2m1_decode<float>(static_cast<uint32_t>(codes >> (4 * j)) & 15u) * factor;
  };
  alignas(16) Word words[kBlock];
#pragma unroll
  for (int j = 0; j < kBlock; j += 2) Out::put(value(j), value(j + 1), words + j);
  if constexpr (kWhole) {
#pragma unroll
    for (int j = 0; j < kBlock; j += kVector)
      __stcs(reinterpret_cast<uint4*>(out + j), *reinterpret_cast<const uint4*>(words + j));
  } else {
    const int64_t left = p.extent - static_cast<int64_t>(block) * kBlock;
#pragma unroll
    for (int j = 0; j < kBlock; ++j)
      if (j < left) out[j] = words[j];
  }
}

template <class Out>
cudaError_t launch(const DequantizeProblem& p, cudaStream_t stream) {
  const int64_t used = ceil_div(p.extent, kBlock), rows = p.batch * p.rows;
  if (used * rows == 0) return cudaSuccess;
  int across_log = 8;
  static_assert(kThreads == 1 << 8, "a long row fills a thread block");
  while (across_log > 0 && (int64_t{1} << (across_log - 1)) >= used) --across_log;
  const int64_t across = int64_t{1} << across_log;
  const int64_t grid_x = ceil_div(rows, kThreads / across), grid_y = ceil_div(used, across);
  if (grid_x > 0x7FFFFFFF || grid_y > 65535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y));
  const auto kernel = p.extent % kBlock == 0 ? dequantize<Out, true> : dequantize<Out, false>;
  kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int32_t>(used), across_log);
  return cudaGetLastError();
}

// ---- Interleaved -------------------------------------------------------------------------------

// Of the pairs that four lanes hold, pairs[s] for lane s, each lane gets its own, in the order of
// the lanes they come from.
__device__ __forceinline__ void exchange(uint32_t pairs[4], int lane) {
  uint32_t mine[4];
  const auto of = [&](int s) {
    return s == 0 ? pairs[0] : s == 1 ? pairs[1] : s == 2 ? pairs[2] : pairs[3];
  };
  uint32_t from[4];
#pragma unroll
  for (int step = 0; step < 4; ++step)
    from[step] = __shfl_xor_sync(~0u, of(lane ^ step), step);  // of lane ^ step
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int step = lane ^ t;
    mine[t] = step == 0 ? from[0] : step == 1 ? from[1] : step == 2 ? from[2] : from[3];
  }
#pragma unroll
  for (int t = 0; t < 4; ++t) pairs[t] = mine[t];
}

// One thread a block of sixteen, four of them 64 elements: lane t decodes block t, and stores
// places 16 t to 16 t + 15.
__global__ void __launch_bounds__(kThreads)
    interleave(DequantizeProblem p, int64_t threads, int32_t across) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const bool exists = thread < threads;  // for all lanes of four
  const int64_t row = exists ? thread / across : 0;
  const int32_t block = static_cast<int32_t>(thread - row * across);
  const int lane = threadIdx.x % 4;
  uint64_t codes = 0;
  float scale = 0.0f;
  if (exists && block < p.blocks) {
    codes = reinterpret_cast<const uint64_t*>(p.codes)[row * p.blocks + block];
    scale = e4m3_decode_signed<float>(p.block_scale[row * p.blocks + block]);
  }
  const auto value = [&](int j) {
    return e2m1_decode<float>(static_cast<uint32_t>(codes >> (4 * j)) & 15u) * scale;
  };
  uint32_t pairs[2][4];  // [i][s]: elements 8 (s / 2) + 2 (s % 2) + i, and four on
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int j = 8 * (s / 2) + 2 * (s % 2) + i;
      pairs[i][s] = pack_bfloat16(value(j), value(j + 4));
    }
    exchange(pairs[i], lane);
  }
  if (!exists) return;
  uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + thread * kBlock);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    __stcs(out + i, make_uint4(pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]));
}

}  // namespace

cudaError_t launch_interleave(const DequantizeProblem& p, void*, cudaStream_t stream) {
  const int64_t across = p.extent / kBlock, threads = p.batch * p.rows * across;
  const int64_t grid = ceil_div(threads, kThreads);
  if (p.extent != ceil_div(p.blocks, 4) * 64 || grid > 0x7FFFFFFF) return cudaErrorInvalidValue;
  if (threads == 0) return cudaSuccess;
  interleave<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, threads,
                                                                   static_cast<int32_t>(across));
  return cudaGetLastError();
}

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
