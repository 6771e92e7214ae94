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
#include "encode.cuh"
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

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

// ---- Patches -----------------------------------------------------------------------------------

struct Patch {
  uint32_t pair[kPatch][kPatch / 2];
};

__device__ __forceinline__ void load_patch(const uint16_t* stage, int row, int column, Patch& x) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const uint4 v = *reinterpret_cast<const uint4*>(stage + (row + r) * kTileColumns + column);
    x.pair[r][0] = v.x, x.pair[r][1] = v.y, x.pair[r][2] = v.z, x.pair[r][3] = v.w;
  }
}
__device__ __forceinline__ void load_patch(const float* stage, int row, int column, Patch& x) {
  const int low = swizzled<float>(column / 4) * 4, high = swizzled<float>(column / 4 + 1) * 4;
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const float* from = stage + (row + r) * kTileColumns;
    const float4 a = *reinterpret_cast<const float4*>(from + low);
    const float4 b = *reinterpret_cast<const float4*>(from + high);
    x.pair[r][0] = pack_bfloat16(a.x, a.y), x.pair[r][1] = pack_bfloat16(a.z, a.w);
    x.pair[r][2] = pack_bfloat16(b.x, b.y), x.pair[r][3] = pack_bfloat16(b.z, b.w);
  }
}

// Where a thread's patch lies: lanes 8 columns apart first, then 8 rows.
struct Place {
  int row, column;            // of the tile
  int row_half, column_half;  // which half of its blocks it is

  __device__ static Place of(int thread) {
    const int lane = thread % 32, warp = thread / 32;
    const int row = warp / 2 * 32 + lane / 8 * kPatch;
    const int column = warp % 2 * 64 + lane % 8 * kPatch;
    return {row, column, row / kPatch % 2, column / kPatch % 2};
  }
};
constexpr int kAcross = 1, kDown = 8;  // lanes that hold the other half of a block

// Scales of eight lines, a byte each, and an eighth of their multipliers.
struct EightScales {
  uint32_t bytes[2];
  float multiplier[kPatch];
};

// From the maxima of four pairs of lines. line(i) is the scale of line i; `table` may be null.
template <class Line>
__device__ __forceinline__ void choose_scales(const uint32_t most[4], const Line& line,
                                              const float* table, EightScales& out) {
  uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    two[i] = scale_pair(most[i], line(2 * i).per_block, line(2 * i + 1).per_block);
  out.bytes[0] = __byte_perm(two[0], two[1], 0x5410);
  out.bytes[1] = __byte_perm(two[2], two[3], 0x5410);
  if (table != nullptr) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) out.multiplier[i] = table[(two[i / 2] >> (i % 2 * 8)) & 0x7Fu];
  } else {
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
      out.multiplier[i] = eighth_multiplier((two[i / 2] >> (i % 2 * 8)) & 0x7Fu, line(i).decode);
  }
}

// Maxima of pairs of rows, low half the even one, over whole blocks.
__device__ __forceinline__ void row_maxima(const Patch& x, uint32_t most[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* pair = x.pair[2 * i + h];
      row[h] = max_magnitude(max_magnitude(pair[0], pair[1]), max_magnitude(pair[2], pair[3]));
    }
    most[i] =
        max_magnitude(__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632));
    most[i] = max_magnitude(most[i], __shfl_xor_sync(~0u, most[i], kAcross));
  }
}

__device__ __forceinline__ void column_maxima(const Patch& x, uint32_t most[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    most[j] = x.pair[0][j];
#pragma unroll
    for (int r = 1; r < kPatch; ++r) most[j] = max_magnitude(most[j], x.pair[r][j]);
    most[j] = max_magnitude(most[j], __shfl_xor_sync(~0u, most[j], kDown));
  }
}

