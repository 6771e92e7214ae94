// Absolute maxima as integer maxima of bits. 2 or 4 bytes are read per element, nothing is written.
#ifndef JAX_FP4_XLA_FFI_CPU_AMAX_KERNEL_H_
#define JAX_FP4_XLA_FFI_CPU_AMAX_KERNEL_H_

#include "tile.h"

namespace jax_fp4 {
namespace {  // compiled for several instruction sets: nothing here may be shared by the linker

template <class T>
constexpr typename T::Word kWordMagnitude =
    static_cast<typename T::Word>(sizeof(typename T::Word) == 4 ? 0x7FFFFFFFu : 0x7FFFu);

// Rounding is monotone, so the maximum is found on the stored words and rounded once.
template <class T>
uint32_t rounded_bits(typename T::Word word, DType compute) {
  using L = Lanes<float>;
  const float value = L::from_bits(widen<T, float>(word));
  if (T::dtype == compute) return L::bits(value);
  switch (compute) {
    case DType::kF32:
      return L::bits(value);
    case DType::kBF16:
      return L::bits(round_to_bfloat16(value));
    case DType::kF16:
      return L::bits(round_to_float16(value));
  }
  return kNanBits;
}

template <class Word>
JAX_FP4_FN Word more(Word a, Word b) {
  return a < b ? b : a;
}

template <class T>
uint32_t amax_of(const void* from, DType compute, int64_t count) {
  using Word = typename T::Word;
  constexpr int kStep = 256;  // independent maxima: no comparison waits for the one before it
  const Word* x = static_cast<const Word*>(from);
  Word most[kStep] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep)
    for (int j = 0; j < kStep; ++j)
      most[j] = more<Word>(most[j], static_cast<Word>(x[i + j] & kWordMagnitude<T>));
  for (int j = 0; i < count; ++i, ++j)
    most[j] = more<Word>(most[j], static_cast<Word>(x[i] & kWordMagnitude<T>));
  Word result = 0;
  for (int j = 0; j < kStep; ++j) result = more(result, most[j]);
  return rounded_bits<T>(result, compute);
}

template <class T>
void column_amax_of(const void* from, DType compute, int64_t stride, int64_t rows, int64_t columns,
                    uint32_t* bits) {
  using Word = typename T::Word;
  const Word* x = static_cast<const Word*>(from);
  Word most[kItemColumns] = {};
  for (int64_t r = 0; r < rows; ++r, x += stride)
    for (int64_t c = 0; c < columns; ++c)
      most[c] = more<Word>(most[c], static_cast<Word>(x[c] & kWordMagnitude<T>));
  for (int64_t c = 0; c < columns; ++c) bits[c] = rounded_bits<T>(most[c], compute);
}

template <class T>
uint32_t hadamard_amax_of(const void* from, DType compute, int64_t stride, int64_t rows,
                          int64_t columns) {
  using L = Lanes<F>;
  const auto* x = static_cast<const typename T::Word*>(from);
  U most{};
  Tile panel[kItemColumns / kBlock], mixed;
  for (int64_t r = 0; r < rows; r += kBlock) {
    load_panel<T>(x + r * stride, stride, rows - r, columns, compute, panel);
    for (int64_t t = 0; t * kBlock < columns; ++t) {
      hadamard_tile(panel[t], mixed);
      const float* values = &mixed.v[0][0];
      for (int i = 0; i < kBlock * kBlock; i += kLanes)
        most = L::greater(most, L::bits(load(values + i)) & kMagnitude);
    }
  }
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = more<uint32_t>(result, most[i]);
  return result;
}

uint32_t amax(const void* x, DType dtype, DType compute, int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return amax_of<F32>(x, compute, count);
    case DType::kBF16:
      return amax_of<BF16>(x, compute, count);
    case DType::kF16:
      return amax_of<F16>(x, compute, count);
  }
  return kNanBits;
}

void column_amax(const void* x, DType dtype, DType compute, int64_t stride, int64_t rows,
                 int64_t columns, uint32_t* bits) {
  switch (dtype) {
    case DType::kF32:
      return column_amax_of<F32>(x, compute, stride, rows, columns, bits);
    case DType::kBF16:
      return column_amax_of<BF16>(x, compute, stride, rows, columns, bits);
    case DType::kF16:
      return column_amax_of<F16>(x, compute, stride, rows, columns, bits);
  }
}

uint32_t hadamard_amax(const void* x, DType dtype, DType compute, int64_t stride, int64_t rows,
                       int64_t columns) {
  switch (dtype) {
    case DType::kF32:
      return hadamard_amax_of<F32>(x, compute, stride, rows, columns);
    case DType::kBF16:
      return hadamard_amax_of<BF16>(x, compute, stride, rows, columns);
    case DType::kF16:
      return hadamard_amax_of<F16>(x, compute, stride, rows, columns);
  }
  return kNanBits;
}

}  // namespace
}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_AMAX_KERNEL_H_
