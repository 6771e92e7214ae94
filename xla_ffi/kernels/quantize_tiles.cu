// Both stored forms, or either, or the values of the row-wise one, from one reading of x: bfloat16
// values (of bfloat16 or float32 x), whole blocks of columns in pairs. Per element 2 or 4 bytes are
// read, 0.5625 written a form and 2 for the values.
//
// A tile is 4 row blocks (64 rows) by 128 columns. Its 128 threads hold a patch of 8 x 8 each,
// pairs of columns a register, which serves both directions; a block of sixteen is two patches, and
// one shuffle joins their maxima. Tiles stream through two stages of shared memory. Row-wise codes
// leave from registers, 32 bytes a row and warp; column-wise ones turn in shared memory. Scales are
// kept until a super-tile (up to 4 x 4 tiles) is done, since stores of less than 32 bytes cost as
// much as whole ones.
//
// Thread blocks are persistent and take super-tiles in column-major order, so that those at work
// together fill whole rows of the transposed outputs.
//
// A block whose scale comes out as 0x7F is not finite, or its tensor scale not calm (encode.cuh):
// its patch is done again by the words of nvfp4.h, from the staged x.
#include "tile_patch.cuh"

namespace jax_fp4::cuda {
namespace {

// ---- One tile ----------------------------------------------------------------------------------

// What a thread knows while it works on a tile.
template <class V>
struct TileWork {
  using X = typename V::X;

  const TileTask& task;
  Shared<X> shared;
  const X* stage;
  Place place;
  int32_t entry;
  int32_t sub_row, sub_column;  // of the super-tile
  int32_t column0;              // of the tile
  ScaledBlock block;            // of the patch

  // Only with groups is this worth asking for before the tile is there.
  __device__ __forceinline__ static ScaledBlock find_block(const TileTask& task,
                                                           const Shared<X>& shared,
                                                           const Cursor& at) {
    const int32_t number = at.block(task.grid) + Place::of(threadIdx.x).row / kBlock;
    ScaledBlock out = {task.row_block<V>(at.entry, number), {0.0f, 1.0f}, {0.0f, 1.0f}};
    if constexpr (V::kScaling == Scaling::kTensor)
      out.row = *shared.tensor(true), out.column = *shared.tensor(false);
    if constexpr (V::kScaling == Scaling::kGroups)
      if (number < task.row_blocks) {
        const float4* from = reinterpret_cast<const float4*>(
            task.q.scaled + row_start(at.entry, task.row_blocks) + number);
        const float4 scales = __ldg(from + 1);
        out.row = {scales.x, scales.y}, out.column = {scales.z, scales.w};
      }
    return out;
  }

  __device__ __forceinline__ static TileWork of(const TileTask& task, const Shared<X>& shared,
                                                const Cursor& at, int stage,
                                                const ScaledBlock& block) {
    return {task,
            shared,
            shared.stage(stage),
            Place::of(threadIdx.x),
            at.entry,
            at.sub_row(task.grid),
            at.sub_column(task.grid),
            at.column(task.grid),
            block};
  }

