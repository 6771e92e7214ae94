// What a thread of quantize_tiles.cu knows of its patch, and patches done again by the words of
// nvfp4.h: they read x itself, since the tile after theirs is on its way to the stage.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_WORK_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_WORK_CUH_

#include <type_traits>

#include "tile_patch.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// Largest magnitude of value(i) for so many elements, as bits.
template <class Value>
__device__ uint32_t most_of(int count, const Value& value) {
  uint32_t most = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) most = max(most, __float_as_uint(value(i)) & kMagnitude);
  return most;
}

// The scale under which value(row, i), of so many rows of 16, have the smaller error.
template <ErrorNorm norm, class Value>
__device__ uint32_t exact_scale(const Value& value, int rows, uint32_t amax,
                                const TensorScale<float>& tensor, float bound) {
  if (amax >= kInfBits) return kNanScale;
  const FourOverSixScales<float> scales = four_over_six_scales<float>(amax, tensor);
  float whole[2];
#pragma unroll 1
  for (int four = 0; four < 2; ++four) {
    const float scale = e4m3_decode<float>(four ? scales.four : scales.six);
    const float multiplier = encode_multiplier(scale, tensor);
    float error[kBlock];
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      error[r] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < kBlock; ++i)
        error[r] += four_over_six_error<norm>(fabsf(value(r, i)), multiplier, scale, tensor.amax,
                                              kE2M1Max * bound);
    }
#pragma unroll 1
    for (int stride = rows / 2; stride > 0; stride /= 2)
      for (int r = 0; r < stride; ++r) error[r] += error[r + stride];
    whole[four] = error[0];
  }
  return whole[1] < whole[0] ? scales.four : scales.six;
}

// What a thread knows while it works on a tile.
template <class V>
struct TileWork {
  const TileTask& task;
  TileMemory<V>& memory;
  const Cursor& at;
  Place place;
  ScaledBlock block;  // of the patch

  // The patch's row block, with the scales of its group: asked for before they are needed.
  __device__ __forceinline__ static ScaledBlock find_block(const TileTask& task, const Cursor& at) {
    const int32_t number = at.tile_block() + Place::of(threadIdx.x).row / kBlock;
    if constexpr (V::kScaling != Scaling::kGroups)
      return {task.row_block<V>(at.entry, number), {0.0f, 1.0f}, {0.0f, 1.0f}};
    if (number >= task.row_blocks) return {{0, 0, 0, 0}, {0.0f, 1.0f}, {0.0f, 1.0f}};
    const ScaledBlock* from = task.q.scaled + row_start(at.entry, task.row_blocks) + number;
    const int4 rows = __ldg(reinterpret_cast<const int4*>(from));
    const float4 scales = __ldg(reinterpret_cast<const float4*>(from) + 1);
    const RowBlock block = {rows.x, rows.y, rows.z, static_cast<uint32_t>(rows.w)};
    return {block, {scales.x, scales.y}, {scales.z, scales.w}};
  }
  __device__ __forceinline__ static TileWork of(const TileTask& task, TileMemory<V>& memory,
                                                const Cursor& at, const ScaledBlock& found) {
    TileWork work = {task, memory, at, Place::of(threadIdx.x), found};
    if constexpr (V::kScaling == Scaling::kTensor)
      work.block.row = memory.row, work.block.column = memory.column;
    return work;
  }

  // The patch's first row and column of the super-tile.
  __device__ int row() const { return at.sub_row() * kTileRows + place.row; }
  __device__ int column() const { return at.sub_column() * kTileColumns + place.column; }
  // Where its scales stay: eight bytes.
  __device__ uint8_t* row_scales() const {
    return memory.row_scales + column() / kBlock * kSuperRows + row();
  }
  __device__ uint8_t* column_scales() const {
    return memory.column_scales + row() / kBlock * kSuperColumns + column();
  }
  // Keeps them there. The other half of the blocks does the same, which costs less than to ask.
  __device__ __forceinline__ void keep_rows(const uint32_t scales[2]) const {
    *reinterpret_cast<uint2*>(row_scales()) = make_uint2(scales[0], scales[1]);
  }
  __device__ __forceinline__ void keep_columns(const uint32_t scales[2]) const {
    *reinterpret_cast<uint2*>(column_scales()) = make_uint2(scales[0], scales[1]);
  }
  // Where the codes of its first column turn; the others' are 32 bytes apart.
  __device__ uint32_t* column_codes() const {
    return reinterpret_cast<uint32_t*>(memory.column_codes + column_slot(place.column) +
                                       place.row / 2);
  }
  // An element of the patch's row block, as it is quantized, from x itself; 0 outside.
  __device__ float value(int row, int32_t column) const {
    if (row >= block.rows.rows || column >= task.k) return 0.0f;
    return load_element(task.q.p,
                        row_start(at.entry * task.m + block.rows.row + row, task.k) + column);
  }
  // The largest magnitude of the 16x16 tile whose first column is `corner`.
  __device__ uint32_t square_most(int32_t corner) const {
    return most_of(kBlock * kBlock, [&](int i) { return value(i / kBlock, corner + i % kBlock); });
  }
  // The scale of a block of value(i), or of the 16x16 tile whose first column is `corner`.
  template <class Value>
  __device__ uint32_t exact_scale_of(const Value& value, int32_t corner,
                                     const TensorScale<float>& tensor, float bound) const {
    const bool square = task.q.p.tile == kBlock;
    const uint32_t amax = square ? square_most(corner) : most_of(kBlock, value);
    if constexpr (V::kNorm == ErrorNorm::kNone) {
      return block_scale<float>(amax, tensor);
    } else {
      const auto in_tile = [&](int row, int i) {
        return square ? this->value(row, corner + i) : value(i);
      };
      return exact_scale<V::kNorm>(in_tile, square ? kBlock : 1, amax, tensor, bound);
    }
  }
  // Where the random bytes of its matrix begin, if there are any.
  __device__ Origin origin(uint32_t direction) const {
    return V::kStochastic ? Origin::of(task.q, at.entry, block.rows.group, direction) : Origin{};
  }
  // Rows of the patch that exist, from its first one on; its columns exist together.
  __device__ int rows() const { return columns_exist() ? block.rows.rows - place.row % kBlock : 0; }
  __device__ bool columns_exist() const { return at.tile_column() + place.column < task.k; }
  // Whether its row block has any row in its columns: the other half of the block may.
  __device__ bool block_exists() const { return columns_exist() && block.rows.rows > 0; }
  // Index in x of the patch's first element: that of the tile's corner, which all threads share,
  // and the rest. Rows of groups do not follow from the tile's.
  __device__ int64_t corner() const {
    return V::kScaling == Scaling::kGroups
               ? 0
               : row_start(at.entry * task.m + at.tile_block() * kBlock, task.k) + at.tile_column();
  }
  using Offset = std::conditional_t<V::kScaling == Scaling::kGroups, uint64_t, uint32_t>;
  __device__ Offset offset() const {
    if (V::kScaling == Scaling::kGroups)
      return row_start(at.entry * task.m + block.rows.row + place.row % kBlock, task.k) +
             at.tile_column() + place.column;
    return static_cast<uint32_t>(place.row) * static_cast<uint32_t>(task.k) + place.column;
  }
};

