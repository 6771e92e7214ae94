// Pieces of x to 8-bit codes, and codes to values: 2 or 4 bytes an element on one side, 1 byte a
// form on the other. A piece is widened once, into float32 in the cache; each form then reads it.
#ifndef JAX_FP4_XLA_FFI_CPU_FLOAT8_KERNEL_H_
#define JAX_FP4_XLA_FFI_CPU_FLOAT8_KERNEL_H_

#include "../kernels/float8.h"
#include "dequantize_kernel.h"
#include "tile.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

constexpr int kPiece = static_cast<int>(kFloat8Piece);
constexpr int kPieceBlocks = kPiece / 32;  // of the shortest block

// A piece of x, and zeros up to whole blocks; they are `height` x `width`, multiples of 16.
struct Values {
  alignas(64) float v[kPiece][kPiece];
};
struct CodeBytes {
  alignas(64) uint8_t v[kPiece][kPiece];
};

// Of the blocks, one a row (or a column), that lie beside each other in a piece.
struct BlockScales {
  alignas(64) float multiplier[kPiece];
  alignas(64) uint32_t stored[kPiece];  // an E8M0 byte, or the bits of the inverse scale
};

struct Extent {
  int64_t row0, column0;    // where the piece begins
  int64_t rows, columns;    // of x
  int height, width;        // with the zeros
  int length, down, along;  // of a block; and how many of them lie in height and width
};

JAX_FP4_FN Extent extent_of(const Float8Problem& p, int64_t item) {
  Extent e = {};
  const int64_t across = ceil_div(p.k, kFloat8Piece);
  const int64_t block = float8_block(p.scaling);
  e.row0 = item / across * kFloat8Piece;
  e.column0 = item % across * kFloat8Piece;
  e.rows = p.m - e.row0 < kFloat8Piece ? p.m - e.row0 : kFloat8Piece;
  e.columns = p.k - e.column0 < kFloat8Piece ? p.k - e.column0 : kFloat8Piece;
  const int64_t unit = block < kBlock ? kBlock : block;
  const int64_t unit_down = p.column.wanted || p.tile > 1 ? unit : kBlock;
  const int64_t unit_along = p.row.wanted || p.tile > 1 ? unit : kBlock;
  e.height = static_cast<int>(ceil_div(e.rows, unit_down) * unit_down);
  e.width = static_cast<int>(ceil_div(e.columns, unit_along) * unit_along);
  e.length = block == 1 ? kPiece : static_cast<int>(block);
  e.down = static_cast<int>(ceil_div(e.height, e.length));
  e.along = static_cast<int>(ceil_div(e.width, e.length));
  return e;
}

// ---- Loading ---------------------------------------------------------------------------------

// width values from `columns` words, then zeros.
template <class T>
void load_values(const typename T::Word* x, int64_t columns, int width, DType compute, float* to) {
  alignas(64) typename T::Word partial[kPiece];
  if (columns < width) {
    memset(partial, 0, static_cast<size_t>(width) * sizeof(partial[0]));
    memcpy(partial, x, static_cast<size_t>(columns) * sizeof(partial[0]));
    x = partial;
  }
  const bool to_bfloat16 = compute == DType::kBF16 && T::dtype != DType::kBF16;
  const bool to_float16 = compute == DType::kF16 && T::dtype != DType::kF16;
  for (int i = 0; i < width; i += kLanes) {
    F value = Lanes<F>::from_bits(widen<T, F>(load_words(x + i)));
    if (to_bfloat16) value = round_to_bfloat16(value);
    if (to_float16) value = round_to_float16(value);
    store(to + i, value);
  }
}

template <class T>
void load_piece(const Float8Problem& p, const Extent& e, Values& values) {
  const auto* x = static_cast<const typename T::Word*>(p.x) + e.row0 * p.k + e.column0;
  for (int r = 0; r < e.height; ++r)
    if (r < e.rows)
      load_values<T>(x + r * p.k, e.columns, e.width, p.compute, values.v[r]);
    else
      memset(values.v[r], 0, static_cast<size_t>(e.width) * sizeof(float));
}