  __device__ int block_in_tile() const { return place.row / kBlock; }
  __device__ int row_line() const { return sub_row * kTileRows + place.row; }
  __device__ int column_line() const { return sub_column * kTileColumns + place.column; }
  // Where this patch's scales stay: eight bytes.
  __device__ uint8_t* row_scales() const {
    return shared.row_scales() + column_line() / kBlock * shared.super_rows + row_line();
  }
  __device__ uint8_t* column_scales() const {
    return shared.column_scales() + row_line() / kBlock * shared.super_columns + column_line();
  }
  // Rows of the patch that exist, from its first one on.
  __device__ int rows() const {
    return column0 + place.column < task.k ? block.rows.rows - place.row % kBlock : 0;
  }
  // Index in x of the patch's first element.
  __device__ int64_t element() const {
    return row_start(entry * task.m + block.rows.row + place.row % kBlock, task.k) + column0 +
           place.column;
  }
};

// Bytes of four lines become words of one line each: `from` holds [block, line], `stride` apart.
__device__ __forceinline__ void turn_bytes(const uint8_t* from, int stride, uint32_t out[4]) {
  uint32_t in[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) in[i] = *reinterpret_cast<const uint32_t*>(from + i * stride);
  const uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

// Place of eight rows' codes of a column in shared memory: 32 bytes a column, of which the lanes of
// a warp meet each bank once.
__device__ __forceinline__ int column_slot(int column, int chunk) {
  const int lane = column / kPatch % 8;
  return (column ^ ((lane >> 1) & 3)) * 32 + ((chunk ^ (lane & 1)) << 4);
}

// The rows of a patch done again by definition.
template <class V, class X = typename V::X>
__device__ __noinline__ void redo_rows(const TileTask& task, Shared<X> shared, Cursor at,
                                       int stage) {
  const TileWork<V> work =
      TileWork<V>::of(task, shared, at, stage, TileWork<V>::find_block(task, shared, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  uint8_t* scales = work.row_scales();
  const int corner = place.column / kBlock * kBlock;
  const auto most = [&](int first, int count) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < count * kBlock; ++i)
      bits =
          max(bits, __float_as_uint(staged(work.stage, first + i / kBlock, corner + i % kBlock)) &
                        kMagnitude);
    return bits;
  };
#pragma unroll 1
  for (int r = 0; r < kPatch; ++r) {
    const int in_block = place.row % kBlock + r;
    if (r >= work.rows()) break;
    const uint32_t amax =
        p.tile == 1 ? most(place.row + r, 1) : most(work.block_in_tile() * kBlock, kBlock);
    uint32_t random[4];
    if (p.seed != nullptr)
      Origin::of(work.task.q, work.entry, work.block.rows.group, kRowDirection)
          .draw(work.block.rows.number * kBlock + in_block, (work.column0 + corner) / kBlock,
                random);
    const ExactBlock exact = ExactBlock::of(
        [&](int i) { return staged(work.stage, place.row + r, corner + i); }, amax,
        row_form_amax(work.task.q, work.entry, work.block.rows, work.block.rows.row + in_block),
        static_cast<float>(p.row.bound), p.seed == nullptr ? nullptr : random);
    const auto codes = static_cast<uint32_t>(exact.codes >> (32 * place.column_half));
    const int64_t element = work.element() + r * p.k;
    if (place.column_half == 0) scales[r] = static_cast<uint8_t>(exact.scale);
    if (p.row.codes != nullptr) *reinterpret_cast<uint32_t*>(p.row.codes + element / 2) = codes;
    for (int i = 0; p.values != nullptr && i < kPatch; ++i) {
      const float value =
          e2m1_decode<float>((codes >> (4 * i)) & 15u) * e4m3_decode<float>(exact.scale);
      p.values[element + i] =
          static_cast<uint16_t>(__float_as_uint(round_to_bfloat16(value)) >> 16);
    }
  }
}

template <class V, class X = typename V::X>
__device__ __noinline__ void redo_columns(const TileTask& task, Shared<X> shared, Cursor at,
                                          int stage) {
  const TileWork<V> work =
      TileWork<V>::of(task, shared, at, stage, TileWork<V>::find_block(task, shared, at));
  const QuantizeProblem& p = task.q.p;
  const Place& place = work.place;
  uint8_t* scales = work.column_scales();
  const int first = work.block_in_tile() * kBlock;
  const RowBlock& rows = work.block.rows;
  if (rows.rows == 0) return;  // zeros, whatever the amax
#pragma unroll 1
  for (int c = 0; c < kPatch; ++c) {
    const int column = place.column + c;
    float v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = staged(work.stage, first + i, column);
    if (p.column.hadamard) hadamard16(v);
    uint32_t amax = 0;
    for (int i = 0; i < kBlock; ++i) amax = max(amax, __float_as_uint(v[i]) & kMagnitude);
#pragma unroll 1
    for (int i = 0; p.tile == kBlock && i < kBlock * kBlock; ++i)
      amax = max(amax, __float_as_uint(staged(work.stage, first + i / kBlock,
                                              column / kBlock * kBlock + i % kBlock)) &
                           kMagnitude);
    uint32_t random[4];
    if (p.seed != nullptr)
      Origin::of(work.task.q, work.entry, rows.group, kColumnDirection)
          .draw(work.column0 + column, rows.number, random);
    const ExactBlock exact =
        ExactBlock::of([&](int i) { return v[i]; }, amax,
                       column_form_amax(work.task.q, work.entry, rows, work.column0 + column),
                       static_cast<float>(p.column.bound), p.seed == nullptr ? nullptr : random);
    if (place.row_half == 0) scales[c] = static_cast<uint8_t>(exact.scale);
    *reinterpret_cast<uint32_t*>(work.shared.column_codes() + column_slot(column, place.row / 32) +
                                 place.row / 8 % 4 * 4) =
        static_cast<uint32_t>(exact.codes >> (32 * place.row_half));
  }
}

// The scales of a patch's rows, which are kept for the end of the super-tile.
template <class V>
__device__ __forceinline__ void choose_row_scales(const TileWork<V>& work, const Patch& x,
                                                  EightScales& scales) {
  const QuantizeProblem& p = work.task.q.p;
  uint32_t most[4];
  row_maxima(x, most);
  if (p.tile == kBlock) square_maxima(most);
  const int line0 = work.row_line();
  if constexpr (V::kScaling == Scaling::kLines)
    choose_scales(most, [&](int i) { return work.shared.row_lines()[line0 + i]; }, nullptr, scales);
  else
    choose_scales(
        most, [&](int) { return work.block.row; },
        V::kScaling == Scaling::kTensor ? work.shared.table(true) : nullptr, scales);
  if (work.place.column_half == 0)
    *reinterpret_cast<uint2*>(work.row_scales()) = make_uint2(scales.bytes[0], scales.bytes[1]);
}

// The same for its columns.
template <class V>
__device__ __forceinline__ void choose_column_scales(const TileWork<V>& work, const Patch& x,
                                                     EightScales& scales) {
  const QuantizeProblem& p = work.task.q.p;
  uint32_t most[4];
  if (p.tile == kBlock) {
    row_maxima(x, most);
    square_maxima(most);
  } else {
    column_maxima(x, most);
  }
  const int line0 = work.column_line();
  if constexpr (V::kScaling == Scaling::kLines)
    choose_scales(
        most, [&](int i) { return work.shared.column_lines()[line0 + i]; }, nullptr, scales);
  else
    choose_scales(
        most, [&](int) { return work.block.column; },
        V::kScaling == Scaling::kTensor ? work.shared.table(false) : nullptr, scales);
  if (work.place.row_half == 0)
    *reinterpret_cast<uint2*>(work.column_scales()) = make_uint2(scales.bytes[0], scales.bytes[1]);
}

template <class V>
__device__ __forceinline__ void encode_rows(const TileWork<V>& work, const Patch& x,
                                            const EightScales& scales, uint32_t codes[kPatch]) {
  const Place& place = work.place;
  uint32_t random[kPatch][2];
  if constexpr (V::kStochastic) {
    const Origin origin = Origin::of(work.task.q, work.entry, work.block.rows.group, kRowDirection);
    const int64_t row = work.block.rows.number * kBlock + place.row % kBlock;
    draw_eight(
        origin,
        [&](int i, uint32_t* word) {
          origin.count(row + i, (work.column0 + place.column) / kBlock, word);
        },
        place.column_half, kAcross, random);
  }
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const auto value = [&](int i) {
      return i % 2 == 0 ? low_half(x.pair[r][i / 2]) : high_half(x.pair[r][i / 2]);
    };
    codes[r] = encode_eight<V::kStochastic>(
        value, [&](int) { return scales.multiplier[r]; }, row_signs(x.pair[r]), work.task.places,
        random[r]);
  }
}

template <class V>
__device__ __forceinline__ void encode_columns(const TileWork<V>& work, const Patch& x,
                                               const EightScales& scales, uint32_t codes[kPatch]) {
  const Place& place = work.place;
  uint32_t random[kPatch][2];
  if constexpr (V::kStochastic) {
    const Origin origin =
        Origin::of(work.task.q, work.entry, work.block.rows.group, kColumnDirection);
    draw_eight(
        origin,
        [&](int i, uint32_t* word) {
          origin.count(work.column0 + place.column + i, work.block.rows.number, word);
        },
        place.row_half, kDown, random);
  }
  uint32_t signs[kPatch];
  column_signs(x, signs);
#pragma unroll
  for (int c = 0; c < kPatch; ++c) {
    const auto value = [&](int r) {
      return c % 2 == 0 ? low_half(x.pair[r][c / 2]) : high_half(x.pair[r][c / 2]);
    };
    codes[c] = encode_eight<V::kStochastic>(
        value, [&](int) { return scales.multiplier[c]; }, signs[c], work.task.places, random[c]);
  }
}

// Rows and columns together, so that an element is taken apart once.
template <class V>
__device__ __forceinline__ void encode_both(const TileWork<V>& work, const Patch& x,
                                            const EightScales& row_scales,
                                            const EightScales& column_scales,
                                            uint32_t row_codes[kPatch],
                                            uint32_t column_codes[kPatch]) {
  column_signs(x, column_codes);
#pragma unroll
  for (int c = 0; c < kPatch; ++c) column_codes[c] -= kNearestOffset;
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    row_codes[r] = row_signs(x.pair[r]) - kNearestOffset;
#pragma unroll
    for (int c = 0; c < kPatch; ++c) {
      const uint32_t pair = x.pair[r][c / 2];
      const float value = c % 2 == 0 ? low_half(pair) : high_half(pair);
      const float across = saturated_product(value, row_scales.multiplier[r]);
      const float down = saturated_product(value, column_scales.multiplier[c]);
      row_codes[r] = nearest_bits(across) * work.task.places.of[c] + row_codes[r];
      column_codes[c] = nearest_bits(down) * work.task.places.of[r] + column_codes[c];
    }
  }
}

// Codes and values of a patch's rows, as they are asked for.
template <class V>
__device__ __forceinline__ void store_rows(const TileWork<V>& work, const Patch& x,
                                           const EightScales& scales,
                                           const uint32_t codes[kPatch]) {
  const QuantizeProblem& p = work.task.q.p;
  const int rows = work.rows();
  const int64_t element = work.element();
  if (p.row.codes != nullptr) {
    uint8_t* to = p.row.codes + element / 2;
#pragma unroll
    for (int r = 0; r < kPatch; ++r, to += work.task.k / 2)
      if (r < rows) *reinterpret_cast<uint32_t*>(to) = codes[r];
  }
  if (p.values != nullptr) {
    uint16_t* to = p.values + element;
#pragma unroll
    for (int r = 0; r < kPatch; ++r, to += work.task.k) {
      const uint32_t byte = (scales.bytes[r / 4] >> (r % 4 * 8)) & 0x7Fu;
      const uint4 values = product_values(codes[r], e4m3_value(byte), x.pair[r]);
      if (r < rows) *reinterpret_cast<uint4*>(to) = values;
    }
  }
}

// Codes of a patch's columns, to where they turn.
template <class V>
__device__ __forceinline__ void stage_columns(const TileWork<V>& work,
                                              const uint32_t codes[kPatch]) {
  const Place& place = work.place;
#pragma unroll
  for (int c = 0; c < kPatch; ++c)
    *reinterpret_cast<uint32_t*>(work.shared.column_codes() +
                                 column_slot(place.column + c, place.row / 32) +
                                 place.row / 8 % 4 * 4) = codes[c];
}

__device__ __forceinline__ bool has_nan(const EightScales& scales) {
  return has_nan_scale(scales.bytes[0]) || has_nan_scale(scales.bytes[1]);
}

// Which directions of a patch must be done again.
struct Again {
  bool rows, columns;
};

template <class V>
__device__ __forceinline__ Again quantize_patch(const TileWork<V>& work, Patch& x) {
  const QuantizeProblem& p = work.task.q.p;
  EightScales row_scales, column_scales;
  uint32_t row_codes[kPatch], column_codes[kPatch];
  Again again = {false, false};
  if (!V::kStochastic && !V::kMixed && p.row.wanted && p.column.wanted) {
    choose_row_scales(work, x, row_scales);
    choose_column_scales(work, x, column_scales);
    encode_both(work, x, row_scales, column_scales, row_codes, column_codes);
    store_rows(work, x, row_scales, row_codes);
    stage_columns(work, column_codes);
    return {has_nan(row_scales) && work.rows() > 0, has_nan(column_scales)};
  }
  if (p.row.wanted) {
    choose_row_scales(work, x, row_scales);
    encode_rows(work, x, row_scales, row_codes);
    store_rows(work, x, row_scales, row_codes);
    again.rows = has_nan(row_scales) && work.rows() > 0;
  }
  if (p.column.wanted) {
    if (V::kMixed) mix_columns(x, work.place.row_half);
    choose_column_scales(work, x, column_scales);
    encode_columns(work, x, column_scales, column_codes);
    stage_columns(work, column_codes);
    again.columns = has_nan(column_scales);
  }
  return again;
}

// ---- What a tile or super-tile leaves ----------------------------------------------------------

// The column-wise codes of a tile, 32 bytes a column.
template <class X>
__device__ __forceinline__ void store_column_codes(const TileTask& task, const Shared<X>& shared,
                                                   const Cursor& at) {
  const StoredForm& form = task.q.p.column;
  const int chunk = threadIdx.x % 2;
  const int32_t block = at.block(task.grid) + chunk * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = threadIdx.x / 2 + i * (kThreads / 2);
    const int32_t row = at.column(task.grid) + column;
    if (row >= task.k || block >= task.row_blocks) continue;
    const uint4 codes =
        *reinterpret_cast<const uint4*>(shared.column_codes() + column_slot(column, chunk));
    uint8_t* to = form.codes +
                  (row_start(at.entry * task.k + row, task.row_blocks) + block) * kBlockCodeBytes;
    if (task.row_blocks % 2 == 0) {
      *reinterpret_cast<uint4*>(to) = codes;
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes.x, codes.y);
      if (block + 1 < task.row_blocks)
        *reinterpret_cast<uint2*>(to + kBlockCodeBytes) = make_uint2(codes.z, codes.w);
    }
  }
}

