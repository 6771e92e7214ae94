// A 16x16 tile of x in float32: loading with rounding, transposition, transform.
#ifndef JAX_FP4_XLA_FFI_CPU_TILE_H_
#define JAX_FP4_XLA_FFI_CPU_TILE_H_

#include "kernels.h"
#include "lanes.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

// v[i][lane]: element i of the block that a lane holds.
struct Tile {
  alignas(64) float v[kBlock][kBlock];
};

struct F32 {
  using Word = uint32_t;
  static constexpr DType dtype = DType::kF32;
};
struct BF16 {
  using Word = uint16_t;
  static constexpr DType dtype = DType::kBF16;
};
struct F16 {
  using Word = uint16_t;
  static constexpr DType dtype = DType::kF16;
};

// The float32 bits of stored words, one in the low bits of each lane.
template <class T, class V>
JAX_FP4_FN Bits<V> widen(Bits<V> word) {
  using L = Lanes<V>;
  if constexpr (T::dtype == DType::kF32) return word;
  if constexpr (T::dtype == DType::kBF16) return word << 16;
  if constexpr (T::dtype == DType::kF16) {
    const Bits<V> body = (word & 0x7FFFu) << 13, sign = (word & 0x8000u) << 16;
    const Bits<V> normal = body + (112u << 23);  // exponent bias 15 becomes 127
    const Bits<V> subnormal = L::bits(L::from_bits(body + (113u << 23)) - 0x1p-14f);
    const Bits<V> finite = body < L::splat_bits(0x00800000u) ? subnormal : normal;
    return (body < L::splat_bits(0x0F800000u) ? finite : (body | kInfBits)) | sign;
  }
}

// Nearest-even rounding to float16, kept as float32. Overflow is Inf, NaN stays NaN.
template <class V>
JAX_FP4_FN V round_to_float16(V value) {
  using L = Lanes<V>;
  const Bits<V> sign = L::bits(value) & ~kMagnitude;
  const Bits<V> u = L::bits(value) & kMagnitude;
  const Bits<V> rounded = (u + 0xFFFu + ((u >> 13) & 1u)) & ~0x1FFFu;
  const Bits<V> tiny = L::bits((L::from_bits(u) + 0.5f) - 0.5f);  // steps of 2^-24
  Bits<V> out = u < L::splat_bits(0x38800000u) ? tiny : rounded;
  out = u >= L::splat_bits(0x477FF000u) ? L::splat_bits(kInfBits) : out;  // 65520 and above
  out = u > L::splat_bits(kInfBits) ? L::splat_bits(kNanBits) : out;
  return L::from_bits(out | sign);
}

// Elements of one row or block: count <= 16 of them, then zeros.
template <class T>
JAX_FP4_FN void load_row(const typename T::Word* x, int64_t count, float to[kBlock]) {
  typename T::Word partial[kBlock];
  if (count < kBlock) {
    memset(partial, 0, sizeof(partial));
    memcpy(partial, x, static_cast<size_t>(count) * sizeof(typename T::Word));
    x = partial;
  }
  for (int i = 0; i < kBlock; i += kLanes)
    store(to + i, Lanes<F>::from_bits(widen<T, F>(load_words(x + i))));
}

template <class Function>
JAX_FP4_FN void for_each_vector(Tile& tile, Function function) {
  float* values = &tile.v[0][0];
  for (int i = 0; i < kBlock * kBlock; i += kLanes) store(values + i, function(load(values + i)));
}

// Rounds to the compute dtype; what the dtype of x already holds exactly is left alone.
template <class T>
JAX_FP4_FN void round_tile(DType compute, Tile& tile) {
  if (T::dtype == compute) return;
  switch (compute) {
    case DType::kF32:
      return;
    case DType::kBF16:
      return for_each_vector(tile, [](F v) { return round_to_bfloat16(v); });
    case DType::kF16:
      return for_each_vector(tile, [](F v) { return round_to_float16(v); });
  }
}

