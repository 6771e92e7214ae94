#include "quantize.h"

#include <algorithm>

#include "../kernels/nvfp4.h"
#include "huge_pages.h"
#include "parts.h"

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
  return element(p.x, p.x_dtype, index);
}

// ---- Parts -----------------------------------------------------------------------------------

void advance(StoredForm& form, int64_t blocks, int64_t amaxes) {
  if (!form.wanted) return;
  form.amax += amaxes;
  if (form.codes == nullptr) return;  // its amaxes alone are wanted
  form.codes += blocks * kBlockCodeBytes;
  form.block_scale += blocks;
}

// Where the blocks of a part lie in the global tensor; a group has a tensor of its own.
void place(QuantizeProblem& p, const QuantizeCall& call, const Part& part) {
  const uint32_t* seed = call.seed + seed_words(call.split_groups, call.groups) * part.entry;
  const int64_t number = part.number - part.entry * call.groups;
  p.key = seed;
  p.expert = call.grouped ? seed[2] + static_cast<uint32_t>(number) : 0;
  p.m_origin = call.grouped ? 0 : seed[2];
  p.k_origin = seed[3];
  if (call.grouped) p.m_total = p.m;
  if (!call.split_groups) return;
  p.m_origin = seed[kSeedWords + number];
  p.m_total = seed[kSeedWords + call.groups + number];
}

QuantizeProblem matrix(const QuantizeCall& call, const Part& part) {
  QuantizeProblem p = call.entry;
  const int64_t row = part.entry * p.m + part.row, i = part.number;
  p.x = element(p, row * p.k);
  advance(p.row, row * p.row.blocks, p.row_scaled ? row : i);
  advance(p.column, part.entry * p.k * p.column.blocks + part.block, p.row_scaled ? i * p.k : i);
  p.m = p.row.rows = part.rows;
  if (call.seed != nullptr) place(p, call, part);
  return p;
}

// Runs work(matrix, begin, end) over the items of all matrices of the call.
template <class Items, class Work>
void run(Parts& parts, Executor& executor, const QuantizeCall& call, const Items& items,
         const Work& work) {
  parts.run(executor, items, [&](const Part& part, int64_t begin, int64_t end) {
    work(matrix(call, part), begin, end);
  });
}

int64_t pieces(const QuantizeProblem& p, int64_t m) {
  return ceil_div(m, kItemRows) * ceil_div(p.k, kItemColumns);
}

// ---- Amaxes ----------------------------------------------------------------------------------

// Amaxes of one piece of x: of its rows and columns, or of its transformed columns.
void piece_amax(const Kernels& kernels, const QuantizeProblem& p, int64_t row0, int64_t column0) {
  const int64_t rows = std::min(p.m - row0, kItemRows);
  const int64_t columns = std::min(p.k - column0, kItemColumns);
  const int64_t corner = row0 * p.k + column0;
  if (p.row.wanted && p.row_scaled)
    for (int64_t i = 0; i < rows; ++i)
      raise_to(p.row.amax + row0 + i,
               kernels.amax(element(p, corner + i * p.k), p.x_dtype, p.compute, columns));
  if (p.column.wanted && p.row_scaled) {
    uint32_t bits[kItemColumns];
    kernels.column_amax(element(p, corner), p.x_dtype, p.compute, p.k, rows, columns, bits);
    for (int64_t i = 0; i < columns; ++i) raise_to(p.column.amax + column0 + i, bits[i]);
  }
  if (p.column.wanted && p.column.hadamard)
    raise_to(p.column.amax,
             kernels.hadamard_amax(element(p, corner), p.x_dtype, p.compute, p.k, rows, columns));
}

void piece_amaxes(const Kernels& kernels, Executor& executor, const QuantizeCall& call,
                  Parts& parts) {
  const int64_t across = ceil_div(call.entry.k, kItemColumns);
  const auto count = [&](int64_t m) { return pieces(call.entry, m); };
  run(parts, executor, call, count, [&](const QuantizeProblem& p, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      piece_amax(kernels, p, item / across * kItemRows, item % across * kItemColumns);
  });
}