// Scales [block, line] of a super-tile become rows of the form. row_of(line) is the stored row, or
// negative.
template <class RowOf>
__device__ __forceinline__ void store_scales(const StoredForm& form, const uint8_t* scales,
                                             int lines, int blocks, int64_t block0,
                                             const RowOf& row_of) {
  const int across = blocks / 4;
  for (int id = threadIdx.x; id < lines / 4 * across; id += kThreads) {
    const int line = id / across * 4, block = id % across * 4;
    uint32_t word[4];
    turn_bytes(scales + block * lines + line, lines, word);
    const int64_t left = form.blocks - (block0 + block);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row_of(line + i);
      if (row < 0 || left <= 0) continue;
      uint8_t* to = form.block_scale + row * form.blocks + block0 + block;
      if (form.blocks % 4 == 0)
        *reinterpret_cast<uint32_t*>(to) = word[i];
      else
        for (int b = 0; b < 4 && b < left; ++b) to[b] = static_cast<uint8_t>(word[i] >> (8 * b));
    }
  }
}

template <class X>
__device__ __noinline__ void store_super_scales(const TileTask& task, Shared<X> shared, Cursor at) {
  const QuantizeProblem& p = task.q.p;
  const int64_t block0 = static_cast<int64_t>(at.row0) * kTileBlocks;
  const int64_t column0 = static_cast<int64_t>(at.column0) * kTileColumns;
  if (p.row.codes != nullptr && p.row.wanted)
    store_scales(p.row, shared.row_scales(), shared.super_rows, shared.super_columns / kBlock,
                 column0 / kBlock, [&](int line) -> int64_t {
                   const int64_t block = block0 + line / kBlock;
                   if (block >= task.q.row_blocks) return -1;
                   const RowBlock rows = task.q.row_block(at.entry, block);
                   if (line % kBlock >= rows.rows) return -1;
                   return at.entry * p.m + rows.row + line % kBlock;
                 });
  if (p.column.wanted)
    store_scales(p.column, shared.column_scales(), shared.super_columns, shared.super_rows / kBlock,
                 block0, [&](int line) -> int64_t {
                   return column0 + line < p.k ? at.entry * p.k + column0 + line : -1;
                 });
}