void load_piece(const Float8Problem& p, const Extent& e, Values& values) {
  switch (p.x_dtype) {
    case DType::kF32:
      return load_piece<F32>(p, e, values);
    case DType::kBF16:
      return load_piece<BF16>(p, e, values);
    case DType::kF16:
      return load_piece<F16>(p, e, values);
  }
}

// ---- Scales ----------------------------------------------------------------------------------

JAX_FP4_FN uint32_t largest_lane(U most) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = result < most[i] ? most[i] : result;
  return result;
}

// The largest |bits| of the block of each row that begins at column `from`.
void row_peaks(const Values& values, const Extent& e, int from, uint32_t* peaks) {
  for (int r = 0; r < e.height; ++r) {
    U most{};
    for (int i = from; i < from + e.length; i += kLanes)
      most = Lanes<F>::greater(most, Lanes<F>::bits(load(values.v[r] + i)) & kMagnitude);
    peaks[r] = largest_lane(most);
  }
}

// Those of the blocks of columns that begin at row `from`.
void column_peaks(const Values& values, const Extent& e, int from, uint32_t* peaks) {
  for (int c = 0; c < e.width; c += kLanes) {
    U most{};
    for (int r = from; r < from + e.length; ++r)
      most = Lanes<F>::greater(most, Lanes<F>::bits(load(values.v[r] + c)) & kMagnitude);
    store(peaks + c, most);
  }
}

// A tile has the largest of its rows' peaks.
void join_tiles(const Extent& e, uint32_t* peaks) {
  for (int from = 0; from < e.height; from += e.length) {
    uint32_t most = 0;
    for (int r = from; r < from + e.length; ++r) most = most < peaks[r] ? peaks[r] : most;
    for (int r = from; r < from + e.length; ++r) peaks[r] = most;
  }
}

void block_scales(const Float8Problem& p, const uint32_t* peaks, int count, BlockScales& scales) {
  using L = Lanes<F>;
  const float largest = largest_code(p.codes);
  for (int i = 0; i < count; i += kLanes) {
    if (p.scaling == Float8Scaling::kMxfp8) {
      const U scale = e8m0_scale<F>(load(peaks + i), largest);
      store(scales.stored + i, scale);
      store(scales.multiplier + i, e8m0_multiplier<F>(scale));
    } else {
      const F scale = float8_scale<F>(load(peaks + i), largest, p.eps, p.power_of_two);
      store(scales.stored + i, L::bits(L::splat(1.0f) / scale));
      store(scales.multiplier + i, scale);
    }
  }
}

// Of all blocks along the rows: scales[j] of those in place j.
void row_scales(const Float8Problem& p, const Extent& e, const Values& values,
                BlockScales* scales) {
  alignas(64) uint32_t peaks[kPiece];
  for (int j = 0; j < e.along; ++j) {
    if (p.scaling == Float8Scaling::kTensor) {
      for (int r = 0; r < e.height; ++r) scales[j].multiplier[r] = p.tensor_scale;
      continue;
    }
    row_peaks(values, e, j * e.length, peaks);
    if (p.tile > 1) join_tiles(e, peaks);
    block_scales(p, peaks, e.height, scales[j]);
  }
}

void column_scales(const Float8Problem& p, const Extent& e, const Values& values,
                   BlockScales* scales) {
  alignas(64) uint32_t peaks[kPiece];
  for (int i = 0; i < e.down; ++i) {
    column_peaks(values, e, i * e.length, peaks);
    block_scales(p, peaks, e.width, scales[i]);
  }
}

void store_scale(const Float8Problem& p, const Float8Form& form, int64_t row, int64_t block,
                 uint32_t stored) {
  if (p.scaling == Float8Scaling::kMxfp8)
    static_cast<uint8_t*>(form.scale)[row * form.blocks + block] = static_cast<uint8_t>(stored);
  else
    memcpy(static_cast<float*>(form.scale) + row / p.tile * form.blocks + block, &stored,
           sizeof(stored));
}

