// The row-wise form alone, one amax a batch entry: blocks follow one another in memory, so a thread
// takes whole blocks wherever they lie. 2 or 4 bytes read and 0.5625 written an element.
#include "encode.cuh"
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 2;  // blocks of a thread, so that enough loads are under way

struct RowsTask {
  QuantizeProblem p;
  Places places;
};

struct Block {
  uint32_t pair[kBlock / 2];
};

__device__ __forceinline__ Block load_block(const uint16_t* x, int64_t block) {
  const uint4* from = reinterpret_cast<const uint4*>(x + block * kBlock);
  const uint4 a = __ldcs(from), b = __ldcs(from + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ Block load_block(const float* x, int64_t block) {
  const float4* from = reinterpret_cast<const float4*>(x + block * kBlock);
  Block out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = __ldcs(from + i);
    out.pair[2 * i] = pack_bfloat16(v.x, v.y);
    out.pair[2 * i + 1] = pack_bfloat16(v.z, v.w);
  }
  return out;
}

__device__ __forceinline__ float value_of(const uint16_t* x, int64_t i) {
  return __uint_as_float(static_cast<uint32_t>(x[i]) << 16);
}
__device__ __forceinline__ float value_of(const float* x, int64_t i) {
  return round_to_bfloat16(x[i]);
}

// What is not calm or not finite, by definition.
template <class X>
__device__ __noinline__ uint64_t redo(const X* x, int64_t block, float amax, float bound,
                                      uint32_t* scale) {
  uint32_t most = 0;
#pragma unroll 1
  for (int i = 0; i < kBlock; ++i)
    most = max(most, __float_as_uint(value_of(x, block * kBlock + i)) & kMagnitude);
  const TensorScale<float> tensor = tensor_scale(amax, bound);
  const ExactBlock exact = ExactBlock::of([&](int i) { return value_of(x, block * kBlock + i); },
                                          block_scale<float>(most, tensor), tensor, nullptr);
  *scale = exact.scale;
  return exact.codes;
}

template <class X>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const __grid_constant__ RowsTask task, int64_t blocks) {
  __shared__ float table[128];
  const QuantizeProblem& p = task.p;
  store_given_amaxes(p);
  const int64_t entry = blockIdx.y;
  const float amax = amax_at(p.row, entry), bound = static_cast<float>(p.row.bound);
  const LineScale line = LineScale::of(amax, bound);
  if (threadIdx.x < 128)
    table[threadIdx.x] =
        encode_multiplier(e4m3_decode<float>(threadIdx.x), tensor_scale(amax, bound)) * 0.125f;
  __syncthreads();
  const X* x = static_cast<const X*>(p.x) + entry * blocks * kBlock;
  uint2* codes_to = reinterpret_cast<uint2*>(p.row.codes) + entry * blocks;
  uint8_t* scale_to = p.row.block_scale + entry * blocks;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kAtOnce;
  for (int64_t first = blockIdx.x * int64_t{kThreads} * kAtOnce + threadIdx.x; first < blocks;
       first += step) {
    Block v[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (first + n * kThreads < blocks) v[n] = load_block(x, first + n * kThreads);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t block = first + n * kThreads;
      if (block >= blocks) break;
      const uint32_t* pair = v[n].pair;
      uint32_t most = pair[0];
#pragma unroll
      for (int i = 1; i < kBlock / 2; ++i) most = max_magnitude(most, pair[i]);
      most = max_magnitude(most, __byte_perm(most, most, 0x1032));
      uint32_t scale = scale_pair(most, line.per_block, line.per_block) & 0xFFu;
      const float multiplier = table[scale];
      uint32_t codes[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto value = [&](int i) {
          const uint32_t both = pair[4 * half + i / 2];
          return i % 2 == 0 ? low_half(both) : high_half(both);
        };
        codes[half] = encode_eight<false>(value, multiplier, row_signs(pair + 4 * half),
                                          task.places, nullptr);
      }
      if (scale == kNanScale) {
        const uint64_t exact = redo(x, block, amax, bound, &scale);
        codes[0] = static_cast<uint32_t>(exact), codes[1] = static_cast<uint32_t>(exact >> 32);
      }
      codes_to[block] = make_uint2(codes[0], codes[1]);
      scale_to[block] = static_cast<uint8_t>(scale);
    }
  }
}

}  // namespace

bool quantize_rows_supports(const QuantizeProblem& p) {
  return holds_bfloat16(p) && p.row.wanted && !p.column.wanted && p.values == nullptr &&
         p.tile == 1 && p.row.four_over_six == ErrorNorm::kNone && p.seed == nullptr &&
         !p.row_scaled && !p.grouped &&       // one amax for all blocks
         p.m * p.k > 0 && p.k % kBlock == 0;  // there are blocks, and none ends early
}

cudaError_t launch_quantize_rows(const QuantizeTask& q, cudaStream_t stream) {
  RowsTask task = {};
  task.p = q.p;
  task.places = Places::make();
  const int64_t blocks = q.p.m * q.p.row.blocks;
  int processors = 0;
  const cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t needed = ceil_div(blocks, kThreads * kAtOnce), most = processors * 32;
  const dim3 grid(static_cast<unsigned>(needed < most ? needed : most),
                  static_cast<unsigned>(q.p.batch));
  if (q.p.x_dtype == DType::kF32)
    quantize_rows<float><<<grid, kThreads, 0, stream>>>(task, blocks);
  else
    quantize_rows<uint16_t><<<grid, kThreads, 0, stream>>>(task, blocks);
  return cudaGetLastError();
}

}  // namespace jax_fp4::cuda
