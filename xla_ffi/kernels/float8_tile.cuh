// What the thread block of a tile of 128 x 128 elements does in quantize_float8.cu, as steps of one
// thread between which the block waits for all of them: whole blocks and square tiles of either
// form, and lines of 128 bytes of codes of both. No step speaks to another thread but by way of
// Float8Shared, so that a loop over the threads can run them too (tests/cpp/emulate_float8.cu).
//
// A form's lines are its stored rows: rows of x (form 0), or columns (form 1). In both, a tile has
// 128 lines of 16 patches; thread t of 256 finds the scales of line t % 128 of form t / 128.
#ifndef JAX_FP4_XLA_FFI_KERNELS_FLOAT8_TILE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_FLOAT8_TILE_CUH_

#include "float8_patch.cuh"

#define JAX_FP4_STEP __host__ __device__ __forceinline__  // a member of a thread's state

namespace jax_fp4::cuda {

constexpr int kFloat8Tile = 128, kFloat8Threads = 256;
constexpr int kSide = kFloat8Tile / kPatch;  // patches along a side
static_assert(kSide * kSide == kFloat8Threads && 2 * kFloat8Tile == kFloat8Threads,
              "a thread has one patch and one line");

// Rows of words are 16 bytes apart from a multiple of 128, so that eight threads beside each other
// write their pieces to all banks.
template <DType dtype>
struct alignas(16) Float8Shared {
  static constexpr int kLineWords = kFloat8Tile / Words<dtype>::kPer;
  uint32_t partial[2][kSide][kLineWords + 4];    // [form][patch along a line]: of the lines
  alignas(16) uint32_t peak[2][4][kFloat8Tile];  // [form][block][line], where tiles join them
  alignas(16) float multiplier[2][4][kFloat8Tile + 4];
};

JAX_FP4_FN int64_t tiles_of(int64_t extent) { return ceil_div(extent, kFloat8Tile); }

// One step after another. kLength: elements of a block; 0 where a tensor has one scale.
template <DType dtype, Float8Codes codes, int kLength>
struct Float8Thread {
  using W = Words<dtype>;
  using Shared = Float8Shared<dtype>;
  static constexpr int kBlocks = kLength == 0 ? 1 : kFloat8Tile / kLength;  // of a line
  static constexpr int kBlockPatches = kSide / kBlocks;

  int thread, down, across;  // the patch's place in the tile
  Corner tile, corner;       // where tile and patch begin
  Patch<dtype> patch;
  uint32_t peak[kBlocks];  // float bits, of the blocks of the thread's line

  // A warp has 4 x 8 patches: 32 rows of which it reads whole lines of 128 bytes.
  JAX_FP4_STEP void begin(const Float8Problem& p, uint32_t number, int index) {
    thread = index;
    across = (index & 7) | (index >> 5 & 1) << 3;
    down = (index >> 3 & 3) | index >> 6 << 2;
    const auto wide = static_cast<uint32_t>(tiles_of(p.k)),
               high = static_cast<uint32_t>(tiles_of(p.m));
    const uint32_t columns = wide == 0 ? 1 : wide, rows = high == 0 ? 1 : high;
    const uint32_t strip = number / columns;
    tile.entry = static_cast<int32_t>(strip / rows);
    tile.row = static_cast<int32_t>(strip % rows) * kFloat8Tile;
    tile.column = static_cast<int32_t>(number % columns) * kFloat8Tile;
    corner = {tile.entry, tile.row + down * kPatch, tile.column + across * kPatch};
    patch = Patch<dtype>::load(p, corner);
  }

  JAX_FP4_STEP void note_peaks(Shared& shared) const {
    uint32_t rows[W::kRow], columns[W::kRow];
    Patch<dtype>::peaks(patch, rows, columns);
    put(&shared.partial[0][across][down * W::kRow], rows);
    put(&shared.partial[1][down][across * W::kRow], columns);
  }

