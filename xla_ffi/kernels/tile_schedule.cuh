// The tiles of quantize_tiles.cu: their variants, their sizes, and the order in which a persistent
// thread block takes them.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_SCHEDULE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_SCHEDULE_CUH_

#include "encode.cuh"
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

constexpr int kThreads = 128;
constexpr int kTileBlocks = 4;
constexpr int kTileRows = kTileBlocks * kBlock, kTileColumns = 128;
constexpr int kPatch = 8;
constexpr int kStages = 2;
constexpr int kMostRowSpan = 4, kMostColumnSpan = 4;  // tiles of a super-tile

// ---- Variants ----------------------------------------------------------------------------------

// What has an amax of its own: a batch entry, a line (row scaling), or a group.
enum class Scaling { kTensor, kLines, kGroups };

// A kernel each: code that is not needed would lie between what is, and the instruction cache is
// what limits a kernel as long as this.
template <class X_, Scaling scaling, bool stochastic, bool mixed>
struct Variant {
  using X = X_;
  static constexpr Scaling kScaling = scaling;
  static constexpr bool kStochastic = stochastic;
  static constexpr bool kMixed = mixed;  // the Hadamard transform, column-wise
};

// ---- Which tiles -------------------------------------------------------------------------------

struct Grid {
  int32_t row_tiles, column_tiles;  // of a batch entry
  int32_t row_span, column_span;    // tiles of a super-tile
  int32_t row_span_log;
  int32_t super_rows, super_columns;  // super-tiles of a batch entry
  int32_t supers;                     // of all entries
};

// Index of the first element of row `row`, of rows that are `width` wide.
__device__ __forceinline__ int64_t row_start(int32_t row, int32_t width) {
  return static_cast<int64_t>(row) * width;
}

// Extents fit 32 bits (quantize_tiles_supports), so that a product of two takes one instruction.
struct TileTask {
  QuantizeTask q;
  Grid grid;
  int32_t m, k, row_blocks;
  Places places;

  template <class V>
  __device__ __forceinline__ RowBlock row_block(int32_t entry, int32_t block) const {
    if (block >= row_blocks) return {0, 0, 0, 0};
    if (V::kScaling == Scaling::kGroups) {
      const int4* table = reinterpret_cast<const int4*>(q.blocks) + row_start(entry, row_blocks);
      const int4 from = __ldg(table + block);
      return {from.x, from.y, from.z, from.w};
    }
    const int32_t row = block * kBlock;
    return {row, min(m - row, kBlock), 0, block};
  }
};

// Walks the tiles of a thread block's super-tiles.
struct Cursor {
  int32_t super;
  int32_t entry, row0, column0;  // of the super-tile, in tiles
  int32_t sub;

  __device__ void locate(const Grid& grid) {
    const auto at = static_cast<uint32_t>(super);
    const uint32_t rest = at / static_cast<uint32_t>(grid.super_rows);
    row0 = static_cast<int32_t>(at % static_cast<uint32_t>(grid.super_rows)) * grid.row_span;
    column0 =
        static_cast<int32_t>(rest % static_cast<uint32_t>(grid.super_columns)) * grid.column_span;
    entry = static_cast<int32_t>(rest / static_cast<uint32_t>(grid.super_columns));
  }
  __device__ static Cursor first(const Grid& grid) {
    Cursor cursor = {static_cast<int32_t>(blockIdx.x), 0, 0, 0, 0};
    cursor.locate(grid);
    return cursor;
  }
  // Row of tiles fastest.
  __device__ int32_t sub_row(const Grid& grid) const { return sub & (grid.row_span - 1); }
  __device__ int32_t sub_column(const Grid& grid) const { return sub >> grid.row_span_log; }
  // First column, and first row block, of the tile.
  __device__ int32_t column(const Grid& grid) const {
    return (column0 + sub_column(grid)) * kTileColumns;
  }
  __device__ int32_t block(const Grid& grid) const { return (row0 + sub_row(grid)) * kTileBlocks; }
  __device__ bool exists(const Grid& grid) const { return super < grid.supers; }
  __device__ void advance(const Grid& grid) {
    do {
      if (++sub == grid.row_span * grid.column_span) {
        sub = 0;
        super += gridDim.x;
        locate(grid);
      }
    } while (exists(grid) && (row0 + sub_row(grid) >= grid.row_tiles ||
                              column0 + sub_column(grid) >= grid.column_tiles));
  }
};

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_SCHEDULE_CUH_
