// Absolute maxima as integer maxima of bits, so that NaN wins and no order matters: of matrices
// (tensor, batch entry or group), of their rows and columns, or of their Hadamard transform. Each
// element of x is read once a pass, 2 or 4 bytes; the transform shares the pass of the matrix.
//
// Of matrices alone, pieces of 16 bytes are read in memory order, whatever the rows. Otherwise a
// thread block takes a strip of up to 8 row blocks by 1024 columns, a thread 8 columns of it.
// Maxima stay in registers while the matrix does not change, and leave by atomicMax; the outputs
// are zero before. Either way x is read from its end to its beginning: what the next pass reads
// first is then still in the L2 cache.
#include "maxima.cuh"
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWidth = 8;  // columns of a thread
constexpr int kMostStripBlocks = 8, kStripColumns = kThreads * kWidth;

enum class Maxima { kMatrix, kLines, kHadamard };

// ---- Where eight elements of a row come from ---------------------------------------------------
// load() gives those of a row (of all batch entries' rows) from a column on, of which `columns`
// exist: as words of kWords, which need not be rounded to the compute dtype yet. A thread has
// kRows rows of loads under way where the kind of maxima does not need all sixteen.

// x, of any extent.
template <DType dtype>
struct Stored {
  static constexpr DType kWords = dtype;
  static constexpr int kRows = dtype == DType::kF32 ? 4 : kBlock;

  __device__ __forceinline__ static Eight<dtype> load(const QuantizeProblem& p, int64_t row,
                                                      int64_t column, int64_t columns) {
    const int64_t index = row * p.k + column;
    Eight<dtype> x;
    x.clear();
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i < columns) {
        if constexpr (dtype == DType::kF32)
          x.word[i] = static_cast<const uint32_t*>(p.x)[index + i];
        else
          x.word[i / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(p.x)[index + i])
                           << (i % 2 * 16);
      }
    return x;
  }
};

// x of k % 8 == 0.
template <DType dtype>
struct StoredPieces : Stored<dtype> {
  __device__ __forceinline__ static Eight<dtype> load(const QuantizeProblem& p, int64_t row,
                                                      int64_t column, int64_t columns) {
    const uint4* from = reinterpret_cast<const uint4*>(
        static_cast<const uint8_t*>(p.x) + (row * p.k + column) * (dtype == DType::kF32 ? 4 : 2));
    Eight<dtype> x;
    x.clear();
    if (columns > 0)
#pragma unroll
      for (int i = 0; i < Eight<dtype>::kWords; i += 4) {
        const uint4 four = __ldg(from + i / 4);
        x.word[i] = four.x, x.word[i + 1] = four.y, x.word[i + 2] = four.z, x.word[i + 3] = four.w;
      }
    return x;
  }
};

// ---- Strips ------------------------------------------------------------------------------------

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
      // By way of shared memory, so that a warp raises neighbours.
      __shared__ uint32_t bits[kStripColumns];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        bits[threadIdx.x * kWidth + i] = stored_bits<dtype>(p.compute, columns.element(i));
      __syncthreads();
      const int64_t first = column - threadIdx.x * kWidth;
      uint32_t* amax = reinterpret_cast<uint32_t*>(p.column.amax) + matrix * p.k + first;
#pragma unroll
      for (int i = threadIdx.x; i < kStripColumns; i += kThreads)
        if (p.column.wanted && first + i < p.k) atomicMax(amax + i, bits[i]);
      __syncthreads();
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

template <class Source, Maxima kind>
__global__ void __launch_bounds__(kThreads) amaxes(QuantizeTask task, int strip_blocks) {
  let_next_pass_begin();
  await_pass_before();
  constexpr DType kWords = Source::kWords;
  // Under the transform all rows of a block are held.
  constexpr bool kHold = kind == Maxima::kHadamard;
  constexpr int kRows = kHold && Source::kRows > 1 ? kBlock : Source::kRows;
  const QuantizeProblem& p = task.p;
  const int64_t across = ceil_div(p.k, kStripColumns), place = gridDim.x - 1 - blockIdx.x;
  const int64_t strips = ceil_div(task.row_blocks, strip_blocks);
  const int64_t strip = place / across % strips, entry = place / across / strips;
  const int64_t column = (place % across * kThreads + threadIdx.x) * kWidth;
  const int64_t count = p.k - column;  // columns from here on
  const int lane = threadIdx.x % 32;
  Seen<kWords, kind> seen;
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
    const int64_t first = entry * p.m + rows.row;
    Eight<kWords> x[kHold ? kBlock : kRows];
    uint32_t row_most = 0;  // lane i of each warp: of row i
#pragma unroll 1
    for (int from = 0; from < kBlock; from += kRows) {
      Eight<kWords>* some = x + (kHold ? from : 0);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        some[i] = Source::load(p, first + from + i, column, from + i < rows.rows ? count : 0);
      if constexpr (!kHold) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          some[i].make_magnitudes();
          seen.columns.raise(some[i]);
          if (kind == Maxima::kLines) {
            const uint32_t most = __reduce_max_sync(~0u, some[i].most());
            if (lane == from + i) row_most = most;
          }
        }
      }
    }
    if constexpr (kHold) {
      seen.transformed = max(seen.transformed, hadamard_most<kWords>(x, p.compute));
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        x[i].make_magnitudes();
        seen.columns.raise(x[i]);
      }
    }
    if (kind == Maxima::kLines && p.row.wanted && lane < rows.rows)
      atomicMax(reinterpret_cast<uint32_t*>(p.row.amax) + first + lane,
                stored_bits<kWords>(p.compute, row_most));
  }
  if (matrix >= 0) seen.leave(task, matrix, column, count);
}