  // After note_peaks: of the thread's line.
  JAX_FP4_STEP void find_peaks(const Shared& shared) {
    const int form = thread / kFloat8Tile, line = thread % kFloat8Tile;
    JAX_FP4_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t most = 0;
      JAX_FP4_UNROLL
      for (int i = 0; i < kBlockPatches; ++i)
        most = W::more(most, shared.partial[form][b * kBlockPatches + i][line / W::kPer]);
      peak[b] = Lanes<float>::bits(W::value(most, line % W::kPer));
    }
  }

  // After find_peaks, for square tiles alone.
  JAX_FP4_STEP void share_peaks(Shared& shared) const {
    JAX_FP4_UNROLL
    for (int b = 0; b < kBlocks; ++b)
      shared.peak[thread / kFloat8Tile][b][thread % kFloat8Tile] = peak[b];
  }
  // After share_peaks: a square has the largest of its lines' peaks.
  JAX_FP4_STEP void join_peaks(const Shared& shared) {
    const int first = kLength == 0 ? 0 : thread % kFloat8Tile / kLength * kLength;
    JAX_FP4_UNROLL
    for (int b = 0; b < kBlocks; ++b)
      for (int i = 0; i < kLength; i += 4) {
        const Piece four = get(&shared.peak[thread / kFloat8Tile][b][first + i]);
        JAX_FP4_UNROLL
        for (int n = 0; n < 4; ++n) peak[b] = Lanes<float>::greater(peak[b], four.word[n]);
      }
  }

