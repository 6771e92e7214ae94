#include "quantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

// ---- Parts -----------------------------------------------------------------------------------

// The rows of one group, in a batch entry of x.
struct Group {
  int64_t row, rows;
  int64_t block;   // where it begins in the stored rows of the column-wise form
  int64_t before;  // items of the groups before it, in the pass under way
};

// The matrices of a call: its batch entries, or the groups of each.
class Parts {
 public:
  explicit Parts(const QuantizeCall& call) : call_(call) {
    if (!call.grouped) return;
    groups_.resize(static_cast<size_t>(call.batch * call.groups));
    for (size_t i = 0; i < groups_.size(); ++i) {
      const bool first = static_cast<int64_t>(i) % call.groups == 0;
      const int64_t row = first ? 0 : end_row(groups_[i - 1]);
      const int64_t size = std::max<int64_t>(call.group_sizes[i], 0);
      const int64_t block = first ? 0 : end_block(groups_[i - 1]);
      groups_[i] = {row, std::min(size, call.entry.m - row), block, 0};
    }
  }

  // Runs work(matrix, begin, end) over the items of all parts, of which a matrix of m rows has
  // count(m). They are numbered one part after the other, so that small parts share a thread and
  // large ones spread over several.
  template <class Count, class Work>
  void run(Executor& executor, const Count& count, const Work& work) {
    const int64_t each = call_.grouped ? 0 : count(call_.entry.m);
    int64_t total = call_.batch * each;
    for (Group& group : groups_) {
      group.before = total;
      total += count(group.rows);
    }
    executor.run(total, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t i = call_.grouped ? holder(begin) : begin / each;
        const int64_t first = call_.grouped ? group(i).before : i * each;
        const QuantizeProblem part = matrix(i);
        const int64_t stop = std::min(end, first + count(part.m));
        work(part, begin - first, stop - first);
        begin = stop;
      }
    });
  }

  // Where the last group of a batch entry ends: a row of x, and a block of the column-wise form.
  int64_t end_row(int64_t entry) const {
    return call_.groups == 0 ? 0 : end_row(group((entry + 1) * call_.groups - 1));
  }
  int64_t end_block(int64_t entry) const {
    return call_.groups == 0 ? 0 : end_block(group((entry + 1) * call_.groups - 1));
  }

 private:
  static int64_t end_row(const Group& group) { return group.row + group.rows; }
  static int64_t end_block(const Group& group) {
    return group.block + ceil_div(group.rows, kBlock);
  }

  const Group& group(int64_t i) const { return groups_[static_cast<size_t>(i)]; }

  // The group that has the item: an empty one begins where the next begins, so it is never found.
  int64_t holder(int64_t item) const {
    const auto after =
        std::upper_bound(groups_.begin(), groups_.end(), item,
                         [](int64_t number, const Group& group) { return number < group.before; });
    return after - groups_.begin() - 1;
  }

  QuantizeProblem matrix(int64_t i) const {
    const int64_t entry = call_.grouped ? i / call_.groups : i;
    const Group rows = call_.grouped ? group(i) : Group{0, call_.entry.m, 0, 0};
    QuantizeProblem p = call_.entry;
    const int64_t row = entry * p.m + rows.row;
    p.x = element(p, row * p.k);
    advance(p.row, row * p.row.blocks, p.row_scaled ? row : i);
    advance(p.column, entry * p.k * p.column.blocks + rows.block, p.row_scaled ? i * p.k : i);
    p.m = p.row.rows = rows.rows;
    if (call_.seed != nullptr) place(p, call_.seed + 4 * entry, i - entry * call_.groups);
    return p;
  }

  static void advance(StoredForm& form, int64_t blocks, int64_t amaxes) {
    if (!form.wanted) return;
    form.codes += blocks * kBlockCodeBytes;
    form.block_scale += blocks;
    form.amax += amaxes;
  }

  // Where the blocks of a part lie in the global tensor; a group has a tensor of its own.
  void place(QuantizeProblem& p, const uint32_t* seed, int64_t number) const {
    p.key = seed;
    p.expert = call_.grouped ? seed[2] + static_cast<uint32_t>(number) : 0;
    p.m_origin = call_.grouped ? 0 : seed[2];
    p.k_origin = seed[3];
    if (call_.grouped) p.m_total = p.m;
  }

  const QuantizeCall& call_;
  std::vector<Group> groups_;  // [batch, groups]
};