// ---- What tiles need ---------------------------------------------------------------------------

__device__ float table_entry(uint32_t scale, float amax, float bound) {
  const TensorScale<float> tensor = tensor_scale(amax, bound);
  return encode_multiplier(e4m3_decode<float>(scale), tensor) * 0.125f;
}

// Tables of a batch entry; lines of a super-tile.
template <class X>
__device__ __noinline__ void prepare_super(const TileTask& task, Shared<X> shared, Cursor at) {
  const QuantizeProblem& p = task.q.p;
  const int64_t block0 = static_cast<int64_t>(at.row0) * kTileBlocks;
  const int64_t column0 = static_cast<int64_t>(at.column0) * kTileColumns;
  for (int row_wise = 0; !p.row_scaled && !p.grouped && row_wise < 2; ++row_wise) {
    const StoredForm& form = row_wise ? p.row : p.column;
    if (!form.wanted) continue;
    const float amax = amax_at(form, at.entry), bound = static_cast<float>(form.bound);
    shared.table(row_wise)[threadIdx.x] = table_entry(threadIdx.x, amax, bound);
    if (threadIdx.x == 0) *shared.tensor(row_wise) = LineScale::of(amax, bound);
  }
  for (int i = threadIdx.x; p.row_scaled && p.row.wanted && i < shared.super_rows; i += kThreads) {
    const int64_t row = block0 * kBlock + i;
    const float amax = row < p.m ? amax_at(p.row, at.entry * p.m + row) : 0.0f;
    shared.row_lines()[i] = LineScale::of(amax, static_cast<float>(p.row.bound));
  }
  for (int i = threadIdx.x; p.row_scaled && p.column.wanted && i < shared.super_columns;
       i += kThreads) {
    const int64_t column = column0 + i;
    const float amax = column < p.k ? amax_at(p.column, at.entry * p.k + column) : 0.0f;
    shared.column_lines()[i] = LineScale::of(amax, static_cast<float>(p.column.bound));
  }
}