  // After find_peaks or join_peaks: stores the scales of the thread's line, if it is one of x, and
  // leaves what its elements are multiplied by.
  JAX_FP4_STEP void make_scales(const Float8Problem& p, Shared& shared) const {
    const int form = thread / kFloat8Tile, line = thread % kFloat8Tile;
    const StoredFloat8& stored = form == 0 ? p.row : p.column;
    if (!stored.wanted) return;
    const int64_t lines = form == 0 ? p.m : p.k, from = form == 0 ? tile.row : tile.column;
    const int64_t first = (form == 0 ? tile.column : tile.row) / (kLength == 0 ? 1 : kLength);
    uint32_t scales = 0;  // of the blocks: E8M0, a byte each, or the one float32
    JAX_FP4_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      float multiplier;
      if (kLength == 32) {
        const uint32_t scale = e8m0_scale<float>(peak[b], largest_code(codes));
        multiplier = e8m0_multiplier<float>(scale);
        scales |= scale << (8 * b);
      } else {
        multiplier = float8_scale<float>(peak[b], largest_code(codes), p.eps, p.power_of_two);
        scales = Lanes<float>::bits(1.0f / multiplier);
      }
      shared.multiplier[form][b][line] = multiplier;
    }
    const int64_t room = stored.blocks - first;
    if (from + line >= lines || room <= 0) return;
    if (kLength == 32) {
      auto* to = static_cast<uint8_t*>(stored.scale);
      to += (tile.entry * lines + from + line) * stored.blocks + first;
      if (stored.blocks % 4 == 0) {
        *reinterpret_cast<uint32_t*>(to) = scales;
      } else {
        for (int b = 0; b < 4 && b < room; ++b) to[b] = static_cast<uint8_t>(scales >> (8 * b));
      }
    } else if (line % p.tile == 0) {
      const int64_t row = tile.entry * ceil_div(lines, p.tile) + (from + line) / p.tile;
      static_cast<uint32_t*>(stored.scale)[row * stored.blocks + first] = scales;
    }
  }

  // After make_scales: the codes of the patch.
  JAX_FP4_STEP void encode(const Float8Problem& p, const Shared& shared) const {
    float multiplier[kPatch];
    if (p.row.wanted) {
      get_eight(shared.multiplier[0][across / kBlockPatches] + down * kPatch, multiplier);
      encode_rows(p, multiplier);
    }
    if (p.column.wanted) {
      get_eight(shared.multiplier[1][down / kBlockPatches] + across * kPatch, multiplier);
      encode_columns(p, multiplier);
    }
  }
  JAX_FP4_STEP void encode(const Float8Problem& p, float of_tensor) const {
    float multiplier[kPatch];
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; ++i) multiplier[i] = of_tensor;
    if (p.row.wanted) encode_rows(p, multiplier);
    if (p.column.wanted) encode_columns(p, multiplier);
  }

  // ---- Codes -----------------------------------------------------------------------------------

  JAX_FP4_STEP void encode_rows(const Float8Problem& p, const float multiplier[kPatch]) const {
    const int64_t room = p.row.extent - corner.column;
    uint8_t* to = p.row.codes + (corner.entry * p.m + corner.row) * p.row.extent + corner.column;
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; ++i) {
      uint32_t pairs[kPatch / 2];
      JAX_FP4_UNROLL
      for (int j = 0; j < kPatch; j += 2)
        pairs[j / 2] =
            encode_float8_pair<codes>(at(i, j) * multiplier[i], at(i, j + 1) * multiplier[i]);
      if (corner.row + i < p.m) store_codes(to + i * p.row.extent, pairs, room, p.row.extent);
    }
  }

  JAX_FP4_STEP void encode_columns(const Float8Problem& p, const float multiplier[kPatch]) const {
    const int64_t room = p.column.extent - corner.row;
    uint8_t* to =
        p.column.codes + (corner.entry * p.k + corner.column) * p.column.extent + corner.row;
    JAX_FP4_UNROLL
    for (int j = 0; j < kPatch; ++j) {
      uint32_t pairs[kPatch / 2];
      JAX_FP4_UNROLL
      for (int i = 0; i < kPatch; i += 2)
        pairs[i / 2] =
            encode_float8_pair<codes>(at(i, j) * multiplier[j], at(i + 1, j) * multiplier[j]);
      if (corner.column + j < p.k)
        store_codes(to + j * p.column.extent, pairs, room, p.column.extent);
    }
  }

  JAX_FP4_STEP float at(int row, int column) const { return Patch<dtype>::at(patch, row, column); }

  // Eight codes of a line of `extent`, or as many as there is room for. Whole blocks are multiples
  // of eight.
  JAX_FP4_MEMBER void store_codes(uint8_t* to, const uint32_t pairs[kPatch / 2], int64_t room,
                                  int64_t extent) {
    if (room <= 0) return;
    const uint64_t eight =
        (pairs[0] | pairs[1] << 16) | static_cast<uint64_t>(pairs[2] | pairs[3] << 16) << 32;
    if constexpr (kLength == 0)
      if (extent % kPatch != 0) return store_singly(to, eight, room);
    *reinterpret_cast<uint64_t*>(to) = eight;
  }
  JAX_FP4_MEMBER void store_singly(uint8_t* to, uint64_t codes_of, int64_t count) {
    JAX_FP4_ROLLED
    for (int i = 0; i < kPatch && i < count; ++i) to[i] = static_cast<uint8_t>(codes_of >> (8 * i));
  }

  // ---- Shared memory, in pieces ----------------------------------------------------------------

  JAX_FP4_MEMBER Piece get(const void* from) { return *static_cast<const Piece*>(from); }
  JAX_FP4_MEMBER void put(uint32_t* to, const uint32_t words[W::kRow]) {
    JAX_FP4_UNROLL
    for (int j = 0; j < W::kRow; j += 4)
      *reinterpret_cast<Piece*>(to + j) = {{words[j], words[j + 1], words[j + 2], words[j + 3]}};
  }
  JAX_FP4_MEMBER void get_eight(const float* from, float to[kPatch]) {
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; i += 4) {
      const Piece four = get(from + i);
      JAX_FP4_UNROLL
      for (int n = 0; n < 4; ++n) to[i + n] = Lanes<float>::from_bits(four.word[n]);
    }
  }
};

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_FLOAT8_TILE_CUH_
