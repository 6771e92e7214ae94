#include "quantize.h"

#include <algorithm>
#include <cstring>

#include "../kernels/nvfp4.h"
#include "huge_pages.h"

namespace jax_fp4 {
namespace {

// The order in which threads arrive does not matter to an integer maximum.
void raise_to(float* amax, uint32_t bits) {
  static_assert(sizeof(float) == sizeof(uint32_t), "amaxes are reduced as bits");
  uint32_t* target = reinterpret_cast<uint32_t*>(amax);
  uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(target, &seen, bits, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
}

const void* element(const QuantizeProblem& p, int64_t index) {
  const int64_t width = p.x_dtype == DType::kF32 ? 4 : 2;
  return static_cast<const uint8_t*>(p.x) + index * width;
}

// One amax a batch entry, over x itself.
void tensor_amax(const Kernels& kernels, Executor& executor, const QuantizeProblem& p,
                 float* amax) {
  const int64_t size = p.m * p.k, items = ceil_div(size, kFlatElements);
  executor.run(p.batch * items, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t batch = item / items, first = item % items * kFlatElements;
      const int64_t count = std::min(size - first, kFlatElements);
      raise_to(amax + batch,
               kernels.amax(element(p, batch * size + first), p.x_dtype, p.compute, count));
    }
  });
}

// Amaxes of one piece of x: of its rows and columns, or of its transformed columns.
void piece_amax(const Kernels& kernels, const QuantizeProblem& p, int64_t batch, int64_t row0,
                int64_t column0) {
  const int64_t rows = std::min(p.m - row0, kItemRows);
  const int64_t columns = std::min(p.k - column0, kItemColumns);
  const int64_t corner = (batch * p.m + row0) * p.k + column0;
  if (p.row.wanted && p.row_scaled)
    for (int64_t i = 0; i < rows; ++i)
      raise_to(p.row.amax + batch * p.m + row0 + i,
               kernels.amax(element(p, corner + i * p.k), p.x_dtype, p.compute, columns));
  if (p.column.wanted && p.row_scaled) {
    uint32_t bits[kItemColumns];
    kernels.column_amax(element(p, corner), p.x_dtype, p.compute, p.k, rows, columns, bits);
    for (int64_t i = 0; i < columns; ++i)
      raise_to(p.column.amax + batch * p.k + column0 + i, bits[i]);
  }
  if (p.column.wanted && p.column.hadamard)
    raise_to(p.column.amax + batch,
             kernels.hadamard_amax(element(p, corner), p.x_dtype, p.compute, p.k, rows, columns));
}

void piece_amaxes(const Kernels& kernels, Executor& executor, const QuantizeProblem& p) {
  const int64_t across = ceil_div(p.k, kItemColumns), down = ceil_div(p.m, kItemRows);
  executor.run(p.batch * down * across, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t place = item % (down * across);
      piece_amax(kernels, p, item / (down * across), place / across * kItemRows,
                 place % across * kItemColumns);
    }
  });
}

void store_amax(float* amax, int64_t count) {
  using L = Lanes<float>;
  for (int64_t i = 0; i < count; ++i)
    if ((L::bits(amax[i]) & kMagnitude) > kInfBits) amax[i] = L::from_bits(kNanBits);
}

void compute_amaxes(const Kernels& kernels, Executor& executor, const QuantizeProblem& p) {
  for (const StoredForm* form : {&p.row, &p.column})
    if (form->wanted) std::fill_n(form->amax, amax_count(p, *form), 0.0f);
  const bool plain_column = p.column.wanted && !p.column.hadamard;
  if (p.row_scaled)
    piece_amaxes(kernels, executor, p);
  else if (p.row.wanted || plain_column)
    tensor_amax(kernels, executor, p, p.row.wanted ? p.row.amax : p.column.amax);
  if (!p.row_scaled && p.row.wanted && plain_column)
    std::copy_n(p.row.amax, p.batch, p.column.amax);
  if (!p.row_scaled && p.column.wanted && p.column.hadamard) piece_amaxes(kernels, executor, p);
}

}  // namespace

bool quantize_in_block_order(const QuantizeProblem& p) {
  return p.row.wanted && !p.column.wanted && p.tile == 1;
}

int64_t quantize_items(const QuantizeProblem& p) {
  if (quantize_in_block_order(p)) return p.batch * ceil_div(p.row.rows * p.row.blocks, kItemBlocks);
  return p.batch * ceil_div(p.m, kItemRows) * ceil_div(p.k, kItemColumns);
}

int64_t amax_count(const QuantizeProblem& p, const StoredForm& form) {
  return p.row_scaled ? p.batch * form.rows : p.batch;
}

void quantize(const Kernels& kernels, Executor& executor, const QuantizeProblem& p,
              const GivenAmax& given) {
  if (given.row == nullptr && given.column == nullptr) {
    compute_amaxes(kernels, executor, p);
  } else {
    if (p.row.wanted) std::copy_n(given.row, amax_count(p, p.row), p.row.amax);
    if (p.column.wanted) std::copy_n(given.column, amax_count(p, p.column), p.column.amax);
  }
  for (const StoredForm* form : {&p.row, &p.column})
    if (form->wanted) {
      store_amax(form->amax, amax_count(p, *form));
      prefer_huge_pages(form->codes, p.batch * form->rows * form->blocks * kBlockCodeBytes);
    }
  executor.run(quantize_items(p),
               [&](int64_t begin, int64_t end) { kernels.quantize(p, begin, end); });
}

void dequantize(const Kernels& kernels, Executor& executor, const DequantizeProblem& p) {
  prefer_huge_pages(p.out, p.batch * p.rows * p.extent * (p.out_dtype == DType::kF32 ? 4 : 2));
  // Rows are grouped so that an item is worth taking.
  const int64_t rows = p.batch * p.rows;
  const int64_t group = kFlatElements / (p.extent + 1) + 1;
  executor.run(ceil_div(rows, group), [&](int64_t begin, int64_t end) {
    kernels.dequantize(p, begin * group, std::min(end * group, rows));
  });
}

}  // namespace jax_fp4
