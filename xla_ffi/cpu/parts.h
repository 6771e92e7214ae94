// The matrices of one call: the batch entries of x [batch, m, k], or the groups of rows of each.
#ifndef JAX_FP4_XLA_FFI_CPU_PARTS_H_
#define JAX_FP4_XLA_FFI_CPU_PARTS_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "../kernels/nvfp4.h"
#include "parallel.h"

namespace jax_fp4 {

struct Part {
  int64_t number;  // of all parts
  int64_t entry;   // of the batch
  int64_t row, rows;
  int64_t block;  // where it begins in the stored rows of the column-wise form
};

// group_sizes [batch, groups] are data, and any are legal: a negative one counts as 0, and groups
// end at row m. Column-wise each begins at a block of its own.
class Parts {
 public:
  // May throw std::bad_alloc, with groups only.
  Parts(int64_t batch, int64_t m, bool grouped, int64_t groups, const int32_t* group_sizes,
        int64_t block)
      : batch_(batch), m_(m), block_(block), grouped_(grouped), groups_(grouped ? groups : 1) {
    if (!grouped_) return;
    parts_.resize(static_cast<size_t>(batch * groups));
    for (int64_t i = 0; i < batch * groups; ++i) {
      const bool first = i % groups == 0;
      const int64_t row = first ? 0 : end_row(part(i - 1));
      const int64_t size = std::max<int64_t>(group_sizes[i], 0);
      const int64_t begin = first ? 0 : end_block(part(i - 1));
      Numbered& added = parts_[static_cast<size_t>(i)];
      static_cast<Part&>(added) = {i, i / groups, row, std::min(size, m - row), begin};
    }
  }

  int64_t batch() const { return batch_; }
  int64_t count() const { return batch_ * groups_; }

  // Runs work(part, begin, end) over the items of all parts, of which m rows have items(m). They
  // are numbered one part after the other, so that small parts share a thread and large ones spread
  // over several.
  template <class Items, class Work>
  void run(Executor& executor, const Items& items, const Work& work) {
    const int64_t each = grouped_ ? 0 : items(m_);
    int64_t total = batch_ * each;
    for (Numbered& part : parts_) {
      part.before = total;
      total += items(part.rows);
    }
    executor.run(total, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t i = grouped_ ? holder(begin) : begin / each;
        const int64_t first = grouped_ ? part(i).before : i * each;
        const Part one = grouped_ ? Part(part(i)) : Part{i, i, 0, m_, 0};
        const int64_t stop = std::min(end, first + items(one.rows));
        work(one, begin - first, stop - first);
        begin = stop;
      }
    });
  }

  // Where the last group of a batch entry ends: a row of x, and a block of the column-wise form.
  int64_t end_row(int64_t entry) const {
    return groups_ == 0 ? 0 : end_row(part((entry + 1) * groups_ - 1));
  }
  int64_t end_block(int64_t entry) const {
    return groups_ == 0 ? 0 : end_block(part((entry + 1) * groups_ - 1));
  }

 private:
  struct Numbered : Part {
    int64_t before;  // items of the parts before it, in the pass under way
  };

  static int64_t end_row(const Part& part) { return part.row + part.rows; }
  int64_t end_block(const Part& part) const { return part.block + ceil_div(part.rows, block_); }

  const Numbered& part(int64_t i) const { return parts_[static_cast<size_t>(i)]; }

  // The part that has the item: an empty one begins where the next begins, so it is never found.
  int64_t holder(int64_t item) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), item,
                         [](int64_t number, const Numbered& part) { return number < part.before; });
    return after - parts_.begin() - 1;
  }

  const int64_t batch_, m_, block_;
  const bool grouped_;
  const int64_t groups_;
  std::vector<Numbered> parts_;  // [batch, groups]; none without groups
};

inline int64_t bytes_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

inline const void* element(const void* x, DType dtype, int64_t index) {
  return static_cast<const uint8_t*>(x) + index * bytes_of(dtype);
}

// Codes or scales of one stored form: [batch, rows, blocks], so many bytes a block.
struct Plane {
  void* data;
  int64_t rows, blocks, bytes;
};

// Clears what belongs to no group: rows of the row-wise form after the last group of each batch
// entry, or in every stored row of the column-wise form the blocks that no group has.
inline void clear_rest(Executor& executor, const Parts& parts, const Plane& plane, bool row_wise) {
  constexpr int64_t kItemBytes = 1 << 15;  // as many stored rows as make an item worth taking
  const int64_t stride = plane.blocks * plane.bytes;
  const int64_t height = kItemBytes / (stride + 1) + 1;
  const int64_t items = ceil_div(plane.rows, height);
  executor.run(parts.batch() * items, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t entry = item / items, row = item % items * height;
      const int64_t first = row_wise ? std::max(row, parts.end_row(entry)) : row;
      const int64_t last = std::min(row + height, plane.rows);
      const int64_t skipped = row_wise ? 0 : parts.end_block(entry) * plane.bytes;
      uint8_t* data = static_cast<uint8_t*>(plane.data) + entry * plane.rows * stride;
      for (int64_t i = first; i < last && skipped != stride; ++i)
        std::memset(data + i * stride + skipped, 0, static_cast<size_t>(stride - skipped));
    }
  });
}

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_PARTS_H_