template <class Source, Maxima kind>
cudaError_t launch_strips(const QuantizeTask& task, cudaStream_t stream) {
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
  return launch_pass(amaxes<Source, kind>, static_cast<unsigned>(grid), kThreads, stream, task,
                     strip_blocks);
}

// ---- Whole matrices ----------------------------------------------------------------------------
// Pieces of 16 bytes of x, in memory order: `width` of them a row.

constexpr int kPieces = 4, kPieceBlocks = 8;     // a multiprocessor
constexpr int kChunk = kPieceThreads * kPieces;  // pieces that a thread block has under way
constexpr int kUnit = 4 * kChunk;                // and those that it takes at once

// Of this thread's pieces from `begin` to `end`.
template <DType dtype>
__device__ __forceinline__ uint32_t most_of_pieces(const uint4* x, int64_t begin, int64_t end) {
  int64_t at = begin + threadIdx.x;
  const uint4* from = x + at;
  uint32_t most = 0;
#pragma unroll 1
  for (; at < end; at += kChunk, from += kChunk) {
    uint4 piece[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      piece[j] =
          at + j * kPieceThreads < end ? __ldcg(from + j * kPieceThreads) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      most = Eight<dtype>::more(most, most_of_piece<dtype>(piece[j]));
  }
  return most;
}

template <DType dtype, bool kGrouped>
__global__ void __launch_bounds__(kPieceThreads) matrix_amaxes(QuantizeTask task, int64_t width) {
  let_next_pass_begin();
  await_pass_before();
  const uint4* x =
      static_cast<const uint4*>(task.p.x) + (gridDim.y - 1 - blockIdx.y) * task.p.m * width;
  walk_pieces<dtype>(task, width, kUnit, kGrouped, true, [&](int64_t begin, int64_t end) {
    return most_of_pieces<dtype>(x, begin, end);
  });
}

template <DType dtype>
cudaError_t launch_matrices(const QuantizeTask& task, cudaStream_t stream) {
  const int64_t width = task.p.k / (dtype == DType::kF32 ? 4 : 8);
  const auto kernel = task.p.grouped ? matrix_amaxes<dtype, true> : matrix_amaxes<dtype, false>;
  return launch_walk(kernel, task, width, kUnit, kPieceBlocks, stream, width);
}

// ---- The choice --------------------------------------------------------------------------------

template <class Source>
cudaError_t launch_source(const QuantizeTask& task, Maxima kind, cudaStream_t stream) {
  switch (kind) {
    case Maxima::kMatrix:
      return launch_strips<Source, Maxima::kMatrix>(task, stream);
    case Maxima::kLines:
      return launch_strips<Source, Maxima::kLines>(task, stream);
    case Maxima::kHadamard:
      return launch_strips<Source, Maxima::kHadamard>(task, stream);
  }
  return cudaErrorInvalidValue;
}

template <DType dtype>
cudaError_t launch_stored(const QuantizeTask& task, Maxima kind, cudaStream_t stream) {
  const QuantizeProblem& p = task.p;
  if (kind == Maxima::kMatrix && p.k % (dtype == DType::kF32 ? 4 : 8) == 0)
    return launch_matrices<dtype>(task, stream);
  return p.k % kWidth == 0 ? launch_source<StoredPieces<dtype>>(task, kind, stream)
                           : launch_source<Stored<dtype>>(task, kind, stream);
}

}  // namespace

cudaError_t launch_amaxes(const QuantizeTask& task, cudaStream_t stream) {
  const QuantizeProblem& p = task.p;
  const bool transformed = p.column.wanted && p.column.hadamard;
  const Maxima kind = p.row_scaled  ? Maxima::kLines
                      : transformed ? Maxima::kHadamard
                                    : Maxima::kMatrix;
  switch (p.x_dtype) {
    case DType::kF32:
      return launch_stored<DType::kF32>(task, kind, stream);
    case DType::kBF16:
      return launch_stored<DType::kBF16>(task, kind, stream);
    case DType::kF16:
      return launch_stored<DType::kF16>(task, kind, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