// ---- The kernel --------------------------------------------------------------------------------

template <class V, class X = typename V::X>
__global__ void __launch_bounds__(kThreads, sizeof(X) == 2 ? 4 : 3)
    quantize_tiles(const __grid_constant__ TileTask task) {
  extern __shared__ __align__(128) uint8_t memory[];
  const QuantizeProblem& p = task.q.p;
  store_given_amaxes(p);
  const Shared<X> shared = {memory, task.grid.row_span * kTileRows,
                            task.grid.column_span * kTileColumns};
  static_assert(kStages == 2, "one tile is under work and one under way");
  Cursor now = Cursor::first(task.grid), next = now;
  fetch<V>(task, now, shared.stage(0));
  commit_copies();
  next.advance(task.grid);
  if (next.exists(task.grid)) fetch<V>(task, next, shared.stage(1));
  commit_copies();
  int stage = 0;
  bool fresh = true;  // the first tile of a super-tile
  while (now.exists(task.grid)) {
    if (fresh) prepare_super(task, shared, now);
    ScaledBlock block;
    if (V::kScaling == Scaling::kGroups) block = TileWork<V>::find_block(task, shared, now);
    await_copies<kStages - 1>();
    __syncthreads();
    {
      if (V::kScaling != Scaling::kGroups) block = TileWork<V>::find_block(task, shared, now);
      const TileWork<V> work = TileWork<V>::of(task, shared, now, stage, block);
      Patch x;
      load_patch(work.stage, work.place.row, work.place.column, x);
      const Again again = quantize_patch(work, x);
      if (again.rows) redo_rows<V>(task, shared, now, stage);
      if (again.columns) redo_columns<V>(task, shared, now, stage);
    }
    __syncthreads();
    Cursor ahead = next;
    if (next.exists(task.grid)) ahead.advance(task.grid);
    if (ahead.exists(task.grid)) fetch<V>(task, ahead, shared.stage(stage));
    commit_copies();
    if (p.column.wanted) store_column_codes(task, shared, now);
    fresh = next.super != now.super;
    if (fresh) store_super_scales(task, shared, now);
    now = next;
    next = ahead;
    stage ^= 1;
  }
}

