// The stored forms of x: the row-wise one alone runs over blocks in memory order; everything else
// over pieces of kItemRows x kItemColumns, so that both directions come from the same cached tile.
#ifndef JAX_FP4_XLA_FFI_CPU_QUANTIZE_KERNEL_H_
#define JAX_FP4_XLA_FFI_CPU_QUANTIZE_KERNEL_H_

#include "encode.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

constexpr uint32_t kRowDirection = 0, kColumnDirection = 1;  // Philox counter word 2

JAX_FP4_FN int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Where the blocks of one stored form lie in the global tensor, for the random bytes.
struct Origin {
  const uint32_t* key;
  uint32_t direction, expert;
  uint64_t row, block, blocks;

  uint64_t number(int64_t local_row, int64_t local_block) const {
    return (row + static_cast<uint64_t>(local_row)) * blocks + block +
           static_cast<uint64_t>(local_block);
  }

  JAX_FP4_MEMBER Origin of(const QuantizeProblem& p, uint32_t direction) {
    const bool rows = direction == kRowDirection;
    return {p.key,
            direction,
            p.expert,
            rows ? p.m_origin : p.k_origin,
            (rows ? p.k_origin : p.m_origin) / kBlock,
            static_cast<uint64_t>(ceil_div(rows ? p.k_total : p.m_total, kBlock))};
  }
};

// Codes of the blocks under the scales already chosen. number(i) is that of the block of lane i in
// the global tensor.
template <class Number>
JAX_FP4_FN void encode_blocks(const Tile& tile, const LaneScales& scales, const Origin& origin,
                              Number number, LaneCodes& codes) {
  if (origin.key == nullptr) return encode_lanes<false>(tile, scales, nullptr, codes);
  LaneRandom random;
  uint64_t index[kBlock];
  for (int i = 0; i < kBlock; ++i) index[i] = number(i);
  draw(origin.key, origin.direction, origin.expert, index, random);
  encode_lanes<true>(tile, scales, &random, codes);
}

// ---- The row-wise form alone ---------------------------------------------------------------

// Sixteen consecutive blocks: which rows and columns they are.
struct BlockRun {
  int64_t row[kBlock], block[kBlock];

  JAX_FP4_MEMBER BlockRun at(int64_t first, int64_t count, int64_t blocks) {
    BlockRun run;
    int64_t row = first / blocks, block = first % blocks;
    for (int i = 0; i < kBlock; ++i) {
      const bool exists = i < count;
      run.row[i] = exists ? row : run.row[0];
      run.block[i] = exists ? block : run.block[0];
      if (++block == blocks) block = 0, ++row;
    }
    return run;
  }
};

// Blocks first to first + count - 1; `run` says where they are unless k is whole blocks.
template <class T>
void load_blocks(const QuantizeProblem& p, const typename T::Word* x, int64_t first, int64_t count,
                 const BlockRun& run, Tile& lanes) {
  Tile blocks;
  if (p.k % kBlock == 0 && count == kBlock) {
    for (int i = 0; i < kBlock; ++i) load_row<T>(x + (first + i) * kBlock, kBlock, blocks.v[i]);
  } else {
    for (int i = 0; i < kBlock; ++i) {
      const int64_t column = run.block[i] * kBlock;
      if (i < count)
        load_row<T>(x + run.row[i] * p.k + column, at_most(p.k - column, kBlock), blocks.v[i]);
      else
        memset(blocks.v[i], 0, sizeof(blocks.v[i]));
    }
  }
  round_tile<T>(p.compute, blocks);
  transpose(blocks, lanes);
}

// Blocks that lie side by side in memory.
JAX_FP4_FN void put_run(const LaneCodes& from, int64_t count, uint8_t* codes,
                        uint8_t* block_scale) {
  alignas(64) uint32_t packed[2 * kBlock];
  uint8_t scale[kBlock];
  for (int lane = 0; lane < kBlock; lane += kLanes)
    store_interleaved(packed + 2 * lane, load(from.low + lane), load(from.high + lane));
  for (int i = 0; i < kBlock; ++i) scale[i] = static_cast<uint8_t>(from.scale[i]);
  if (count == kBlock) {
    memcpy(codes, packed, sizeof(packed));
    memcpy(block_scale, scale, sizeof(scale));
  } else {
    memcpy(codes, packed, static_cast<size_t>(count) * kBlockCodeBytes);
    memcpy(block_scale, scale, static_cast<size_t>(count));
  }
}

