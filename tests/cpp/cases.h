// Random quantization calls, and their results on the CPU kernels: what the tests of the CPU
// kernels and of the device kernels draw from.
#ifndef JAX_FP4_TESTS_CPP_CASES_H_
#define JAX_FP4_TESTS_CPP_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../../xla_ffi/cpu/dispatch.h"
#include "../../xla_ffi/cpu/quantize.h"
#include "../../xla_ffi/kernels/nvfp4.h"

namespace jax_fp4 {

inline std::mt19937_64 random_engine;

inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_engine);
}

inline bool chance(double p) { return std::bernoulli_distribution(p)(random_engine); }

inline void check(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

inline float from_bits(uint32_t bits) { return Lanes<float>::from_bits(bits); }
inline uint32_t to_bits(float value) { return Lanes<float>::bits(value); }

// ---- Pools -----------------------------------------------------------------------------------

// Starts a thread for every task, or keeps the tasks until the work is long over.
struct TestPool {
  int64_t threads;
  bool late;
  std::vector<std::thread> running;
  std::vector<std::function<void()>> kept;

  TestPool(int64_t threads, bool late) : threads(threads), late(late) {}
  ~TestPool() {
    for (auto& task : kept) task();
    for (auto& thread : running) thread.join();
  }
  int64_t num_threads() const { return threads; }
  template <class Task>
  void Schedule(Task task) {
    if (late)
      kept.push_back(task);
    else
      running.emplace_back(task);
  }
};

// ---- Cases -----------------------------------------------------------------------------------

using Bytes = std::vector<uint8_t>;

struct Case {
  QuantizeCall call = {};
  Bytes x;
  std::vector<uint32_t> seed;
  std::vector<int32_t> group_sizes;
  bool given = false;
  std::vector<float> row_amax, column_amax;
};

struct Form {
  Bytes codes, block_scale;
  std::vector<float> amax;
};

struct Result {
  Form row, column;
};

inline bool same(const Form& a, const Form& b) {
  return a.codes == b.codes && a.block_scale == b.block_scale && a.amax.size() == b.amax.size() &&
         (a.amax.empty() || std::memcmp(a.amax.data(), b.amax.data(), 4 * a.amax.size()) == 0);
}

inline Form poisoned(const QuantizeCall& call, bool row_wise, int poison) {
  Form form;
  const StoredForm& stored = row_wise ? call.entry.row : call.entry.column;
  const auto blocks = static_cast<size_t>(call.batch * stored.rows * stored.blocks);
  form.codes.assign(blocks * kBlockCodeBytes, static_cast<uint8_t>(poison));
  form.block_scale.assign(blocks, static_cast<uint8_t>(poison));
  form.amax.resize(static_cast<size_t>(amax_count(call, row_wise)));
  if (!form.amax.empty()) std::memset(form.amax.data(), poison, 4 * form.amax.size());
  return form;
}

inline void attach(QuantizeProblem& p, Result& r) {
  for (const bool row_wise : {true, false}) {
    StoredForm& form = row_wise ? p.row : p.column;
    Form& buffers = row_wise ? r.row : r.column;
    form.codes = buffers.codes.data();
    form.block_scale = buffers.block_scale.data();
    form.amax = buffers.amax.data();
  }
}

inline Result run(const Case& c, const Kernels& kernels, int poison, int64_t threads, bool late) {
  QuantizeCall call = c.call;
  Result r = {poisoned(call, true, poison), poisoned(call, false, poison)};
  attach(call.entry, r);
  call.entry.x = c.x.data();
  call.seed = c.seed.empty() ? nullptr : c.seed.data();
  call.group_sizes = c.group_sizes.data();
  call.given_row_amax = c.given ? c.row_amax.data() : nullptr;
  call.given_column_amax = c.given ? c.column_amax.data() : nullptr;
  TestPool pool(threads, late);
  PoolExecutor<TestPool> executor(pool);
  quantize(kernels, executor, call);
  if (!call.entry.row.wanted) r.row = {};
  if (!call.entry.column.wanted) r.column = {};
  return r;
}

inline float random_value(int kind) {
  const float v = std::normal_distribution<float>()(random_engine);
  switch (kind) {
    case 0:
      return v;
    case 1:
      return std::ldexp(v, static_cast<int>(draw(-20, 20)));
    case 2:
      return v * 1e-41f;
    case 3:
      return v * 1e38f;
    case 4:
      return from_bits(static_cast<uint32_t>(random_engine()));
    case 5:
      return static_cast<float>(draw(-24, 24)) / 4;
    default:
      return chance(0.02) ? (chance(0.5) ? NAN : -INFINITY) : chance(0.5) ? 0.0f : v;
  }
}

inline int64_t random_extent() {
  const int64_t borders[] = {0, 1, 15, 16, 17, 31, 32, 48, 127, 128, 129, 255, 256, 257, 272};
  return chance(0.5) ? borders[draw(0, 14)] : draw(1, 90);
}

inline std::vector<float> random_amaxes(int64_t count) {
  std::vector<float> amaxes(static_cast<size_t>(count));
  for (float& a : amaxes)
    a = chance(0.1) ? (chance(0.5) ? 0.0f : INFINITY)
                    : std::fabs(random_value(static_cast<int>(draw(0, 3))));
  return amaxes;
}

inline size_t width_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// The words of dtype `dtype`: float32 cut short, which reaches every word.
inline Bytes random_words(int64_t count, DType dtype) {
  const int kind = static_cast<int>(draw(0, 6));
  const size_t width = width_of(dtype);
  Bytes words(static_cast<size_t>(count) * width);
  for (size_t i = 0; i < words.size(); i += width) {
    const uint32_t bits = to_bits(random_value(kind)) >> (width == 4 ? 0 : 16);
    std::memcpy(&words[i], &bits, width);
  }
  return words;
}

// Sizes that fit, sizes that do not, and sizes that no program should send.
inline std::vector<int32_t> random_sizes(int64_t m, int64_t groups) {
  const int64_t wild[] = {0, 1, 15, 16, 17, -1, m, m + 1, INT32_MIN, INT32_MAX};
  const int64_t kind = draw(0, 5), chosen = draw(0, std::max<int64_t>(groups - 1, 0));
  std::vector<int32_t> sizes(static_cast<size_t>(groups));
  for (int64_t i = 0; i < groups; ++i) {
    int64_t size = 0;
    if (kind == 0) size = draw(0, 2 * m / groups + 1);  // sums on both sides of m
    if (kind == 1) size = draw(0, 1);
    if (kind == 2) size = i == chosen ? m : 0;
    if (kind == 3) size = draw(0, m / (2 * groups));  // a long tail
    if (kind == 4) size = wild[draw(0, 9)];
    if (kind == 5) size = 16 * draw(0, m / (8 * groups));
    sizes[static_cast<size_t>(i)] = static_cast<int32_t>(size);
  }
  return sizes;
}

inline void draw_groups(Case& c) {
  QuantizeCall& call = c.call;
  call.grouped = call.entry.tile == 1 && chance(0.5);
  call.groups = call.grouped ? (chance(0.1) ? 40 : draw(0, 7)) : 1;
  for (int64_t i = 0; call.grouped && i < call.batch; ++i) {
    const std::vector<int32_t> sizes = random_sizes(call.entry.m, call.groups);
    c.group_sizes.insert(c.group_sizes.end(), sizes.begin(), sizes.end());
  }
}

// Key words, then m origin or number of the first group, then k origin; then, of split groups,
// where x begins in each (rows are counted in 32 bits) and the rows that each has.
inline uint32_t random_seed_word(const QuantizeCall& call, int64_t place) {
  if (place < 2) return static_cast<uint32_t>(random_engine());
  if (place == 2 && call.grouped) return static_cast<uint32_t>(draw(-3, 1000));
  if (place >= kSeedWords && chance(0.5))
    return static_cast<uint32_t>(chance(0.5) ? draw(0, 100) : draw(0, UINT32_MAX - 10000));
  return static_cast<uint32_t>(16 * draw(0, 1000));
}
inline std::vector<uint32_t> random_seed(const QuantizeCall& call) {
  std::vector<uint32_t> seed;
  for (int64_t entry = 0; entry < call.batch; ++entry)
    for (int64_t place = 0; place < seed_words(call.split_groups, call.groups); ++place)
      seed.push_back(random_seed_word(call, place));
  return seed;
}

// `smooth`: the extents and dtypes that device kernels have a fast path for.
inline Case random_case(bool smooth = false) {
  Case c;
  QuantizeCall& call = c.call;
  QuantizeProblem& p = call.entry;
  call.batch = chance(0.3) ? draw(0, 3) : 1;
  p.m = smooth && chance(0.5) ? 16 * draw(1, 40) : random_extent();
  p.k = smooth ? 32 * draw(1, 24) : random_extent();
  p.x_dtype = static_cast<DType>(smooth ? draw(0, 1) : draw(0, 2));
  p.compute = smooth ? DType::kBF16 : static_cast<DType>(draw(0, 2));
  p.tile = chance(0.2) ? kBlock : 1;
  p.row_scaled = p.tile == 1 && chance(0.3);
  const auto norm = static_cast<ErrorNorm>(chance(0.5) ? 0 : draw(1, 2));
  const bool plain = norm == ErrorNorm::kNone && !p.row_scaled;
  p.m_total = p.m + draw(0, 1) * 1000;
  p.k_total = p.k + draw(0, 1) * 1000;
  draw_groups(c);
  if (plain && chance(0.4)) {
    call.split_groups = call.grouped && chance(0.5);
    c.seed = random_seed(call);
  }
  const int wanted = static_cast<int>(draw(1, 3)), bound = chance(0.5) ? 256 : 448;
  p.row = {(wanted & 1) != 0, p.m,    ceil_div(p.k, kBlock), false, norm, bound, nullptr,
           nullptr,           nullptr};
  p.column = {(wanted & 2) != 0,
              p.k,
              call.grouped ? grouped_blocks(p.m, call.groups) : ceil_div(p.m, kBlock),
              plain && chance(0.4),
              p.row_scaled ? ErrorNorm::kNone : norm,
              p.row_scaled ? 448 : bound,
              nullptr,
              nullptr,
              nullptr};
  c.x = random_words(call.batch * p.m * p.k, p.x_dtype);
  c.given = chance(0.4) && call.batch > 0 && call.groups > 0;
  c.row_amax = random_amaxes(amax_count(call, true));
  c.column_amax = random_amaxes(amax_count(call, false));
  return c;
}

}  // namespace jax_fp4

#endif  // JAX_FP4_TESTS_CPP_CASES_H_