// Of a piece whose stored rows begin at `row0`, their blocks at element `from`. stored(r, j) is the
// scale of block j of row r. Rows of an MXFP8 tile repeat theirs.
template <class Stored>
void store_scales(const Float8Problem& p, const Extent& e, const Float8Form& form, int64_t row0,
                  int64_t rows, int64_t from, int blocks, const Stored& stored) {
  if (p.scaling == Float8Scaling::kTensor) return;
  const int64_t step = p.scaling == Float8Scaling::kMxfp8 ? 1 : p.tile;
  for (int64_t r = 0; r < rows; r += step)
    for (int j = 0; j < blocks; ++j)
      store_scale(p, form, row0 + r, from / e.length + j, stored(static_cast<int>(r), j));
}

// ---- Codes -----------------------------------------------------------------------------------

using Octets = uint8_t __attribute__((vector_size(JAX_FP4_LANES)));

JAX_FP4_FN void store_octets(uint8_t* to, U value) {
  const Octets octets = __builtin_convertvector(value, Octets);
  memcpy(to, &octets, sizeof(octets));
}

JAX_FP4_FN U load_octets(const uint8_t* from) {
  Octets octets;
  memcpy(&octets, from, sizeof(octets));
  return __builtin_convertvector(octets, U);
}

template <Float8Codes codes>
void encode_rows(const Extent& e, const Values& values, const BlockScales* scales,
                 CodeBytes& bytes) {
  for (int r = 0; r < e.height; ++r)
    for (int j = 0; j < e.along; ++j) {
      const F multiplier = Lanes<F>::splat(scales[j].multiplier[r]);
      const int end = (j + 1) * e.length < e.width ? (j + 1) * e.length : e.width;
      for (int i = j * e.length; i < end; i += kLanes)
        store_octets(bytes.v[r] + i, float8_encode<codes>(load(values.v[r] + i) * multiplier));
    }
}

template <Float8Codes codes>
void encode_columns(const Extent& e, const Values& values, const BlockScales* scales,
                    CodeBytes& bytes) {
  for (int r = 0; r < e.height; ++r)
    for (int c = 0; c < e.width; c += kLanes) {
      const F multiplier = load(scales[r / e.length].multiplier + c);
      store_octets(bytes.v[r] + c, float8_encode<codes>(load(values.v[r] + c) * multiplier));
    }
}

using Sixteen = uint8_t __attribute__((vector_size(16)));

// 16 x 16 codes: four rounds, of which each interleaves the rows of the upper half with the lower.
JAX_FP4_FN void transpose_codes(const CodeBytes& from, int row, int column, CodeBytes& to) {
  Sixteen a[16], b[16];
  for (int i = 0; i < 16; ++i) memcpy(&a[i], &from.v[row + i][column], sizeof(Sixteen));
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a[i], a[i + 8]);
      b[2 * i + 1] =
          shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a[i], a[i + 8]);
    }
    memcpy(a, b, sizeof(a));
  }
  for (int i = 0; i < 16; ++i) memcpy(&to.v[column + i][row], &a[i], sizeof(Sixteen));
}

void store_rows(const Float8Form& form, int64_t row0, int64_t rows, int64_t from, int64_t count,
                const CodeBytes& bytes) {
  for (int64_t r = 0; r < rows; ++r)
    memcpy(form.codes + (row0 + r) * form.extent + from, bytes.v[r], static_cast<size_t>(count));
}

void store_columns(const Float8Problem& p, const Extent& e, const CodeBytes& bytes) {
  CodeBytes turned;
  for (int r = 0; r < e.height; r += 16)
    for (int c = 0; c < e.width; c += 16) transpose_codes(bytes, r, c, turned);
  const int64_t count = p.scaling == Float8Scaling::kTensor ? e.rows : e.height;
  store_rows(p.column, e.column0, e.columns, e.row0, count, turned);
}