void compute_amaxes(const Kernels& kernels, Executor& executor, const QuantizeCall& call,
                    Parts& parts) {
  const QuantizeProblem& p = call.entry;
  if (p.row.wanted) std::fill_n(p.row.amax, amax_count(call, true), 0.0f);
  if (p.column.wanted) std::fill_n(p.column.amax, amax_count(call, false), 0.0f);
  const bool plain_column = p.column.wanted && !p.column.hadamard;
  if (p.row_scaled)
    piece_amaxes(kernels, executor, call, parts);
  else if (p.row.wanted || plain_column)
    tensor_amaxes(kernels, executor, parts, p.x, p.x_dtype, p.compute, p.m, p.k,
                  p.row.wanted ? p.row.amax : p.column.amax);
  if (!p.row_scaled && p.row.wanted && plain_column)
    std::copy_n(p.row.amax, amax_count(call, true), p.column.amax);
  if (!p.row_scaled && p.column.wanted && p.column.hadamard)
    piece_amaxes(kernels, executor, call, parts);
}

}  // namespace

void tensor_amaxes(const Kernels& kernels, Executor& executor, Parts& parts, const void* x,
                   DType dtype, DType compute, int64_t m, int64_t k, float* amax) {
  std::fill_n(amax, parts.count(), 0.0f);
  const auto count = [k](int64_t rows) { return ceil_div(rows * k, kFlatElements); };
  parts.run(executor, count, [&](const Part& part, int64_t begin, int64_t end) {
    const int64_t first = begin * kFlatElements,
                  last = std::min(end * kFlatElements, part.rows * k);
    const void* from = element(x, dtype, (part.entry * m + part.row) * k + first);
    raise_to(amax + part.number, kernels.amax(from, dtype, compute, last - first));
  });
}

void store_amax(float* amax, int64_t count) {
  using L = Lanes<float>;
  for (int64_t i = 0; i < count; ++i)
    if ((L::bits(amax[i]) & kMagnitude) > kInfBits) amax[i] = L::from_bits(kNanBits);
}

bool quantize_in_block_order(const QuantizeProblem& p) {
  return p.row.wanted && !p.column.wanted && p.tile == 1;
}

int64_t amax_count(const QuantizeCall& call, bool row_wise) {
  const int64_t parts = call.batch * call.groups;
  if (!call.entry.row_scaled) return parts;
  return row_wise ? call.batch * call.entry.m : parts * call.entry.k;
}

void quantize(const Kernels& kernels, Executor& executor, const QuantizeCall& call) {
  const QuantizeProblem& entry = call.entry;
  Parts parts(call.batch, entry.m, call.grouped, call.groups, call.group_sizes, kBlock);
  if (call.given_row_amax == nullptr && call.given_column_amax == nullptr) {
    compute_amaxes(kernels, executor, call, parts);
  } else {
    if (entry.row.wanted) std::copy_n(call.given_row_amax, amax_count(call, true), entry.row.amax);
    if (entry.column.wanted)
      std::copy_n(call.given_column_amax, amax_count(call, false), entry.column.amax);
  }
  for (const bool row_wise : {true, false}) {
    const StoredForm& form = row_wise ? entry.row : entry.column;
    if (!form.wanted) continue;
    store_amax(form.amax, amax_count(call, row_wise));
    prefer_huge_pages(form.codes, call.batch * form.rows * form.blocks * kBlockCodeBytes);
    if (!call.grouped) continue;
    clear_rest(executor, parts, {form.codes, form.rows, form.blocks, kBlockCodeBytes}, row_wise);
    clear_rest(executor, parts, {form.block_scale, form.rows, form.blocks, 1}, row_wise);
  }
  const auto count = [&entry](int64_t m) {
    return quantize_in_block_order(entry) ? ceil_div(m * entry.row.blocks, kItemBlocks)
                                          : pieces(entry, m);
  };
  run(parts, executor, call, count, [&](const QuantizeProblem& p, int64_t begin, int64_t end) {
    kernels.quantize(p, begin, end);
  });
}

void amaxes(const Kernels& kernels, Executor& executor, const QuantizeCall& call) {
  Parts parts(call.batch, call.entry.m, call.grouped, call.groups, call.group_sizes, kBlock);
  compute_amaxes(kernels, executor, call, parts);
  for (const bool row_wise : {true, false}) {
    const StoredForm& form = row_wise ? call.entry.row : call.entry.column;
    if (form.wanted) store_amax(form.amax, amax_count(call, row_wise));
  }
}

void dequantize(const Kernels& kernels, Executor& executor, const DequantizeProblem& p) {
  prefer_huge_pages(p.out, p.batch * p.rows * p.extent * bytes_of(p.out_dtype));
  // Rows are grouped so that an item is worth taking.
  const int64_t rows = p.batch * p.rows;
  const int64_t group = kFlatElements / (p.extent + 1) + 1;
  executor.run(ceil_div(rows, group), [&](int64_t begin, int64_t end) {
    kernels.dequantize(p, begin * group, std::min(end * group, rows));
  });
}

}  // namespace jax_fp4