// Rows of x as tiles side by side, row after row because rows that lie a power of two apart would
// evict each other from the cache. rows >= 1, columns >= 1; what lies beyond them in the last tile
// is zero.
template <class T>
JAX_FP4_FN void load_panel(const typename T::Word* x, int64_t stride, int64_t rows, int64_t columns,
                           DType compute, Tile* tiles) {
  const int64_t whole = columns / kBlock, last = columns % kBlock;
  for (int i = 0; i < kBlock; ++i)
    if (i < rows) {
      const typename T::Word* row = x + i * stride;
      for (int64_t t = 0; t < whole; ++t) load_row<T>(row + t * kBlock, kBlock, tiles[t].v[i]);
      if (last != 0) load_row<T>(row + whole * kBlock, last, tiles[whole].v[i]);
    } else {
      for (int64_t t = 0; t * kBlock < columns; ++t)
        memset(tiles[t].v[i], 0, sizeof(tiles[t].v[i]));
    }
  for (int64_t t = 0; t * kBlock < columns; ++t) round_tile<T>(compute, tiles[t]);
}

#if defined(__AVX512F__)

JAX_FP4_FN F even_quarters(F x, F y) {
  return shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(x, y);
}

JAX_FP4_FN F odd_quarters(F x, F y) {
  return shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(x, y);
}

// Four rounds: pairs of rows, quads, then 128-bit quarters twice.
JAX_FP4_FN void transpose(const Tile& from, Tile& to) {
  F a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    const F x = load(from.v[i]), y = load(from.v[i + 1]);
    a[i] = shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(x, y);
    a[i + 1] = shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(x, y);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const F x = a[i + j], y = a[i + 2 + j];
      b[i + 2 * j] = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(x, y);
      b[i + 2 * j + 1] = shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(x, y);
    }
  // b[4 q + c] holds, in quarter p, column 4 p + c of rows 4 q to 4 q + 3.
  for (int c = 0; c < 4; ++c) {
    const F even0 = even_quarters(b[c], b[4 + c]), even1 = even_quarters(b[8 + c], b[12 + c]);
    const F odd0 = odd_quarters(b[c], b[4 + c]), odd1 = odd_quarters(b[8 + c], b[12 + c]);
    store(to.v[c], even_quarters(even0, even1));
    store(to.v[c + 4], even_quarters(odd0, odd1));
    store(to.v[c + 8], odd_quarters(even0, even1));
    store(to.v[c + 12], odd_quarters(odd0, odd1));
  }
}

#else

// Sixteen 4x4 transpositions, with shuffles that every instruction set has.
JAX_FP4_FN void transpose(const Tile& from, Tile& to) {
  using Four = float __attribute__((vector_size(16)));
  for (int i = 0; i < kBlock; i += 4)
    for (int j = 0; j < kBlock; j += 4) {
      Four row[4];
      for (int r = 0; r < 4; ++r) memcpy(&row[r], &from.v[i + r][j], sizeof(Four));
      const Four a = shuffle<0, 4, 1, 5>(row[0], row[1]);
      const Four b = shuffle<2, 6, 3, 7>(row[0], row[1]);
      const Four c = shuffle<0, 4, 1, 5>(row[2], row[3]);
      const Four d = shuffle<2, 6, 3, 7>(row[2], row[3]);
      const Four out[4] = {shuffle<0, 1, 4, 5>(a, c), shuffle<2, 3, 6, 7>(a, c),
                           shuffle<0, 1, 4, 5>(b, d), shuffle<2, 3, 6, 7>(b, d)};
      for (int r = 0; r < 4; ++r) memcpy(&to.v[j + r][i], &out[r], sizeof(Four));
    }
}

#endif

// The Hadamard transform of the block of each lane.
JAX_FP4_FN void hadamard_tile(const Tile& from, Tile& to) {
  for (int lane = 0; lane < kBlock; lane += kLanes) {
    F v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = round_to_bfloat16(load(&from.v[i][lane]));
    hadamard16(v);
    for (int i = 0; i < kBlock; ++i) store(&to.v[i][lane], v[i]);
  }
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_TILE_H_