template <Float8Codes codes>
void quantize_piece(const Float8Problem& p, const Extent& e) {
  Values values;
  CodeBytes bytes;
  BlockScales scales[kPieceBlocks];
  load_piece(p, e, values);
  const bool same = p.tile > 1 || p.scaling == Float8Scaling::kTensor;  // codes in both forms
  if (p.row.wanted || same) {
    row_scales(p, e, values, scales);
    encode_rows<codes>(e, values, scales, bytes);
  }
  if (p.row.wanted) {
    const int64_t count = p.scaling == Float8Scaling::kTensor ? e.columns : e.width;
    store_rows(p.row, e.row0, e.rows, e.column0, count, bytes);
    store_scales(p, e, p.row, e.row0, e.rows, e.column0, e.along,
                 [&](int r, int j) { return scales[j].stored[r]; });
  }
  if (!p.column.wanted) return;
  if (same) {
    store_scales(p, e, p.column, e.column0, e.columns, e.row0, e.down,
                 [&](int c, int i) { return scales[c / e.length].stored[i * e.length]; });
  } else {
    column_scales(p, e, values, scales);
    encode_columns<codes>(e, values, scales, bytes);
    store_scales(p, e, p.column, e.column0, e.columns, e.row0, e.down,
                 [&](int c, int i) { return scales[i].stored[c]; });
  }
  store_columns(p, e, bytes);
}

void quantize_float8(const Float8Problem& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) switch (p.codes) {
      case Float8Codes::kE4M3:
        quantize_piece<Float8Codes::kE4M3>(p, extent_of(p, item));
        break;
      case Float8Codes::kE5M2:
        quantize_piece<Float8Codes::kE5M2>(p, extent_of(p, item));
        break;
    }
}

// ---- Codes to values -------------------------------------------------------------------------

// What the codes of a block are multiplied by.
JAX_FP4_FN float float8_factor(const Float8DequantizeProblem& p, int64_t row, int64_t block) {
  const int64_t blocks = p.padded / float8_block(p.scaling);
  const auto* floats = static_cast<const float*>(p.scale);
  switch (p.scaling) {
    case Float8Scaling::kMxfp8:
      return power_of_two<float>(static_cast<const uint8_t*>(p.scale)[row * blocks + block]);
    case Float8Scaling::kBlock: {
      const int64_t entry = row / p.rows, within = row % p.rows / p.tile;
      return floats[(entry * ceil_div(p.rows, p.tile) + within) * blocks + block];
    }
    case Float8Scaling::kTensor:
      return floats[row / p.rows];
  }
  return 0.0f;
}

// count codes, in whole vectors but for the last.
template <class T, Float8Codes kCodes>
JAX_FP4_FN void decode_run(const uint8_t* codes, int64_t count, float factor,
                           typename T::Word* out) {
  const F multiplier = Lanes<F>::splat(factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store_as<T>(out + i, float8_decode<kCodes, F>(load_octets(codes + i)) * multiplier);
  if (i == count) return;
  uint8_t rest[kLanes] = {};
  typename T::Word values[kLanes];
  memcpy(rest, codes + i, static_cast<size_t>(count - i));
  store_as<T>(values, float8_decode<kCodes, F>(load_octets(rest)) * multiplier);
  memcpy(out + i, values, static_cast<size_t>(count - i) * sizeof(values[0]));
}

template <class T, Float8Codes kCodes>
void dequantize_float8_row(const Float8DequantizeProblem& p, int64_t row) {
  const uint8_t* codes = p.codes + row * p.padded;
  auto* out = static_cast<typename T::Word*>(p.out) + row * p.extent;
  const int64_t length = p.scaling == Float8Scaling::kTensor ? p.extent : float8_block(p.scaling);
  for (int64_t from = 0; from < p.extent; from += length) {
    const int64_t count = p.extent - from < length ? p.extent - from : length;
    decode_run<T, kCodes>(codes + from, count, float8_factor(p, row, from / length), out + from);
  }
}

template <class T>
void dequantize_float8_rows(const Float8DequantizeProblem& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) switch (p.code_type) {
      case Float8Codes::kE4M3:
        dequantize_float8_row<T, Float8Codes::kE4M3>(p, row);
        break;
      case Float8Codes::kE5M2:
        dequantize_float8_row<T, Float8Codes::kE5M2>(p, row);
        break;
    }
}

void dequantize_float8(const Float8DequantizeProblem& p, int64_t begin, int64_t end) {
  switch (p.out_dtype) {
    case DType::kF32:
      return dequantize_float8_rows<F32>(p, begin, end);
    case DType::kBF16:
      return dequantize_float8_rows<BF16>(p, begin, end);
    case DType::kF16:
      return dequantize_float8_rows<F16>(p, begin, end);
  }
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_FLOAT8_KERNEL_H_
