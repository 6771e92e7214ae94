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
// Tiles of a super-tile, row of tiles fastest.
constexpr int kRowSpan = 2, kColumnSpan = 2, kSuperTiles = kRowSpan * kColumnSpan;
constexpr int kSuperRows = kRowSpan * kTileRows, kSuperColumns = kColumnSpan * kTileColumns;

// ---- Variants ----------------------------------------------------------------------------------

// What has an amax of its own: a batch entry, a line (row scaling), or a group.
enum class Scaling { kTensor, kLines, kGroups };

// A kernel each: code that is not needed would lie between what is, and the instruction cache is
// what limits a kernel as long as this.
template <class Element, Scaling scaling, bool stochastic, bool mixed,
          ErrorNorm norm = ErrorNorm::kNone>
struct Variant {
  using X = Element;
  static constexpr Scaling kScaling = scaling;
  static constexpr bool kStochastic = stochastic;
  static constexpr bool kMixed = mixed;     // the Hadamard transform, column-wise
  static constexpr ErrorNorm kNorm = norm;  // of four-over-six, in both forms
};

// What four-over-six needs of a tensor beside its LineScale.
struct FourOverSixScale {
  float encode;              // S_enc; NaN unless calm
  float amax;                // finite
  float six_bound, inverse;  // 6 B, and its rounded reciprocal

  __device__ static FourOverSixScale of(float stored, float bound) {
    const TensorScale<float> scale = tensor_scale(stored, bound);
    const float six_bound = kE2M1Max * bound;
    const bool calm = LineScale::is_calm(scale.amax);
    return {calm ? scale.encode : __uint_as_float(kNanBits), scale.amax, six_bound,
            __frcp_rn(six_bound)};
  }
};

// ---- Which tiles -------------------------------------------------------------------------------

// Units of work, which thread blocks draw one after another: super-tiles, and single tiles for the
// last of them, so that all blocks end together.
struct Schedule {
  uint32_t super_rows, super_columns;  // super-tiles of a batch entry
  uint32_t supers;                     // of all entries
  uint32_t whole;                      // of these are drawn whole

  __host__ __device__ uint32_t units() const { return whole + (supers - whole) * kSuperTiles; }
};
// Super-tiles follow one another down the columns of bands so high: what is at work at a time
// shares rows of x and of both forms.
constexpr uint32_t kBand = 32 / kRowSpan;

// Index of the first element of row `row`, of rows that are `width` wide.
__device__ __forceinline__ int64_t row_start(int32_t row, int32_t width) {
  return static_cast<int64_t>(row) * width;
}

// Extents fit 32 bits (quantize_tiles_supports), so that a product of two takes one instruction.
struct TileTask {
  QuantizeTask q;
  Schedule schedule;
  int32_t m, k, row_blocks;
  Places places;

  template <class V>
  __device__ __forceinline__ RowBlock row_block(int32_t entry, int32_t block) const {
    if (block >= row_blocks) return {0, 0, 0, 0};
    if (V::kScaling == Scaling::kGroups) {
      const int4* table = reinterpret_cast<const int4*>(q.blocks) + row_start(entry, row_blocks);
      const int4 from = __ldg(table + block);
      return {from.x, from.y, from.z, static_cast<uint32_t>(from.w)};
    }
    const int32_t row = block * kBlock;
    return {row, min(m - row, kBlock), 0, static_cast<uint32_t>(row)};
  }
};

// Walks the tiles of the units that a thread block draws.
struct Cursor {
  uint32_t super, sub;
  uint32_t begin, end;           // of the unit's tiles
  int32_t entry, block, column;  // batch entry, first row block and first column of the super-tile
  bool inside;                   // whether there is anything of x in the tile

  __device__ __forceinline__ void take(const TileTask& task, uint32_t unit) {
    const Schedule& schedule = task.schedule;
    if (unit < schedule.whole) {
      super = unit, begin = 0, end = kSuperTiles;
    } else {
      const uint32_t tile = unit - schedule.whole;
      super = schedule.whole + tile / kSuperTiles, begin = tile % kSuperTiles, end = begin + 1;
    }
    sub = begin;
    const uint32_t of_entry = schedule.super_rows * schedule.super_columns,
                   in_entry = super % of_entry;
    const uint32_t of_band = kBand * schedule.super_columns, in_band = in_entry % of_band;
    const uint32_t first = in_entry / of_band * kBand,
                   height = min(kBand, schedule.super_rows - first);
    entry = static_cast<int32_t>(super / of_entry);
    column = static_cast<int32_t>(in_band / height) * kSuperColumns;
    block = static_cast<int32_t>(first + in_band % height) * (kRowSpan * kTileBlocks);
    inside = exists(schedule) && reaches(task);
  }
  __device__ __forceinline__ bool exists(const Schedule& schedule) const {
    return super < schedule.supers;
  }
  // Super-tiles reach beyond x.
  __device__ __forceinline__ bool reaches(const TileTask& task) const {
    return tile_block() < task.row_blocks && tile_column() < task.k;
  }
  // To the next tile of the unit; true if there is none.
  __device__ __forceinline__ bool advance(const TileTask& task) {
    do ++sub;
    while (sub < end && !(inside = reaches(task)));
    return sub == end;
  }

  __device__ __forceinline__ int32_t sub_row() const { return sub % kRowSpan; }
  __device__ __forceinline__ int32_t sub_column() const { return sub / kRowSpan; }
  // First column, and first row block, of the tile, which may lie outside.
  __device__ __forceinline__ int32_t tile_column() const {
    return column + sub_column() * kTileColumns;
  }
  __device__ __forceinline__ int32_t tile_block() const { return block + sub_row() * kTileBlocks; }
};

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_SCHEDULE_CUH_
