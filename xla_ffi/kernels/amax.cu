// Absolute maxima as integer maxima of bits, so that NaN wins and no order matters: of matrices
// (tensor, batch entry or group), of their rows and columns, or of their Hadamard transform. Each
// element of x is read once a pass, 2 or 4 bytes; the transform shares the pass of the matrix.
//
// A thread block takes a strip of up to 8 row blocks by 1024 columns, a thread 8 columns of it.
// Maxima stay in registers while the matrix does not change, and leave by atomicMax; the outputs
// are zero before.
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWidth = 8;  // columns of a thread
constexpr int kMostStripBlocks = 8, kStripColumns = kThreads * kWidth;

enum class Maxima { kMatrix, kLines, kHadamard };

// Eight elements of a row as words whose magnitudes are compared as integers.
template <DType dtype>
struct Eight {
  static constexpr bool kPairs = dtype != DType::kF32;  // two elements a word
  static constexpr int kWords = kPairs ? 4 : 8;
  uint32_t word[kWords];

  __device__ __forceinline__ static uint32_t more(uint32_t a, uint32_t b) {
    return kPairs ? __vmaxu2(a, b) : max(a, b);
  }
  __device__ __forceinline__ uint32_t element(int i) const {
    return kPairs ? (word[i / 2] >> (i % 2 * 16)) & 0xFFFFu : word[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }
  __device__ __forceinline__ void make_magnitudes() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] &= kPairs ? 0x7FFF7FFFu : kMagnitude;
  }
  __device__ __forceinline__ void raise(const Eight& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = more(word[i], other.word[i]);
  }
  __device__ __forceinline__ uint32_t most() const {
    uint32_t all = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) all = more(all, word[i]);
    return kPairs ? max(all & 0xFFFFu, all >> 16) : all;
  }
};

template <DType dtype>
__device__ float widen(uint32_t element) {
  if constexpr (dtype == DType::kF32) return __uint_as_float(element);
  if constexpr (dtype == DType::kBF16) return __uint_as_float(element << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(element)));
}

// What is stored for the largest word: rounding is monotone, so it is rounded once.
template <DType dtype>
__device__ uint32_t stored_bits(DType compute, uint32_t word) {
  const uint32_t bits = __float_as_uint(round_to(compute, widen<dtype>(word))) & kMagnitude;
  return stored_amax<float>(bits);
}

__device__ void raise_to(float* amax, uint32_t bits) {
  uint32_t* target = reinterpret_cast<uint32_t*>(amax);
  if (bits > __ldcg(target)) atomicMax(target, bits);  // what is seen may only be too small
}

// Where a thread's columns begin, and how many there are.
template <DType dtype, bool kVector>
__device__ Eight<dtype> load(const QuantizeProblem& p, int64_t index, int64_t columns) {
  Eight<dtype> x;
  x.clear();
  if constexpr (kVector) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) +
                                                       index * (dtype == DType::kF32 ? 4 : 2));
    if (columns > 0)
#pragma unroll
      for (int i = 0; i < Eight<dtype>::kWords; i += 4) {
        const uint4 four = __ldg(from + i / 4);
        x.word[i] = four.x, x.word[i + 1] = four.y, x.word[i + 2] = four.z, x.word[i + 3] = four.w;
      }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i < columns) {
        if constexpr (dtype == DType::kF32)
          x.word[i] = static_cast<const uint32_t*>(p.x)[index + i];
        else
          x.word[i / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(p.x)[index + i])
                           << (i % 2 * 16);
      }
  }
  return x;
}

// Two elements as bfloat16, which is what the transform takes.
template <DType dtype>
__device__ __forceinline__ uint32_t bfloat16_pair(const Eight<dtype>& x, int pair, DType compute) {
  if (dtype == DType::kBF16 && compute != DType::kF16) return x.word[pair];
  return pack_bfloat16(round_to(compute, widen<dtype>(x.element(2 * pair))),
                       round_to(compute, widen<dtype>(x.element(2 * pair + 1))));
}

// Maximum of the magnitudes of the transformed columns of a row block, as float bits.
template <DType dtype>
__device__ uint32_t hadamard_most(const Eight<dtype> rows[kBlock], DType compute) {
  uint32_t most = 0;
#pragma unroll
  for (int pair = 0; pair < kWidth / 2; ++pair) {
    float low[kBlock], high[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t both = bfloat16_pair(rows[i], pair, compute);
      low[i] = low_half(both), high[i] = high_half(both);
    }
    hadamard16_unrounded(low);
    hadamard16_unrounded(high);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) most = max_magnitude(most, pack_bfloat16(low[i], high[i]));
  }
  most &= 0x7FFF7FFFu;
  return max(most << 16, most & 0xFFFF0000u);
}

// The maxima that a thread has seen of the matrix under way.
template <DType dtype, Maxima kind>
struct Seen {
  Eight<dtype> columns;  // kMatrix and kHadamard: of the thread; kLines: of each column
  uint32_t transformed;

  __device__ void clear() {
    columns.clear();
    transformed = 0;
  }