template <class T>
void quantize_run(const QuantizeProblem& p, int64_t item) {
  const int64_t blocks = p.row.blocks, total = p.m * blocks;
  const int64_t end = at_most(total, (item + 1) * kItemBlocks);
  const auto* x = static_cast<const typename T::Word*>(p.x);
  const Origin origin = Origin::of(p, kRowDirection);
  const float bound = static_cast<float>(p.row.bound);

  LaneScales scales;
  if (!p.row_scaled) fill_scales(p.row.amax, true, 0, bound, scales);
  for (int64_t first = item * kItemBlocks; first < end; first += kBlock) {
    const int64_t count = at_most(end - first, kBlock);
    // Positions are found only where they are read.
    BlockRun run = {};
    if (p.k % kBlock != 0 || count < kBlock || p.row_scaled || p.key != nullptr)
      run = BlockRun::at(first, count, blocks);
    Tile tile;
    load_blocks<T>(p, x, first, count, run, tile);
    if (p.row_scaled) {
      float row_amax[kBlock];
      for (int i = 0; i < kBlock; ++i) row_amax[i] = p.row.amax[run.row[i]];
      fill_scales(row_amax, false, kBlock, bound, scales);
    }
    const auto number = [&](int i) { return origin.number(run.row[i], run.block[i]); };
    LaneCodes codes;
    choose_scales(tile, scales, false, p.row.four_over_six, bound, codes.scale);
    encode_blocks(tile, scales, origin, number, codes);
    put_run(codes, count, p.row.codes + first * kBlockCodeBytes, p.row.block_scale + first);
  }
}

// ---- Both directions -----------------------------------------------------------------------

// One stored form, and what every piece of it needs.
struct FormPiece {
  const StoredForm& form;
  Origin origin;
  float bound;
  bool row_scaled;

  JAX_FP4_MEMBER FormPiece of(const QuantizeProblem& p, const StoredForm& form,
                              uint32_t direction) {
    return {form, Origin::of(p, direction), static_cast<float>(form.bound), p.row_scaled};
  }

  // Scales of sixteen stored rows; they change only under row scaling.
  void scales(int64_t first_row, LaneScales& out) const {
    if (row_scaled)
      fill_scales(form.amax + first_row, false, at_most(form.rows - first_row, kBlock), bound, out);
    else
      fill_scales(form.amax, true, 0, bound, out);
  }

  void encode(const Tile& tile, const LaneScales& scales, int64_t first_row, int64_t block,
              LaneCodes& out) const {
    const auto number = [&](int i) { return origin.number(first_row + i, block); };
    encode_blocks(tile, scales, origin, number, out);
  }
};

// Results of a strip of blocks: lane i of everything belongs to stored row i of sixteen. They are
// kept by block as they come and leave by row, in runs, so that no cache line of the output is
// visited twice.
template <int kStripBlocks>
struct Strip {
  static_assert(kStripBlocks % 8 == 0, "eight blocks of codes fill a tile");
  Tile codes[kStripBlocks / 8];
  alignas(64) uint32_t scale[kStripBlocks / 4][kBlock];  // a byte a block

  void put(const LaneCodes& from, int64_t block) {
    float (*words)[kBlock] = codes[block / 8].v + block % 8 * 2;
    memcpy(words[0], from.low, sizeof(from.low));
    memcpy(words[1], from.high, sizeof(from.high));
    uint32_t* bytes = scale[block / 4];
    if (block % 4 == 0)
      memcpy(bytes, from.scale, sizeof(from.scale));
    else
      for (int i = 0; i < kBlock; ++i) bytes[i] |= from.scale[i] << (block % 4 * 8);
  }

  // Stored rows row0 to row0 + rows - 1, blocks block0 to block0 + blocks - 1 of `piece`.
  void flush(const FormPiece& piece, int64_t row0, int64_t rows, int64_t block0,
             int64_t blocks) const {
    const int64_t stride = piece.form.blocks, at = row0 * stride + block0;
    for (int64_t first = 0; first < blocks; first += 8) {
      Tile by_row;
      transpose(codes[first / 8], by_row);
      uint8_t* to = piece.form.codes + (at + first) * kBlockCodeBytes;
      const int64_t bytes = at_most(blocks - first, 8) * kBlockCodeBytes;
      for (int64_t i = 0; i < rows; ++i, to += stride * kBlockCodeBytes)
        if (bytes == sizeof(by_row.v[i]))
          memcpy(to, by_row.v[i], sizeof(by_row.v[i]));
        else
          memcpy(to, by_row.v[i], static_cast<size_t>(bytes));
    }
    for (int64_t first = 0; first < blocks; first += 4) {
      uint8_t* to = piece.form.block_scale + at + first;
      for (int64_t i = 0; i < rows; ++i, to += stride)
        if (blocks - first >= 4)
          memcpy(to, &scale[first / 4][i], 4);
        else
          memcpy(to, &scale[first / 4][i], static_cast<size_t>(blocks - first));
    }
  }
};

