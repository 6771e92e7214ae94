// Which tiles of the result there are: every thread block finds them from the group sizes.
#ifndef JAX_FP4_XLA_FFI_KERNELS_GEMM_PLAN_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_GEMM_PLAN_CUH_

#include <stdint.h>

#include "grouped_gemm.h"
#include "nvfp4.h"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

constexpr int kGroupThreads = 128;  // of a warpgroup

// What the kernel gets beside its maps. "Rows" and "columns" are those of the result.
struct GemmTask {
  int32_t m, rows, columns, contracted, groups;  // rows, contracted: of a group where it is fixed
  int32_t part_rows;  // of a contraction, whose parts follow one another, each of all groups
  bool padded;        // groups of a contraction begin at blocks of 16
  const uint8_t* block_scale;
  const float *lhs_factor, *rhs_factor, *bias, *row_weights;
  bool lhs_by_row, rhs_by_column;
  const int32_t* group_sizes;
  uint32_t* drawn;  // tiles, beyond the first of each block; null: every gridDim.x-th is a block's
  void* out;
  uint32_t
      places[2];  // by which nibbles are multiplied (decode_word); constants would become shifts
};

// A tile of the result and its part of the contraction.
struct Tile {
  int32_t group;
  int32_t row, rows;  // the first, and how many of them are of the group
  int32_t column;
  int32_t begin, length;  // of the contraction
  int32_t is_tail;        // rows of no group, which come out zero
};

// In shared memory. Under kContraction: where the groups begin and how long they are. Otherwise:
// where their rows begin, and how many tiles of rows are before them; the rows of no group follow
// as one more group.
struct Plan {
  int32_t* begin;  // [groups + 2]
  int32_t* more;   // [groups + 2]
};

// The sum over the lanes up to this one.
__device__ __forceinline__ int64_t scan(int64_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// By one warp. kTileRows: 0 for a contraction.
template <int kTileRows>
__device__ __forceinline__ void make_plan(const GemmTask& task, const Plan& plan, int lane) {
  int64_t sum = 0, later = 0;  // rows, and tiles or stored positions, of the groups so far
  for (int32_t base = 0; base < task.groups; base += 32) {
    const int32_t i = base + lane;
    const int64_t size = i < task.groups ? max(task.group_sizes[i], 0) : 0;
    const int64_t end = sum + scan(size, lane);
    const int32_t first = static_cast<int32_t>(min(end - size, static_cast<int64_t>(task.m)));
    const int32_t count = static_cast<int32_t>(min(end, static_cast<int64_t>(task.m))) - first;
    const int64_t unit = kTileRows > 0 ? ceil_div(count, kTileRows) : ceil_div(count, 16) * 16;
    const int64_t after = later + scan(unit, lane);
    if (i < task.groups) {
      plan.begin[i] = kTileRows == 0 && task.padded ? static_cast<int32_t>(after - unit) : first;
      if (kTileRows > 0) plan.more[i] = static_cast<int32_t>(after - unit);
      if (kTileRows == 0) plan.more[i] = task.padded ? static_cast<int32_t>(unit) : count;
    }
    sum = __shfl_sync(~0u, end, 31);
    later = __shfl_sync(~0u, after, 31);
  }
  if (kTileRows == 0 || lane > 0) return;
  const int32_t used = static_cast<int32_t>(min(sum, static_cast<int64_t>(task.m)));
  plan.begin[task.groups] = used;
  plan.begin[task.groups + 1] = task.m;
  plan.more[task.groups] = static_cast<int32_t>(later);
  plan.more[task.groups + 1] =
      static_cast<int32_t>(later + ceil_div(task.m - used, kTileRows > 0 ? kTileRows : 1));
}

// Tiles one after another: in bands of columns, so that those at work at a time share both
// operands.
template <int kTileRows, int kTileColumns, bool kContraction>
class Tiles {
 public:
  __device__ __forceinline__ Tiles(const GemmTask& task, const Plan& plan)
      : task_(task), plan_(plan), across_(ceil_div(task.columns, kTileColumns)) {}

  __device__ __forceinline__ uint32_t count() const {
    return kContraction ? task_.groups * down(0) * across_ : plan_.more[task_.groups + 1] * across_;
  }
  // Of ascending `index`.
  __device__ __forceinline__ Tile at(uint32_t index) {
    uint32_t within;
    if (kContraction) {
      group_ = static_cast<int32_t>(index / (down(0) * across_));
      within = index - group_ * down(0) * across_;
    } else {
      while (index >= plan_.more[group_ + 1] * across_) ++group_;
      within = index - plan_.more[group_] * across_;
    }
    const uint32_t high = down(group_), band = within / (kBand * high);
    const uint32_t rest = within - band * kBand * high, wide = min(kBand, across_ - band * kBand);
    const uint32_t row = rest / wide;
    Tile tile;
    tile.group = group_;
    tile.column = static_cast<int32_t>((band * kBand + rest - row * wide) * kTileColumns);
    tile.is_tail = !kContraction && group_ == task_.groups;
    const int32_t first = kContraction ? 0 : plan_.begin[group_];
    const int32_t end = kContraction ? task_.rows : plan_.begin[group_ + 1];
    tile.row = first + static_cast<int32_t>(row * kTileRows);
    tile.rows = min(end - tile.row, kTileRows);
    tile.begin = kContraction ? plan_.begin[group_] : 0;
    tile.length = kContraction ? plan_.more[group_] : task_.contracted;
    return tile;
  }

 private:
  static constexpr uint32_t kBand = 16;

  __device__ __forceinline__ uint32_t down(int32_t group) const {
    return kContraction ? ceil_div(task_.rows, kTileRows)
                        : plan_.more[group + 1] - plan_.more[group];
  }

  const GemmTask& task_;
  const Plan& plan_;
  uint32_t across_;
  int32_t group_ = 0;
};

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_GEMM_PLAN_CUH_