int64_t pieces(const QuantizeProblem& p, int64_t m) {
  return ceil_div(m, kItemRows) * ceil_div(p.k, kItemColumns);
}

// ---- Amaxes ----------------------------------------------------------------------------------

// One amax a matrix, over x itself.
void tensor_amaxes(const Kernels& kernels, Executor& executor, const QuantizeCall& call,
                   Parts& parts) {
  const int64_t k = call.entry.k;
  const auto count = [k](int64_t m) { return ceil_div(m * k, kFlatElements); };
  parts.run(executor, count, [&](const QuantizeProblem& p, int64_t begin, int64_t end) {
    const int64_t first = begin * kFlatElements, last = std::min(end * kFlatElements, p.m * k);
    raise_to(p.row.wanted ? p.row.amax : p.column.amax,
             kernels.amax(element(p, first), p.x_dtype, p.compute, last - first));
  });
}

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
  parts.run(executor, count, [&](const QuantizeProblem& p, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      piece_amax(kernels, p, item / across * kItemRows, item % across * kItemColumns);
  });
}

void store_amax(float* amax, int64_t count) {
  using L = Lanes<float>;
  for (int64_t i = 0; i < count; ++i)
    if ((L::bits(amax[i]) & kMagnitude) > kInfBits) amax[i] = L::from_bits(kNanBits);
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
    tensor_amaxes(kernels, executor, call, parts);
  if (!p.row_scaled && p.row.wanted && plain_column)
    std::copy_n(p.row.amax, amax_count(call, true), p.column.amax);
  if (!p.row_scaled && p.column.wanted && p.column.hadamard)
    piece_amaxes(kernels, executor, call, parts);
}

// ---- What belongs to no group ----------------------------------------------------------------

// Blocks first to the last of stored rows [begin, end), counted through all batch entries.
void clear_blocks(const StoredForm& form, int64_t begin, int64_t end, int64_t first) {
  const size_t blocks = static_cast<size_t>(form.blocks - first);
  for (int64_t row = begin; row < end && blocks != 0; ++row) {
    const int64_t at = row * form.blocks + first;
    std::memset(form.codes + at * kBlockCodeBytes, 0, blocks * kBlockCodeBytes);
    std::memset(form.block_scale + at, 0, blocks);
  }
}

// Clears what follows the last group of each batch entry: rows of the row-wise form, and in every
// stored row of the column-wise form the blocks that no group has.
void clear_rest(Executor& executor, const QuantizeCall& call, const Parts& parts, bool row_wise) {
  const StoredForm& form = row_wise ? call.entry.row : call.entry.column;
  if (!form.wanted) return;
  // As many stored rows as make an item worth taking.
  const int64_t height = kFlatElements / (form.blocks * kBlock + 1) + 1;
  const int64_t items = ceil_div(form.rows, height);
  executor.run(call.batch * items, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t entry = item / items, row = item % items * height;
      const int64_t first = row_wise ? std::max(row, parts.end_row(entry)) : row;
      const int64_t last = std::min(row + height, form.rows), base = entry * form.rows;
      clear_blocks(form, base + first, base + last, row_wise ? 0 : parts.end_block(entry));
    }
  });
}

}  // namespace

bool quantize_in_block_order(const QuantizeProblem& p) {
  return p.row.wanted && !p.column.wanted && p.tile == 1;
}

int64_t amax_count(const QuantizeCall& call, bool row_wise) {
  const int64_t parts = call.batch * call.groups;
  if (!call.entry.row_scaled) return parts;
  return row_wise ? call.batch * call.entry.m : parts * call.entry.k;
}

void quantize(const Kernels& kernels, Executor& executor, const QuantizeCall& call) {
  Parts parts(call);
  const QuantizeProblem& entry = call.entry;
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
    if (call.grouped) clear_rest(executor, call, parts, row_wise);
  }
  const auto count = [&entry](int64_t m) {
    return quantize_in_block_order(entry) ? ceil_div(m * entry.row.blocks, kItemBlocks)
                                          : pieces(entry, m);
  };
  parts.run(executor, count, [&](const QuantizeProblem& p, int64_t begin, int64_t end) {
    kernels.quantize(p, begin, end);
  });
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