constexpr int64_t kPanels = kItemRows / kBlock;    // of a piece, each 16 rows of x
constexpr int64_t kTiles = kItemColumns / kBlock;  // of a panel
using RowStrip = Strip<kTiles>;
using ColumnStrip = Strip<kPanels>;

// One 16x16 tile of x in both directions. row0 and column0 place it in x; row_scales and
// column_scales belong to its rows and columns.
void quantize_tile(const QuantizeProblem& p, const FormPiece& row, const FormPiece& column,
                   int64_t row0, int64_t column0, const Tile& x, const LaneScales& row_scales,
                   const LaneScales& column_scales, LaneCodes& row_codes, LaneCodes& column_codes) {
  const bool tiled = p.tile == kBlock;
  // A 2-D tile chooses its scale in the row-wise orientation, for both directions.
  const bool derived = p.column.wanted && tiled && !p.column.hadamard;
  Tile turned, mixed;
  if (p.row.wanted || derived) transpose(x, turned);
  if (p.row.wanted)
    choose_scales(turned, row_scales, tiled, row.form.four_over_six, row.bound, row_codes.scale);
  if (p.column.hadamard) hadamard_tile(x, mixed);
  const Tile& columns = p.column.hadamard ? mixed : x;
  // The two amaxes of a tensor differ only if the caller gives different ones.
  if (derived && p.row.wanted && p.row.amax[0] == p.column.amax[0])
    memcpy(column_codes.scale, row_codes.scale, sizeof(column_codes.scale));
  else if (p.column.wanted)
    choose_scales(derived ? turned : columns, column_scales, tiled, column.form.four_over_six,
                  column.bound, column_codes.scale);
  // Both divisions are under way before the codes wait for them.
  if (p.row.wanted) row.encode(turned, row_scales, row0, column0 / kBlock, row_codes);
  if (p.column.wanted) column.encode(columns, column_scales, column0, row0 / kBlock, column_codes);
}

template <class T>
void quantize_piece(const QuantizeProblem& p, int64_t row0, int64_t column0) {
  const int64_t rows = at_most(p.m - row0, kItemRows);
  const int64_t columns = at_most(p.k - column0, kItemColumns);
  const auto* x = static_cast<const typename T::Word*>(p.x);
  const FormPiece row = FormPiece::of(p, p.row, kRowDirection);
  const FormPiece column = FormPiece::of(p, p.column, kColumnDirection);
  RowStrip row_strip;
  ColumnStrip column_strips[kTiles];
  LaneScales row_scales, column_scales;
  if (p.column.wanted) column.scales(column0, column_scales);
  for (int64_t r = 0; r < rows; r += kBlock) {
    if (p.row.wanted && (r == 0 || p.row_scaled)) row.scales(row0 + r, row_scales);
    Tile panel[kTiles];
    load_panel<T>(x + (row0 + r) * p.k + column0, p.k, rows - r, columns, p.compute, panel);
    for (int64_t t = 0; t * kBlock < columns; ++t) {
      const int64_t c = column0 + t * kBlock;
      if (p.column.wanted && p.row_scaled) column.scales(c, column_scales);
      LaneCodes row_codes, column_codes;
      quantize_tile(p, row, column, row0 + r, c, panel[t], row_scales, column_scales, row_codes,
                    column_codes);
      if (p.row.wanted) row_strip.put(row_codes, t);
      if (p.column.wanted) column_strips[t].put(column_codes, r / kBlock);
    }
    if (p.row.wanted)
      row_strip.flush(row, row0 + r, at_most(rows - r, kBlock), column0 / kBlock,
                      ceil_div(columns, kBlock));
  }
  if (p.column.wanted)
    for (int64_t t = 0; t * kBlock < columns; ++t)
      column_strips[t].flush(column, column0 + t * kBlock, at_most(columns - t * kBlock, kBlock),
                             row0 / kBlock, ceil_div(rows, kBlock));
}

// ---- Items ---------------------------------------------------------------------------------

template <class T>
void quantize_items_of(const QuantizeProblem& p, int64_t begin, int64_t end) {
  if (quantize_in_block_order(p)) {
    for (int64_t item = begin; item < end; ++item) quantize_run<T>(p, item);
    return;
  }
  const int64_t across = ceil_div(p.k, kItemColumns);
  for (int64_t item = begin; item < end; ++item)
    quantize_piece<T>(p, item / across * kItemRows, item % across * kItemColumns);
}

void quantize(const QuantizeProblem& p, int64_t begin, int64_t end) {
  switch (p.x_dtype) {
    case DType::kF32:
      return quantize_items_of<F32>(p, begin, end);
    case DType::kBF16:
      return quantize_items_of<BF16>(p, begin, end);
    case DType::kF16:
      return quantize_items_of<F16>(p, begin, end);
  }
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_QUANTIZE_KERNEL_H_
