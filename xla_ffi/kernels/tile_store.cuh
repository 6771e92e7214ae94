// What the thread blocks of quantize_tiles.cu write of a tile and of a super-tile, by way of shared
// memory.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_STORE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_STORE_CUH_

#include "tile_stage.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// The column-wise codes of a tile, 32 bytes a column.
template <class V>
__device__ __forceinline__ void store_column_codes(const TileTask& task,
                                                   const TileMemory<V>& memory, const Cursor& at) {
  constexpr int kColumnsAtOnce = kThreads / 2;
  const int chunk = threadIdx.x % 2, first = threadIdx.x / 2;
  const int32_t columns = task.k - at.tile_column();
  const int32_t left = task.row_blocks - at.tile_block() - chunk * 2;  // blocks
  if (left <= 0) return;
  const uint8_t* from = memory.column_codes + column_slot(first) + chunk * 16;
  uint8_t* to =
      task.q.p.column.codes +
      (row_start(at.entry * task.k + at.tile_column(), task.row_blocks) + at.tile_block()) *
          kBlockCodeBytes;
  const uint32_t width = static_cast<uint32_t>(task.row_blocks) * kBlockCodeBytes;
  const uint32_t offset = static_cast<uint32_t>(first) * width + chunk * 16;
#pragma unroll
  for (int i = 0; i < kTileColumns / kColumnsAtOnce; ++i) {
    if (first + i * kColumnsAtOnce >= columns) break;
    const uint4 codes = *reinterpret_cast<const uint4*>(from + column_slot(i * kColumnsAtOnce));
    uint8_t* at_column = to + (offset + i * kColumnsAtOnce * width);
    if (task.row_blocks % 2 == 0) {
      *reinterpret_cast<uint4*>(at_column) = codes;
    } else {
      *reinterpret_cast<uint2*>(at_column) = make_uint2(codes.x, codes.y);
      if (left > 1)
        *reinterpret_cast<uint2*>(at_column + kBlockCodeBytes) = make_uint2(codes.z, codes.w);
    }
  }
}

// Scales of four lines and four blocks, kept as [block, line], become pieces of rows of a form:
// `valid` rows from `row` on, blocks from `block` on.
__device__ __forceinline__ void store_four(const uint8_t* kept, int lines, uint8_t* form,
                                           int32_t blocks, int32_t row, int32_t valid,
                                           int32_t block) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = *reinterpret_cast<const uint32_t*>(kept + i * lines);
  transpose_bytes(word, word);
  uint8_t* to = form + row_start(row, blocks) + block;
  const int32_t left = blocks - block;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += blocks) {
    if (i >= valid) break;
    if (blocks % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to) = word[i];
    } else {
#pragma unroll 1
      for (int b = 0; b < 4 && b < left; ++b) to[b] = static_cast<uint8_t>(word[i] >> (8 * b));
    }
  }
}

// The scales of one form, kept as [block, line] of a super-tile. is_made(line, block) tells whether
// this thread block has made the tile there, place_of(line) the stored row and how many follow.
template <int kLines, int kBlocks, class Made, class PlaceOf>
__device__ __forceinline__ void store_kept(const uint8_t* kept, uint8_t* form, int32_t blocks,
                                           int32_t first_block, const Made& is_made,
                                           const PlaceOf& place_of) {
  constexpr int kFours = kBlocks / 4;  // of a line
#pragma unroll 1
  for (int id = threadIdx.x; id < kLines / 4 * kFours; id += kThreads) {
    const int line = id / kFours * 4, block = id % kFours * 4;
    if (first_block + block >= blocks || !is_made(line, block)) continue;
    const int2 place = place_of(line);
    store_four(kept + block * kLines + line, kLines, form, blocks, place.x, place.y,
               first_block + block);
  }
}

// The scales of those tiles of a super-tile that this thread block has made of its unit.
template <class V>
__device__ __forceinline__ void store_scales(const TileTask& task, const TileMemory<V>& memory,
                                             const Cursor& at) {
  const QuantizeProblem& p = task.q.p;
  const auto is_made = [&](int sub_row, int sub_column) {
    const uint32_t sub = sub_column * kRowSpan + sub_row;
    return at.begin <= sub && sub < at.end;
  };
  if (p.row.wanted && p.row.codes != nullptr)
    store_kept<kSuperRows, kSuperColumns / kBlock>(
        memory.row_scales, p.row.block_scale, task.k / kBlock, at.column / kBlock,
        [&](int row, int block) { return is_made(row / kTileRows, block * kBlock / kTileColumns); },
        [&](int row) {
          const RowBlock rows = task.row_block<V>(at.entry, at.block + row / kBlock);
          return make_int2(at.entry * task.m + rows.row + row % kBlock, rows.rows - row % kBlock);
        });
  if (p.column.wanted)
    store_kept<kSuperColumns, kSuperRows / kBlock>(
        memory.column_scales, p.column.block_scale, task.row_blocks, at.block,
        [&](int column, int block) { return is_made(block / kTileBlocks, column / kTileColumns); },
        [&](int column) {
          return make_int2(at.entry * task.k + at.column + column, task.k - at.column - column);
        });
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_STORE_CUH_