// ---- Patches done again by definition ----------------------------------------------------------

template <class V>
__device__ __noinline__ void redo_rows(const TileTask& task, TileMemory<V>& memory, Cursor at) {
  const TileWork<V> work = TileWork<V>::of(task, memory, at, TileWork<V>::find_block(task, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  const RowBlock& rows = work.block.rows;
  uint8_t* scales = work.row_scales();
  const int32_t corner = (at.tile_column() + place.column) / kBlock * kBlock;
  const float bound = static_cast<float>(p.row.bound);
  const Origin origin = work.origin(kRowDirection);
  const int64_t first = work.corner() + work.offset();
#pragma unroll 1
  for (int r = 0; r < kPatch && r < work.rows(); ++r) {
    const int in_block = place.row % kBlock + r;
    const auto value = [&](int i) { return work.value(in_block, corner + i); };
    const TensorScale<float> tensor =
        tensor_scale(row_form_amax(task.q, at.entry, rows, rows.row + in_block), bound);
    const uint32_t scale = work.exact_scale_of(value, corner, tensor, bound);
    uint32_t random[4];
    if (p.seed != nullptr) origin.draw(rows.place + in_block, corner / kBlock, random);
    const ExactBlock exact =
        ExactBlock::of(value, scale, tensor, p.seed == nullptr ? nullptr : random);
    const auto codes = static_cast<uint32_t>(exact.codes >> (32 * place.column_half));
    const int64_t element = first + r * p.k;
    if (place.column_half == 0) scales[r] = static_cast<uint8_t>(exact.scale);
    if (p.row.codes != nullptr) *reinterpret_cast<uint32_t*>(p.row.codes + element / 2) = codes;
    for (int i = 0; p.values != nullptr && i < kPatch; ++i) {
      const float product =
          e2m1_decode<float>((codes >> (4 * i)) & 15u) * e4m3_decode<float>(exact.scale);
      p.values[element + i] =
          static_cast<uint16_t>(__float_as_uint(round_to_bfloat16(product)) >> 16);
    }
  }
}

template <class V>
__device__ __noinline__ void redo_columns(const TileTask& task, TileMemory<V>& memory, Cursor at) {
  const TileWork<V> work = TileWork<V>::of(task, memory, at, TileWork<V>::find_block(task, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  uint8_t* scales = work.column_scales();
  const RowBlock& rows = work.block.rows;
  const float bound = static_cast<float>(p.column.bound);
  const Origin origin = work.origin(kColumnDirection);
#pragma unroll 1
  for (int c = 0; c < kPatch; ++c) {
    const int32_t column = at.tile_column() + place.column + c;
    float v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = work.value(i, column);
    if (p.column.hadamard) hadamard16(v);
    const auto value = [&](int i) { return v[i]; };
    const TensorScale<float> tensor =
        tensor_scale(column_form_amax(task.q, at.entry, rows, column), bound);
    const uint32_t scale = work.exact_scale_of(value, column / kBlock * kBlock, tensor, bound);
    uint32_t random[4];
    if (p.seed != nullptr) origin.draw(column, rows.place / kBlock, random);
    const ExactBlock exact =
        ExactBlock::of(value, scale, tensor, p.seed == nullptr ? nullptr : random);
    if (place.row_half == 0) scales[c] = static_cast<uint8_t>(exact.scale);
    work.column_codes()[c * kCodeStride] =
        static_cast<uint32_t>(exact.codes >> (32 * place.row_half));
  }
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_WORK_CUH_