// The sign bits of a patch's columns, at the top of each nibble, from row 0 on.
__device__ __forceinline__ void column_signs(const Patch& x, uint32_t signs[kPatch]) {
#pragma unroll
  for (int j = 0; j < kPatch / 2; ++j) {
    uint32_t first = 0, second = 0;  // rows 0-3 and 4-7: the low column, then the high one
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      first += (x.pair[r][j] & 0x80008000u) >> (12 - 4 * r);
      second += (x.pair[r + 4][j] & 0x80008000u) >> (12 - 4 * r);
    }
    signs[2 * j] = __byte_perm(first, second, 0x5410);
    signs[2 * j + 1] = __byte_perm(first, second, 0x7632);
  }
}

// Of the 16x16 tile, everywhere.
__device__ __forceinline__ void square_maxima(uint32_t most[4]) {
  uint32_t all = max_magnitude(max_magnitude(most[0], most[1]), max_magnitude(most[2], most[3]));
  all = max_magnitude(all, __byte_perm(all, all, 0x1032));
  all = max_magnitude(all, __shfl_xor_sync(~0u, all, kDown));
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = all;
}

// The random words of this patch's halves of eight lines, of which two lanes hold the two halves.
// Each draws four whole blocks, together so that they share the keys and the loop stays short, and
// gives the other lane its half. count(i, word) makes the counter of line i.
template <class Count>
__device__ __forceinline__ void draw_eight(const Origin& origin, const Count& count, int half,
                                           int partner, uint32_t random[kPatch][2]) {
  uint32_t word[kPatch / 2][4];
#pragma unroll
  for (int i = 0; i < kPatch / 2; ++i) count(2 * i + half, word[i]);
  uint32_t key0 = origin.key0, key1 = origin.key1;
#pragma unroll 1
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kPatch / 2; ++i) philox_round<float>(word[i], key0, key1);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
#pragma unroll
  for (int i = 0; i < kPatch / 2; ++i)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t mine = half ? word[i][2 + w] : word[i][w];
      const uint32_t other = __shfl_xor_sync(~0u, half ? word[i][w] : word[i][2 + w], partner);
      random[2 * i][w] = half ? other : mine;
      random[2 * i + 1][w] = half ? mine : other;
    }
}

// The transform of eight columns, of which this lane holds the upper or lower eight rows.
__device__ __forceinline__ void mix_columns(Patch& x, int half) {
  const uint32_t signs = half ? kHadamardSigns >> kPatch : kHadamardSigns & 0xFFu;
  const float own = half ? -1.0f : 1.0f;
#pragma unroll
  for (int j = 0; j < kPatch / 2; ++j) {
    float v[2][kPatch];
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      const uint32_t pair = x.pair[r][j] ^ (((signs >> r) & 1u) * 0x80008000u);
      v[0][r] = low_half(pair);
      v[1][r] = high_half(pair);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int stride = 1; stride < kPatch; stride *= 2)
#pragma unroll
        for (int r = 0; r < kPatch; ++r)
          if ((r & stride) == 0) {
            const float a = v[h][r], b = v[h][r + stride];
            v[h][r] = a + b;
            v[h][r + stride] = a - b;
          }
      // Stride 8: a + b here, a - b there; a product with +-1 is exact, so the fma rounds the sum.
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        v[h][r] = __fmaf_rn(v[h][r], own, __shfl_xor_sync(~0u, v[h][r], kDown)) * 0.25f;
    }
#pragma unroll
    for (int r = 0; r < kPatch; ++r) x.pair[r][j] = pack_bfloat16(v[0][r], v[1][r]);
  }
}

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
  // The largest super-tile that leaves the work even; float32 stages leave room for a quarter.
  const int spans[][2] = {{kMostRowSpan, kMostColumnSpan}, {2, 4}, {2, 2}, {1, 2}, {1, 1}};
  const int64_t slots = processors * (sizeof(X) == 2 ? 4 : 3);
  const int64_t even = busiest(grid_of(q, 1, 1), slots);
  for (const auto& span : spans) {
    if (sizeof(X) == 4 && span[0] * span[1] > 4) continue;
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
