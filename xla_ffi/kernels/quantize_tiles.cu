// Both stored forms, or either, or the values of the row-wise one, from one reading of x: bfloat16
// values (of bfloat16 or float32 x), whole blocks of columns in pairs. Per element 2 or 4 bytes are
// read, 0.5625 written a form and 2 for the values.
//
// A tile is 4 row blocks (64 rows) by 128 columns. Its 128 threads hold a patch of 8 x 8 each,
// pairs of columns a register, which serves both directions; a block of sixteen is two patches, and
// one shuffle joins their maxima. Shared memory holds the tile that is on its way while its
// predecessor is under work in registers. Row-wise codes leave from registers, 32 bytes a row and
// warp; column-wise ones turn in shared memory. Scales are kept until a super-tile (up to 4 x 2
// tiles) is done, since many short stores cost more than they move.
//
// Thread blocks are persistent and take super-tiles in row-major order.
//
// A block whose scale comes out as 0x7F is not finite, or its tensor scale not calm (encode.cuh):
// its patch is done again by the words of nvfp4.h, from the staged x.
#include <type_traits>

#include "tile_patch.cuh"

namespace jax_fp4::cuda {
namespace {

// ---- One tile ----------------------------------------------------------------------------------

// Largest magnitude of value(i) for so many elements, as bits.
template <class Value>
__device__ uint32_t most_of(int count, const Value& value) {
  uint32_t most = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) most = max(most, __float_as_uint(value(i)) & kMagnitude);
  return most;
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
  __device__ __forceinline__ static ScaledBlock find(const TileTask& task, const Cursor& at) {
    const int32_t number = at.tile_block() + Place::of(threadIdx.x).row / kBlock;
    ScaledBlock found = {task.row_block<V>(at.entry, number), {0.0f, 1.0f}, {0.0f, 1.0f}};
    if (V::kScaling == Scaling::kGroups && number < task.row_blocks) {
      const float4 scales =
          __ldg(reinterpret_cast<const float4*>(task.q.scaled +
                                                row_start(at.entry, task.row_blocks) + number) +
                1);
      found.row = {scales.x, scales.y}, found.column = {scales.z, scales.w};
    }
    return found;
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
  __device__ __forceinline__ void keep_rows(const EightScales& scales) const {
    *reinterpret_cast<uint2*>(row_scales()) = make_uint2(scales.bytes[0], scales.bytes[1]);
  }
  __device__ __forceinline__ void keep_columns(const EightScales& scales) const {
    *reinterpret_cast<uint2*>(column_scales()) = make_uint2(scales.bytes[0], scales.bytes[1]);
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
  // Rows of the patch that exist, from its first one on.
  __device__ int rows() const {
    return at.tile_column() + place.column < task.k ? block.rows.rows - place.row % kBlock : 0;
  }
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
  const TileWork<V> work = TileWork<V>::of(task, memory, at, TileWork<V>::find(task, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  uint8_t* scales = work.row_scales();
  const int32_t corner = (at.tile_column() + place.column) / kBlock * kBlock;
#pragma unroll 1
  for (int r = 0; r < kPatch && r < work.rows(); ++r) {
    const int in_block = place.row % kBlock + r;
    const auto value = [&](int i) { return work.value(in_block, corner + i); };
    const uint32_t amax = p.tile == 1 ? most_of(kBlock, value) : work.square_most(corner);
    uint32_t random[4];
    if (p.seed != nullptr)
      Origin::of(task.q, at.entry, work.block.rows.group, kRowDirection)
          .draw(work.block.rows.number * kBlock + in_block, corner / kBlock, random);
    const ExactBlock exact = ExactBlock::of(
        value, amax,
        row_form_amax(task.q, at.entry, work.block.rows, work.block.rows.row + in_block),
        static_cast<float>(p.row.bound), p.seed == nullptr ? nullptr : random);
    const auto codes = static_cast<uint32_t>(exact.codes >> (32 * place.column_half));
    const int64_t element = work.corner() + work.offset() + r * p.k;
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
  const TileWork<V> work = TileWork<V>::of(task, memory, at, TileWork<V>::find(task, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  uint8_t* scales = work.column_scales();
  const RowBlock& rows = work.block.rows;
  if (rows.rows == 0) return;  // zeros, whatever the amax
#pragma unroll 1
  for (int c = 0; c < kPatch; ++c) {
    const int32_t column = at.tile_column() + place.column + c;
    float v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = work.value(i, column);
    if (p.column.hadamard) hadamard16(v);
    const auto value = [&](int i) { return v[i]; };
    const uint32_t amax =
        p.tile == 1 ? most_of(kBlock, value) : work.square_most(column / kBlock * kBlock);
    uint32_t random[4];
    if (p.seed != nullptr)
      Origin::of(task.q, at.entry, rows.group, kColumnDirection).draw(column, rows.number, random);
    const ExactBlock exact =
        ExactBlock::of(value, amax, column_form_amax(task.q, at.entry, rows, column),
                       static_cast<float>(p.column.bound), p.seed == nullptr ? nullptr : random);
    if (place.row_half == 0) scales[c] = static_cast<uint8_t>(exact.scale);
    work.column_codes()[c * kCodeStride] =
        static_cast<uint32_t>(exact.codes >> (32 * place.row_half));
  }
}

// ---- Codes of a patch ---------------------------------------------------------------------------

// Scales of a patch's rows from their maxima, kept for the end of the super-tile too.
template <class V>
__device__ __forceinline__ void choose_row_scales(const TileWork<V>& work, const uint32_t most[4],
                                                  EightScales& scales) {
  if constexpr (V::kScaling == Scaling::kLines) {
    const LineScale* lines = work.memory.row_lines + work.row();
    scales.choose(most, [&](int i) { return lines[i]; }, nullptr);
  } else {
    scales.choose(
        most, [&](int) { return work.block.row; },
        V::kScaling == Scaling::kTensor ? work.memory.row_table : nullptr);
  }
  work.keep_rows(scales);
}

template <class V>
__device__ __forceinline__ void choose_column_scales(const TileWork<V>& work,
                                                     const uint32_t most[4], EightScales& scales) {
  if constexpr (V::kScaling == Scaling::kLines) {
    const LineScale* lines = work.memory.column_lines + work.column();
    scales.choose(most, [&](int i) { return lines[i]; }, nullptr);
  } else {
    scales.choose(
        most, [&](int) { return work.block.column; },
        V::kScaling == Scaling::kTensor ? work.memory.column_table : nullptr);
  }
  work.keep_columns(scales);
}

// The random words of a patch's rows or columns.
template <class V>
__device__ __forceinline__ void draw(const TileWork<V>& work, bool row_wise,
                                     uint32_t random[kPatch][2]) {
  const Place& place = work.place;
  const Origin origin = V::kScaling == Scaling::kTensor
                            ? (row_wise ? work.memory.row_origin : work.memory.column_origin)
                            : Origin::of(work.task.q, work.at.entry, work.block.rows.group,
                                         row_wise ? kRowDirection : kColumnDirection);
  const int32_t column = work.at.tile_column() + place.column;
  const int32_t line = row_wise ? work.block.rows.number * kBlock + place.row % kBlock : column;
  const int32_t block = row_wise ? column / kBlock : work.block.rows.number;
  draw_eight(origin, line, block, row_wise ? place.column_half : place.row_half,
             row_wise ? kAcross : kDown, random);
}

__device__ __forceinline__ float value_of(const Patch& x, int r, int c) {
  const uint32_t pair = x.pair[r][c / 2];
  return c % 2 == 0 ? low_half(pair) : high_half(pair);
}

// `codes` holds the signs.
template <class V>
__device__ __forceinline__ void encode_rows(const TileWork<V>& work, const Patch& x,
                                            const EightScales& scales, uint32_t codes[kPatch]) {
  uint32_t random[kPatch][2];
  if (V::kStochastic) draw(work, true, random);
#pragma unroll
  for (int r = 0; r < kPatch; ++r)
    codes[r] =
        encode_eight<V::kStochastic>([&](int i) { return value_of(x, r, i); }, scales.multiplier[r],
                                     codes[r], work.task.places, random[r]);
}

template <class V>
__device__ __forceinline__ void encode_columns(const TileWork<V>& work, const Patch& x,
                                               const EightScales& scales, uint32_t codes[kPatch]) {
  uint32_t random[kPatch][2];
  if (V::kStochastic) draw(work, false, random);
#pragma unroll
  for (int c = 0; c < kPatch; ++c)
    codes[c] =
        encode_eight<V::kStochastic>([&](int i) { return value_of(x, i, c); }, scales.multiplier[c],
                                     codes[c], work.task.places, random[c]);
}

// Rows and columns together, so that an element is taken apart once.
__device__ __forceinline__ void encode_both(const Patch& x, const Places& places,
                                            const EightScales& row_scales,
                                            const EightScales& column_scales,
                                            uint32_t row_codes[kPatch],
                                            uint32_t column_codes[kPatch]) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r)
#pragma unroll
    for (int c = 0; c < kPatch; ++c) {
      const float value = value_of(x, r, c);
      const float across = saturated_product(value, row_scales.multiplier[r]);
      const float down = saturated_product(value, column_scales.multiplier[c]);
      add_code(row_codes[r], nearest_bits(across), c, places);
      add_code(column_codes[c], nearest_bits(down), r, places);
    }
}

// Codes and values of a patch's rows, as they are asked for.
template <class V>
__device__ __forceinline__ void store_rows(const TileWork<V>& work, const Patch& x,
                                           const EightScales& scales,
                                           const uint32_t codes[kPatch]) {
  using Offset = typename TileWork<V>::Offset;
  const QuantizeProblem& p = work.task.q.p;
  const int rows = work.rows();
  const Offset width = static_cast<uint32_t>(work.task.k);
  if (p.row.codes != nullptr) {
    uint8_t* to = p.row.codes + work.corner() / 2;
    const Offset offset = work.offset() / 2;
    if (rows >= kPatch) {
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        *reinterpret_cast<uint32_t*>(to + (offset + r * (width / 2))) = codes[r];
    } else {
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        if (r < rows) *reinterpret_cast<uint32_t*>(to + (offset + r * (width / 2))) = codes[r];
    }
  }
  if (p.values != nullptr) {
    uint16_t* to = p.values + work.corner();
    const Offset offset = work.offset();
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      const uint32_t byte = (scales.bytes[r / 4] >> (r % 4 * 8)) & 0x7Fu;
      const uint4 values = product_values(codes[r], e4m3_value(byte), x.pair[r]);
      if (r < rows) *reinterpret_cast<uint4*>(to + (offset + r * width)) = values;
    }
  }
}

// Codes of a patch's columns, to where they turn.
template <class V>
__device__ __forceinline__ void stage_columns(const TileWork<V>& work,
                                              const uint32_t codes[kPatch]) {
  uint32_t* to = work.column_codes();
#pragma unroll
  for (int c = 0; c < kPatch; ++c) to[c * kCodeStride] = codes[c];
}

// Which directions of a patch must be done again.
struct Again {
  bool rows, columns;
};

// Both directions, rounded to nearest.
template <class V>
__device__ __forceinline__ Again quantize_both(const TileWork<V>& work, const Patch& x) {
  const bool square = work.task.q.p.tile == kBlock;
  uint32_t row_codes[kPatch], column_codes[kPatch], most[4];
  EightScales row_scales, column_scales;
#pragma unroll
  for (int r = 0; r < kPatch; ++r) row_codes[r] = row_signs(x.pair[r]);
  row_maxima(x, most);
  if (square) square_maxima(most);
  choose_row_scales(work, most, row_scales);
  if (V::kScaling == Scaling::kTensor && square && work.memory.same) {
    // One scale for the tile in both directions, so the same codes.
    encode_rows(work, x, row_scales, row_codes);
    work.keep_columns(row_scales);
    transpose_nibbles(row_codes, column_codes);
    column_scales = row_scales;
  } else {
    if (!square) column_maxima(x, most);
    choose_column_scales(work, most, column_scales);
    transpose_nibbles(row_codes, column_codes);
    encode_both(x, work.task.places, row_scales, column_scales, row_codes, column_codes);
  }
  store_rows(work, x, row_scales, row_codes);
  stage_columns(work, column_codes);
  return {row_scales.has_nan() && work.rows() > 0, column_scales.has_nan()};
}

// Either direction, or both one after the other.
template <class V>
__device__ __forceinline__ Again quantize_each(const TileWork<V>& work, Patch& x) {
  const QuantizeProblem& p = work.task.q.p;
  Again again = {false, false};
  EightScales scales;
  uint32_t codes[kPatch], most[4];
  if (p.row.wanted) {
    row_maxima(x, most);
    if (p.tile == kBlock) square_maxima(most);
    choose_row_scales(work, most, scales);
#pragma unroll
    for (int r = 0; r < kPatch; ++r) codes[r] = row_signs(x.pair[r]);
    encode_rows(work, x, scales, codes);
    store_rows(work, x, scales, codes);
    again.rows = scales.has_nan() && work.rows() > 0;
  }
  if (p.column.wanted) {
    if (V::kMixed) mix_columns(x, work.place.row_half);
    if (p.tile == kBlock) {
      row_maxima(x, most);
      square_maxima(most);
    } else {
      column_maxima(x, most);
    }
    choose_column_scales(work, most, scales);
    uint32_t signs[kPatch];
#pragma unroll
    for (int r = 0; r < kPatch; ++r) signs[r] = row_signs(x.pair[r]);
    transpose_nibbles(signs, codes);
    encode_columns(work, x, scales, codes);
    stage_columns(work, codes);
    again.columns = scales.has_nan();
  }
  return again;
}

// ---- What a tile or super-tile leaves ----------------------------------------------------------

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

// The scales of those tiles of a super-tile that this thread block has made: from `first` to where
// it is.
template <class V>
__device__ __forceinline__ void store_scales(const TileTask& task, const TileMemory<V>& memory,
                                             const Cursor& at, uint32_t first) {
  const QuantizeProblem& p = task.q.p;
  const auto is_made = [&](int sub_row, int sub_column) {
    const uint32_t sub = sub_column * kRowSpan + sub_row;
    return first <= sub && sub <= at.sub;
  };
  if (p.row.wanted && p.row.codes != nullptr) {
    constexpr int kAcross = kSuperColumns / kBlock / 4;
    const int32_t blocks = task.k / kBlock;
#pragma unroll 1
    for (int id = threadIdx.x; id < kSuperRows / 4 * kAcross; id += kThreads) {
      const int line = id / kAcross * 4, in_super = id % kAcross * 4;
      const int32_t block = at.column / kBlock + in_super;
      if (block >= blocks || !is_made(line / kTileRows, in_super * kBlock / kTileColumns)) continue;
      const RowBlock rows = task.row_block<V>(at.entry, at.block + line / kBlock);
      store_four(memory.row_scales + in_super * kSuperRows + line, kSuperRows, p.row.block_scale,
                 blocks, at.entry * task.m + rows.row + line % kBlock, rows.rows - line % kBlock,
                 block);
    }
  }
  if (p.column.wanted) {
    constexpr int kAcross = kSuperRows / kBlock / 4;
    const int32_t blocks = task.row_blocks;
#pragma unroll 1
    for (int id = threadIdx.x; id < kSuperColumns / 4 * kAcross; id += kThreads) {
      const int line = id / kAcross * 4, in_super = id % kAcross * 4;
      const int32_t block = at.block + in_super;
      if (block >= blocks || !is_made(in_super / kTileBlocks, line / kTileColumns)) continue;
      store_four(memory.column_scales + in_super * kSuperColumns + line, kSuperColumns,
                 p.column.block_scale, blocks, at.entry * task.k + at.column + line,
                 task.k - at.column - line, block);
    }
  }
}

// ---- What tiles need ---------------------------------------------------------------------------

// The scale of a batch entry, and its table.
__device__ __forceinline__ float prepare_form(const StoredForm& form, int32_t entry,
                                              LineScale& line, float* table) {
  if (!form.wanted) return 0.0f;
  const float amax = amax_at(form, entry), bound = static_cast<float>(form.bound);
  table[threadIdx.x] =
      encode_multiplier(e4m3_decode<float>(threadIdx.x), tensor_scale(amax, bound)) * 0.125f;
  if (threadIdx.x == 0) line = LineScale::of(amax, bound);
  return amax;
}
template <class V>
__device__ __noinline__ void prepare_entry(const TileTask& task, TileMemory<V>& memory,
                                           int32_t entry) {
  const QuantizeProblem& p = task.q.p;
  const float row = prepare_form(p.row, entry, memory.row, memory.row_table);
  const float column = prepare_form(p.column, entry, memory.column, memory.column_table);
  if (threadIdx.x != 0) return;
  memory.same = row == column && p.row.bound == p.column.bound;
  if (!V::kStochastic) return;
  memory.row_origin = Origin::of(task.q, entry, 0, kRowDirection);
  memory.column_origin = Origin::of(task.q, entry, 0, kColumnDirection);
}

// Under row scaling, the scales of a super-tile's rows or columns.
__device__ __noinline__ void prepare_lines(const StoredForm& form, int64_t first, int64_t extent,
                                           LineScale* lines, int count) {
  if (!form.wanted) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads)
    lines[i] =
        LineScale::of(i < extent ? amax_at(form, first + i) : 0.0f, static_cast<float>(form.bound));
}

// ---- The kernel --------------------------------------------------------------------------------

template <class V>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_tiles(const __grid_constant__ TileTask task) {
  __shared__ TileMemory<V> memory;
  const QuantizeProblem& p = task.q.p;
  const auto draw_unit = [&] { return gridDim.x + atomicAdd(task.q.units, 1u); };
  Cursor now;
  now.take(task.grid, blockIdx.x);
  fetch<V>(task, now, memory.stage);
  if (threadIdx.x == 0) memory.unit[0] = draw_unit();
  store_given_amaxes(p);
  int32_t entry = -1;            // whose scales are there
  uint32_t first_sub = now.sub;  // of the unit
  uint32_t which = 0;            // of memory.unit
  await_copies();
  __syncthreads();
  while (now.exists(task.grid)) {
    if (V::kScaling == Scaling::kTensor && now.entry != entry)
      prepare_entry<V>(task, memory, entry = now.entry);
    if (V::kScaling == Scaling::kLines && now.sub == first_sub) {
      const int64_t row = now.block * kBlock, column = now.column;
      prepare_lines(p.row, now.entry * p.m + row, p.m - row, memory.row_lines, kSuperRows);
      prepare_lines(p.column, now.entry * p.k + column, p.k - column, memory.column_lines,
                    kSuperColumns);
    }
    const ScaledBlock found = TileWork<V>::find(task, now);
    const Place place = Place::of(threadIdx.x);
    Patch x;
    load_patch(memory.stage, place.row, place.column, x);
    __syncthreads();  // the stage is free, what was prepared is there
    Cursor next = now;
    const bool last = ++next.sub == now.end;
    uint32_t drawn = 0;
    if (last) {
      next.take(task.grid, memory.unit[which]);
      if (threadIdx.x == 0) drawn = draw_unit();
    }
    if (next.exists(task.grid)) fetch<V>(task, next, memory.stage);
    {
      const TileWork<V> work = TileWork<V>::of(task, memory, now, found);
      const bool both = p.row.wanted && p.column.wanted;
      const Again again =
          !V::kStochastic && !V::kMixed && both ? quantize_both(work, x) : quantize_each(work, x);
      if (again.rows) redo_rows<V>(task, memory, now);
      if (again.columns) redo_columns<V>(task, memory, now);
    }
    if (last) {
      which ^= 1;
      if (threadIdx.x == 0) memory.unit[which] = drawn;
    }
    await_copies();
    __syncthreads();  // codes and scales are staged, the next tile is there
    if (p.column.wanted) store_column_codes<V>(task, memory, now);
    if (last) {
      store_scales<V>(task, memory, now, first_sub);
      first_sub = next.sub;
    }
    now = next;
  }
}

template <class V>
cudaError_t launch(const QuantizeTask& q, cudaStream_t stream) {
  TileTask task = {};
  task.q = q;
  task.m = static_cast<int32_t>(q.p.m);
  task.k = static_cast<int32_t>(q.p.k);
  task.row_blocks = static_cast<int32_t>(q.row_blocks);
  for (int i = 0; i < 8; ++i) task.places.of[i] = 1u << (4 * i);
  task.grid.super_rows = static_cast<uint32_t>(ceil_div(q.row_blocks, kRowSpan * kTileBlocks));
  task.grid.super_columns = static_cast<uint32_t>(ceil_div(q.p.k, kSuperColumns));
  task.grid.supers =
      static_cast<uint32_t>(q.p.batch) * task.grid.super_rows * task.grid.super_columns;
  const auto kernel = quantize_tiles<V>;
  int processors = 0, resident = 0;
  cudaError_t error = multiprocessors(&processors);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  // The last tiles are drawn one by one, two or so a thread block.
  const auto slots = static_cast<uint32_t>(processors * (resident > 0 ? resident : 1));
  const uint32_t single = slots * 2 / kSuperTiles;
  task.grid.whole = task.grid.supers > single ? task.grid.supers - single : 0;
  const uint32_t units = task.grid.units(), blocks = units < slots ? units : slots;
  kernel<<<blocks, kThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

template <class X, Scaling scaling>
cudaError_t launch_scaling(const QuantizeTask& task, cudaStream_t stream) {
  const bool random = task.p.seed != nullptr;
  const bool mixed = task.p.column.wanted && task.p.column.hadamard;
  if (random && mixed) return launch<Variant<X, scaling, true, true>>(task, stream);
  if (random) return launch<Variant<X, scaling, true, false>>(task, stream);
  if (mixed) return launch<Variant<X, scaling, false, true>>(task, stream);
  return launch<Variant<X, scaling, false, false>>(task, stream);
}

template <class X>
cudaError_t launch_dtype(const QuantizeTask& task, cudaStream_t stream) {
  // Row scaling knows neither random bytes nor the transform.
  if (task.p.row_scaled) return launch<Variant<X, Scaling::kLines, false, false>>(task, stream);
  if (task.p.grouped) return launch_scaling<X, Scaling::kGroups>(task, stream);
  return launch_scaling<X, Scaling::kTensor>(task, stream);
}

}  // namespace

bool quantize_tiles_supports(const QuantizeProblem& p) {
  const bool bfloat16_values = p.x_dtype == DType::kBF16
                                   ? p.compute != DType::kF16
                                   : p.x_dtype == DType::kF32 && p.compute == DType::kBF16;
  const auto plain = [](const StoredForm& form) {
    return !form.wanted || form.four_over_six == ErrorNorm::kNone;
  };
  const int64_t row_blocks = p.grouped ? grouped_blocks(p.m, p.groups) : ceil_div(p.m, kBlock);
  const int64_t tiles = p.batch * ceil_div(row_blocks, kTileBlocks) * ceil_div(p.k, kTileColumns);
  return bfloat16_values && plain(p.row) && plain(p.column) && p.groups > 0 && tiles > 0 &&
         p.k % (2 * kBlock) == 0 &&       // rows of codes in 16-byte steps
         !(p.row_scaled && p.grouped) &&  // lines would change inside a tile
         !(p.tile == kBlock && p.column.wanted && p.column.hadamard) &&  // a tile of mixed values
         p.k < (1 << 26) && row_blocks < (1 << 22) &&                    // a tile in 32 bits
         p.batch * (p.m + p.k) < (int64_t{1} << 30) && tiles < (int64_t{1} << 28);  // 32 bits
}

cudaError_t launch_quantize_tiles(const QuantizeTask& task, cudaStream_t stream) {
  return task.p.x_dtype == DType::kF32 ? launch_dtype<float>(task, stream)
                                       : launch_dtype<uint16_t>(task, stream);
}

}  // namespace jax_fp4::cuda