// Tiles that the busiest of `slots` thread blocks has.
int64_t busiest(const Grid& grid, int64_t slots) {
  return ceil_div(grid.supers, slots) * grid.row_span * grid.column_span;
}

Grid grid_of(const QuantizeTask& task, int row_span, int column_span) {
  Grid grid = {};
  grid.row_tiles = static_cast<int32_t>(ceil_div(task.row_blocks, kTileBlocks));
  grid.column_tiles = static_cast<int32_t>(ceil_div(task.p.k, kTileColumns));
  grid.row_span = row_span;
  while ((1 << grid.row_span_log) < row_span) ++grid.row_span_log;
  grid.column_span = column_span;
  grid.super_rows = static_cast<int32_t>(ceil_div(grid.row_tiles, row_span));
  grid.super_columns = static_cast<int32_t>(ceil_div(grid.column_tiles, column_span));
  grid.supers = static_cast<int32_t>(task.p.batch) * grid.super_rows * grid.super_columns;
  return grid;
}

template <class V>
cudaError_t launch(const QuantizeTask& q, cudaStream_t stream) {
  TileTask task = {};
  task.q = q;
  task.m = static_cast<int32_t>(q.p.m);
  task.k = static_cast<int32_t>(q.p.k);
  task.row_blocks = static_cast<int32_t>(q.row_blocks);
  for (int i = 0; i < 8; ++i) task.places.of[i] = 1u << (4 * i);
  using X = typename V::X;
  const auto kernel = quantize_tiles<V>;
  int processors = 0;
  cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  // The largest super-tile that leaves the work even, and whose scales leave room in shared memory
  // for as many thread blocks: float32 stages and the scales of lines take more of it.
  const int spans[][2] = {{kMostRowSpan, kMostColumnSpan}, {2, 4}, {2, 2}, {1, 2}, {1, 1}};
  const int64_t slots = processors * (sizeof(X) == 2 ? 4 : 3);
  const int64_t even = busiest(grid_of(q, 1, 1), slots);
  for (const auto& span : spans) {
    const int64_t most = sizeof(X) == 4 ? 4 : q.p.row_scaled ? 8 : 16;
    if (span[0] * span[1] > most) continue;
    task.grid = grid_of(q, span[0], span[1]);
    if (10 * busiest(task.grid, slots) <= 11 * even) break;
  }
  const size_t bytes = shared_bytes<X>(task.grid, q.p.row_scaled);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  int resident = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, bytes);
  if (error != cudaSuccess) return error;
  const int64_t most = static_cast<int64_t>(processors) * (resident > 0 ? resident : 1);
  const int64_t blocks = task.grid.supers < most ? task.grid.supers : most;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(task);
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
         p.batch * (p.m + p.k) < (int64_t{1} << 30) && tiles < (int64_t{1} << 30);  // 32 bits
}

cudaError_t launch_quantize_tiles(const QuantizeTask& task, cudaStream_t stream) {
  return task.p.x_dtype == DType::kF32 ? launch_dtype<float>(task, stream)
                                       : launch_dtype<uint16_t>(task, stream);
}

}  // namespace jax_fp4::cuda