  __device__ void leave(const QuantizeTask& task, int64_t matrix, int64_t column, int64_t count) {
    const QuantizeProblem& p = task.p;
    if (kind == Maxima::kLines) {
      // All are read before any is raised: what is seen may only be too small.
      float* amax = p.column.amax + matrix * p.k + column;
      uint32_t bits[kWidth], seen[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        bits[i] = stored_bits<dtype>(p.compute, columns.element(i));
        seen[i] = p.column.wanted && i < count ? __ldcg(reinterpret_cast<const uint32_t*>(amax + i))
                                               : ~0u;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (bits[i] > seen[i]) atomicMax(reinterpret_cast<uint32_t*>(amax + i), bits[i]);
    } else {
      const uint32_t most = __reduce_max_sync(~0u, columns.most());
      const uint32_t mixed = __reduce_max_sync(~0u, transformed);
      if (threadIdx.x % 32 == 0) {
        const uint32_t bits = stored_bits<dtype>(p.compute, most);
        if (p.row.wanted) raise_to(p.row.amax + matrix, bits);
        if (p.column.wanted)
          raise_to(p.column.amax + matrix,
                   kind == Maxima::kHadamard ? stored_amax<float>(mixed) : bits);
      }
    }
    clear();
  }
};

template <DType dtype, Maxima kind, bool kVector>
__global__ void __launch_bounds__(kThreads) amaxes(QuantizeTask task, int strip_blocks) {
  const QuantizeProblem& p = task.p;
  const int64_t across = ceil_div(p.k, kStripColumns);
  const int64_t strips = ceil_div(task.row_blocks, strip_blocks);
  const int64_t strip = blockIdx.x / across % strips, entry = blockIdx.x / across / strips;
  const int64_t column = (blockIdx.x % across * kThreads + threadIdx.x) * kWidth;
  const int64_t count = p.k - column;  // columns from here on
  Seen<dtype, kind> seen;
  seen.clear();
  int64_t matrix = -1;
  for (int b = 0; b < strip_blocks; ++b) {
    const int64_t block = strip * strip_blocks + b;
    if (block >= task.row_blocks) break;
    const RowBlock rows = task.row_block(entry, block);
    if (rows.rows == 0) break;  // nor has any block after it
    if (matrix != task.matrix(entry, rows)) {
      if (matrix >= 0) seen.leave(task, matrix, column, count);
      matrix = task.matrix(entry, rows);
    }
    const int64_t index = (entry * p.m + rows.row) * p.k + column;
    Eight<dtype> x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      x[i] = load<dtype, kVector>(p, index + i * p.k, i < rows.rows ? count : 0);
    if (kind == Maxima::kHadamard)
      seen.transformed = max(seen.transformed, hadamard_most<dtype>(x, p.compute));
    uint32_t row_most = 0;  // lane i of each warp: of row i
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i].make_magnitudes();
      seen.columns.raise(x[i]);
      if (kind == Maxima::kLines) {
        const uint32_t most = __reduce_max_sync(~0u, x[i].most());
        if (threadIdx.x % 32 == i) row_most = most;
      }
    }
    const int lane = threadIdx.x % 32;
    if (kind == Maxima::kLines && p.row.wanted && lane < rows.rows)
      raise_to(p.row.amax + entry * p.m + rows.row + lane, stored_bits<dtype>(p.compute, row_most));
  }
  if (matrix >= 0) seen.leave(task, matrix, column, count);
}

template <DType dtype, Maxima kind>
cudaError_t launch_kind(const QuantizeTask& task, cudaStream_t stream) {
  const QuantizeProblem& p = task.p;
  int processors = 0;
  const cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  // Small problems have short strips, so that every multiprocessor has some.
  int strip_blocks = kMostStripBlocks;
  const auto grid_of = [&](int blocks) {
    return p.batch * ceil_div(task.row_blocks, blocks) * ceil_div(p.k, kStripColumns);
  };
  // Lines want long strips, of which each raises its columns once.
  const int64_t enough = (kind == Maxima::kLines ? 4 : 12) * processors;
  while (strip_blocks > 1 && grid_of(strip_blocks) < enough) strip_blocks /= 2;
  const int64_t grid = grid_of(strip_blocks);
  if (grid == 0) return cudaSuccess;
  if (grid > 0x7FFFFFFF) return cudaErrorInvalidValue;
  const auto kernel = p.k % kWidth == 0 ? amaxes<dtype, kind, true> : amaxes<dtype, kind, false>;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(task, strip_blocks);
  return cudaGetLastError();
}

template <DType dtype>
cudaError_t launch_dtype(const QuantizeTask& task, cudaStream_t stream) {
  if (task.p.row_scaled) return launch_kind<dtype, Maxima::kLines>(task, stream);
  if (task.p.column.wanted && task.p.column.hadamard)
    return launch_kind<dtype, Maxima::kHadamard>(task, stream);
  return launch_kind<dtype, Maxima::kMatrix>(task, stream);
}

}  // namespace

cudaError_t launch_amaxes(const QuantizeTask& task, cudaStream_t stream) {
  switch (task.p.x_dtype) {
    case DType::kF32:
      return launch_dtype<DType::kF32>(task, stream);
    case DType::kBF16:
      return launch_dtype<DType::kBF16>(task, stream);
    case DType::kF16:
      return launch_dtype<DType::kF16>(task, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
