// The shared memory of quantize_tiles.cu, and how x comes into it.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_

#include <type_traits>

#include "tile_schedule.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// ---- Shared memory -----------------------------------------------------------------------------

// Codes of a tile's columns, 32 bytes each. Sixteen bytes after every eighth column, so that the
// patches of a warp meet each bank once.
__device__ __forceinline__ int column_slot(int column) {
  return column * (kTileRows / 2) + column / kPatch * 16;
}
constexpr int kCodeStride = kTileRows / 2 / 4;  // words from a column of a patch to the next
constexpr int kColumnCodeBytes = kTileColumns * (kTileRows / 2) + kTileColumns / kPatch * 16;
static_assert(kColumnCodeBytes % 16 == 0, "pieces are stored");

struct Nothing {};

template <class V>
struct alignas(128) TileMemory {
  static constexpr bool kTensor = V::kScaling == Scaling::kTensor;
  static constexpr bool kLines = V::kScaling == Scaling::kLines;

  typename V::X stage[kTileRows * kTileColumns];
  alignas(16) uint8_t column_codes[kColumnCodeBytes];
  // Of the super-tile: row-wise [column block, row], column-wise [row block, column].
  alignas(16) uint8_t row_scales[kSuperRows * kSuperColumns / kBlock];
  alignas(16) uint8_t column_scales[kSuperRows * kSuperColumns / kBlock];
  uint32_t unit[2];  // that are drawn: the next one, and the one after it
  // Scaling::kTensor, of the batch entry: its scales, an eighth of the multiplier of each scale
  // byte, whether both directions have the same; where its random bytes begin; and what
  // four-over-six needs of it.
  LineScale row, column;
  float row_table[kTensor ? 128 : 1], column_table[kTensor ? 128 : 1];
  bool same;
  Origin row_origin, column_origin;
  std::conditional_t<V::kNorm == ErrorNorm::kNone, Nothing, FourOverSixScale> row_four, column_four;
  // Scaling::kLines: of the super-tile's rows and columns.
  LineScale row_lines[kLines ? kSuperRows : 1], column_lines[kLines ? kSuperColumns : 1];
};

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
  static_assert(kThreads % kChunks == 0 && kBlock % kRowsAtOnce == 0, "whole rows at once");
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int32_t column = at.tile_column() + chunk * kChunk, block0 = at.tile_block();
  X* to = stage + first * kTileColumns + swizzled<X>(chunk) * kChunk;
  const X* x = static_cast<const X*>(task.q.p.x);
  const RowBlock top = task.row_block<V>(at.entry, block0);
  const RowBlock bottom = task.row_block<V>(at.entry, block0 + kTileBlocks - 1);
  const bool whole = at.tile_column() + kTileColumns <= task.k && bottom.rows == kBlock &&
                     bottom.row == top.row + (kTileBlocks - 1) * kBlock;
  if (whole) {
    // Row blocks follow one another without a gap, whatever their groups.
    const X* corner = x + row_start(at.entry * task.m + top.row, task.k);
    const uint32_t from = static_cast<uint32_t>(first) * static_cast<uint32_t>(task.k) + column;
    const uint32_t step = static_cast<uint32_t>(task.k) * kRowsAtOnce;
#pragma unroll
    for (int r = 0; r < kTileRows / kRowsAtOnce; ++r)
      copy_async(to + r * kRowsAtOnce * kTileColumns, corner + (from + r * step));
    return;
  }
#pragma unroll
  for (int b = 0; b < kTileBlocks; ++b) {
    const RowBlock rows = task.row_block<V>(at.entry, block0 + b);
    const int32_t left = column < task.k ? rows.rows - first : 0;
    const X* from = x + row_start(at.entry * task.m + rows.row + first, task.k) + column;
#pragma unroll
    for (int r = 0; r < kBlock; r += kRowsAtOnce)
      copy_async(to + (b * kBlock + r) * kTileColumns, from + row_start(r, task.k), r < left);
  }
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_STAGE_CUH_
