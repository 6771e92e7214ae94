// The shared memory of quantize_tiles.cu, and how x comes into it.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_

#include "tile_schedule.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// ---- Shared memory -----------------------------------------------------------------------------

// Sizes follow the spans, so the parts are pointers.
template <class X>
struct Shared {
  uint8_t* base;
  int32_t super_rows, super_columns;  // elements of a super-tile

  __device__ X* stage(int i) const {
    return reinterpret_cast<X*>(base) + i * (kTileRows * kTileColumns);
  }
  __device__ uint8_t* column_codes() const {
    return base + kStages * kTileRows * kTileColumns * sizeof(X);
  }
  // Scaling::kTensor: the scale of the batch entry.
  __device__ LineScale* tensor(bool row_wise) const {
    return reinterpret_cast<LineScale*>(column_codes() + kTileColumns * kTileRows / 2) +
           (row_wise ? 0 : 1);
  }
  // And an eighth of the multiplier of each scale byte.
  __device__ float* table(bool row_wise) const {
    return reinterpret_cast<float*>(tensor(true) + 2) + (row_wise ? 0 : 128);
  }
  // [column block, row] and [row block, column] of the super-tile.
  __device__ uint8_t* row_scales() const { return reinterpret_cast<uint8_t*>(table(true) + 256); }
  __device__ uint8_t* column_scales() const {
    return row_scales() + super_rows * super_columns / kBlock;
  }
  // Under row scaling only: of the super-tile's rows and columns.
  __device__ LineScale* row_lines() const {
    return reinterpret_cast<LineScale*>(column_scales() + super_rows * super_columns / kBlock);
  }
  __device__ LineScale* column_lines() const { return row_lines() + super_rows; }
};

template <class X>
size_t shared_bytes(const Grid& grid, bool row_scaled) {
  const size_t rows = grid.row_span * kTileRows, columns = grid.column_span * kTileColumns;
  return kStages * kTileRows * kTileColumns * sizeof(X) + kTileColumns * kTileRows / 2 +
         2 * sizeof(LineScale) + 256 * sizeof(float) + rows * columns / 8 +
         (row_scaled ? (rows + columns) * sizeof(LineScale) : 0);
}

// ---- Loading -----------------------------------------------------------------------------------

// Sixteen-byte chunks of a staged row. Those of float32 are swapped in pairs so that a patch's two
// reads meet no bank twice.
template <class X>
__device__ __forceinline__ int swizzled(int chunk) {
  return sizeof(X) == 4 ? chunk ^ ((chunk >> 3) & 1) : chunk;
}

// Begins the copy of a tile; what lies outside x or its group becomes 0.
template <class V, class X = typename V::X>
__device__ __forceinline__ void fetch(const TileTask& task, const Cursor& at, X* stage) {
  constexpr int kChunk = 16 / sizeof(X), kChunks = kTileColumns / kChunk;  // of a row
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const QuantizeProblem& p = task.q.p;
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int32_t column = at.column(task.grid) + chunk * kChunk, block0 = at.block(task.grid);
  const X* corner = static_cast<const X*>(p.x) + column;
  X* to = stage + first * kTileColumns + swizzled<X>(chunk) * kChunk;
  const bool inside = column < task.k;
  const int64_t step = row_start(kRowsAtOnce, task.k);
  if constexpr (V::kScaling != Scaling::kGroups) {
    const int32_t row = block0 * kBlock + first, left = inside ? task.m - row : 0;
    const X* from = corner + row_start(at.entry * task.m + row, task.k);
#pragma unroll
    for (int r = 0; r < kTileRows; r += kRowsAtOnce, from += step)
      copy_async(to + r * kTileColumns, from, r < left);
  } else {
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      const RowBlock rows = task.row_block<V>(at.entry, block0 + b);
      const int32_t left = inside ? rows.rows - first : 0;
      const X* from = corner + row_start(at.entry * task.m + rows.row + first, task.k);
#pragma unroll
      for (int r = 0; r < kBlock; r += kRowsAtOnce, from += step)
        copy_async(to + (b * kBlock + r) * kTileColumns, from, r < left);
    }
  }
}

// Element of a staged tile, as it is quantized.
__device__ __forceinline__ float staged(const uint16_t* stage, int row, int column) {
  return __uint_as_float(static_cast<uint32_t>(stage[row * kTileColumns + column]) << 16);
}
__device__ __forceinline__ float staged(const float* stage, int row, int column) {
  const int chunk = swizzled<float>(column / 4);
  return round_to_bfloat16(stage[row * kTileColumns + chunk * 4 + column % 4]);
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_
