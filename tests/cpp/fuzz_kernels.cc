// Fuzz and property test of the CPU kernels: no XLA, no Python. tests/test_kernels_cpp.py builds it
// under sanitizers, with the kernels of every instruction set: fuzz_kernels [cases] [seed].
//
// Every buffer lies on the heap with its exact size, so the sanitizer sees any step outside. Each
// case runs with outputs poisoned with 0x7F and with 0x00 (all bytes are written), on every
// compiled instruction set, with one thread and with several, and under FTZ and DAZ: the bits must
// be equal.
#include <cmath>
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

namespace {

using namespace jax_fp4;  // the test of a namespace, in one file

std::mt19937_64 random_engine;

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_engine);
}

bool chance(double p) { return std::bernoulli_distribution(p)(random_engine); }

void check(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

float from_bits(uint32_t bits) { return Lanes<float>::from_bits(bits); }
uint32_t to_bits(float value) { return Lanes<float>::bits(value); }

// ---- The codec against the definition --------------------------------------------------------

constexpr float kValues[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};

uint32_t nearest_by_definition(float v) {
  const float ends[7] = {.25f, .75f, 1.25f, 1.75f,
                         2.5f, 3.5f, 5};  // odd ones belong to the code above
  const float a = std::fabs(v);
  uint32_t code = 0;
  for (int i = 0; i < 7; ++i) code += i % 2 == 0 ? a > ends[i] : a >= ends[i];
  return code | (std::signbit(v) ? 8u : 0u);
}

uint32_t stochastic_by_definition(float v, int byte) {
  const float a = std::fmin(std::fabs(v), 6.0f), step = a < 2 ? .5f : a < 4 ? 1.0f : 2.0f;
  const float t = std::fma(static_cast<float>(byte) / 256.0f, step, a);
  const float value = std::fmin(std::floor(t / step) * step, 6.0f);
  for (uint32_t code = 0; code < 8; ++code)
    if (kValues[code] == value) return code | (std::signbit(v) ? 8u : 0u);
  return 16;
}

void test_codec() {
  for (uint32_t i = 0; i < 1u << 24; ++i) {
    const uint32_t bits = i << 8 | static_cast<uint32_t>(draw(0, 255));
    if ((bits & kMagnitude) > kInfBits) continue;
    check(e2m1_nearest(from_bits(bits)) == nearest_by_definition(from_bits(bits)), "e2m1_nearest");
  }
  for (int end = 1; end <= 24; ++end)  // multiples of a quarter and their neighbours
    for (int step = -1; step <= 1; ++step) {
      const float v = from_bits(to_bits(static_cast<float>(end) / 4) + static_cast<uint32_t>(step));
      check(e2m1_nearest(v) == nearest_by_definition(v), "e2m1_nearest at a tie");
      check(e2m1_nearest(-v) == nearest_by_definition(-v), "e2m1_nearest at a negative tie");
      for (int byte = 0; byte < 256; ++byte)
        check(
            e2m1_stochastic(-v, static_cast<uint32_t>(byte)) == stochastic_by_definition(-v, byte),
            "e2m1_stochastic");
    }
  for (int i = 0; i < 1 << 20; ++i) {
    const float v = from_bits(static_cast<uint32_t>(draw(0, 0x40C80000)));
    const int byte = static_cast<int>(draw(0, 255));
    check(e2m1_stochastic(v, static_cast<uint32_t>(byte)) == stochastic_by_definition(v, byte),
          "e2m1_stochastic");
  }
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = e2m1_decode<float>(code);
    check(value == (code < 8 ? 1.0f : -1.0f) * kValues[code % 8], "e2m1_decode");
    check(e2m1_nearest(value) == code, "e2m1 grid");
  }
  for (uint32_t code = 0; code < 0x7E; ++code) {  // each code, and the middle to the next one
    const float low = e4m3_decode<float>(code), high = e4m3_decode<float>(code + 1);
    const float middle = low + (high - low) / 2;
    check(low == std::ldexp(code < 8 ? static_cast<float>(code) : static_cast<float>(code % 8 + 8),
                            code < 8 ? -9 : static_cast<int>(code / 8) - 10),
          "e4m3_decode");
    check(e4m3_encode(low) == code, "e4m3 grid");
    check(e4m3_encode(middle) == code + code % 2, "e4m3 tie");
    check(e4m3_encode(std::nextafter(middle, 0.0f)) == code, "e4m3 below the tie");
    check(e4m3_encode(std::nextafter(middle, 1e9f)) == code + 1, "e4m3 above the tie");
  }
  uint32_t counter[4] = {};
  philox<float>(counter, 0, 0);
  check(counter[0] == 0x6627E8D5u && counter[1] == 0xE169C58Du && counter[2] == 0xBC57AC4Cu &&
            counter[3] == 0x9B00DBD8u,
        "philox known answer");
}

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
  QuantizeProblem problem = {};
  Bytes x;
  std::vector<uint32_t> seed;
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

bool same(const Form& a, const Form& b) {
  return a.codes == b.codes && a.block_scale == b.block_scale && a.amax.size() == b.amax.size() &&
         (a.amax.empty() || std::memcmp(a.amax.data(), b.amax.data(), 4 * a.amax.size()) == 0);
}

Form poisoned(const QuantizeProblem& p, const StoredForm& stored, int poison) {
  Form form;
  const auto blocks = static_cast<size_t>(p.batch * stored.rows * stored.blocks);
  form.codes.assign(blocks * kBlockCodeBytes, static_cast<uint8_t>(poison));
  form.block_scale.assign(blocks, static_cast<uint8_t>(poison));
  form.amax.resize(static_cast<size_t>(amax_count(p, stored)));
  if (!form.amax.empty()) std::memset(form.amax.data(), poison, 4 * form.amax.size());
  return form;
}

Result run(const Case& c, const Kernels& kernels, int poison, int64_t threads, bool late) {
  QuantizeProblem p = c.problem;
  Result r = {poisoned(p, p.row, poison), poisoned(p, p.column, poison)};
  const auto attach = [](StoredForm& form, Form& buffers) {
    form.codes = buffers.codes.data();
    form.block_scale = buffers.block_scale.data();
    form.amax = buffers.amax.data();
  };
  attach(p.row, r.row);
  attach(p.column, r.column);
  TestPool pool(threads, late);
  PoolExecutor<TestPool> executor(pool);
  GivenAmax given = {};
  if (c.given) given = {c.row_amax.data(), c.column_amax.data()};
  quantize(kernels, executor, p, given);
  if (!p.row.wanted) r.row = {};
  if (!p.column.wanted) r.column = {};
  return r;
}

float random_value(int kind) {
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

int64_t random_extent() {
  const int64_t borders[] = {0, 1, 15, 16, 17, 31, 32, 48, 127, 128, 129, 255, 256, 257, 272};
  return chance(0.5) ? borders[draw(0, 14)] : draw(1, 90);
}

std::vector<float> random_amaxes(int64_t count) {
  std::vector<float> amaxes(static_cast<size_t>(count));
  for (float& a : amaxes)
    a = chance(0.1) ? (chance(0.5) ? 0.0f : INFINITY)
                    : std::fabs(random_value(static_cast<int>(draw(0, 3))));
  return amaxes;
}

// The words of dtype `dtype`: float32 cut short, which reaches every word.
Bytes random_words(int64_t count, DType dtype) {
  const int kind = static_cast<int>(draw(0, 6));
  const size_t width = dtype == DType::kF32 ? 4 : 2;
  Bytes words(static_cast<size_t>(count) * width);
  for (size_t i = 0; i < words.size(); i += width) {
    const uint32_t bits = to_bits(random_value(kind)) >> (width == 4 ? 0 : 16);
    std::memcpy(&words[i], &bits, width);
  }
  return words;
}

Case random_case() {
  Case c;
  QuantizeProblem& p = c.problem;
  p.batch = chance(0.3) ? draw(0, 3) : 1;
  p.m = random_extent();
  p.k = random_extent();
  p.x_dtype = static_cast<DType>(draw(0, 2));
  p.compute = static_cast<DType>(draw(0, 2));
  p.tile = chance(0.3) ? kBlock : 1;
  p.row_scaled = p.tile == 1 && chance(0.3);
  const auto norm = static_cast<ErrorNorm>(chance(0.5) ? 0 : draw(1, 2));
  const bool plain = norm == ErrorNorm::kNone && !p.row_scaled;
  p.m_total = p.m + draw(0, 1) * 1000;
  p.k_total = p.k + draw(0, 1) * 1000;
  if (plain && chance(0.4))
    for (int64_t i = 0; i < 4 * p.batch; ++i)
      c.seed.push_back(static_cast<uint32_t>(i % 4 < 2 ? random_engine() : 16 * draw(0, 1000)));
  p.seed = c.seed.empty() ? nullptr : c.seed.data();
  const int wanted = static_cast<int>(draw(1, 3)), bound = chance(0.5) ? 256 : 448;
  p.row = {(wanted & 1) != 0, p.m,    ceil_div(p.k, kBlock), false, norm, bound, nullptr,
           nullptr,           nullptr};
  p.column = {(wanted & 2) != 0,
              p.k,
              ceil_div(p.m, kBlock),
              plain && chance(0.4),
              p.row_scaled ? ErrorNorm::kNone : norm,
              p.row_scaled ? 448 : bound,
              nullptr,
              nullptr,
              nullptr};
  c.x = random_words(p.batch * p.m * p.k, p.x_dtype);
  p.x = c.x.data();
  c.given = chance(0.4) && p.batch > 0;
  c.row_amax = random_amaxes(amax_count(p, p.row));
  c.column_amax = random_amaxes(amax_count(p, p.column));
  return c;
}

// "Quantize column-wise" equals "transpose, then quantize row-wise".
void test_transpose(const Case& c, const Form& column) {
  const QuantizeProblem& p = c.problem;
  if (!p.column.wanted || p.column.hadamard || p.seed != nullptr ||
      (p.tile != 1 && p.row.four_over_six != ErrorNorm::kNone))
    return;
  Case turned = c;
  const size_t width = p.x_dtype == DType::kF32 ? 4 : 2;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t j = 0; j < p.k; ++j)
        std::memcpy(&turned.x[static_cast<size_t>((b * p.k + j) * p.m + i) * width],
                    &c.x[static_cast<size_t>((b * p.m + i) * p.k + j) * width], width);
  turned.problem.x = turned.x.data();
  std::swap(turned.problem.m, turned.problem.k);
  turned.problem.row = p.column;
  turned.problem.column.wanted = false;
  turned.row_amax = c.column_amax;
  check(same(run(turned, kernels(), 0x7F, 1, false).row, column),
        "column-wise = rows of transpose");
}

void test_dequantize(Form form, const QuantizeProblem& p, int64_t rows, int64_t extent) {
  if (chance(0.5))  // any byte may come as a scale
    for (uint8_t& byte : form.block_scale) byte = static_cast<uint8_t>(draw(0, 255));
  DequantizeProblem d = {};
  d.codes = form.codes.data();
  d.block_scale = form.block_scale.data();
  d.amax = chance(0.3) ? nullptr : form.amax.data();
  d.row_scaled = p.row_scaled;
  d.bound = chance(0.5) ? 256 : 448;
  d.batch = p.batch;
  d.rows = rows;
  d.blocks = ceil_div(extent, kBlock);
  d.extent = chance(0.5) ? extent : d.blocks * kBlock;
  d.out_dtype = static_cast<DType>(draw(0, 2));
  const size_t width = d.out_dtype == DType::kF32 ? 4 : 2;
  Bytes first;
  for (int i = 0; i < kernel_tables(); ++i)
    for (int poison : {0x7F, 0x00}) {
      if (kernel_table(i) == nullptr) continue;
      Bytes out(static_cast<size_t>(d.batch * d.rows * d.extent) * width,
                static_cast<uint8_t>(poison));
      d.out = out.data();
      TestPool pool(2, false);
      PoolExecutor<TestPool> executor(pool);
      dequantize(*kernel_table(i), executor, d);
      if (i == 0 && poison == 0x7F) first = out;
      check(out == first, "dequantize: poison or instruction set changes bits");
    }
}

void test_case(const Case& c) {
  const Kernels& baseline = *kernel_table(0);
  const Result first = run(c, baseline, 0x7F, 1, false);
  const auto equal = [&](const Result& r, const char* what) {
    check(same(r.row, first.row) && same(r.column, first.column), what);
  };
  equal(run(c, baseline, 0x00, 1, false), "quantize: a byte is not written");
  equal(run(c, baseline, 0x00, 3, false), "quantize: threads change bits");
  equal(run(c, baseline, 0x00, 3, true), "quantize: late tasks change bits");
  for (int i = 1; i < kernel_tables(); ++i)
    if (const Kernels* table = kernel_table(i))
      equal(run(c, *table, 0x7F, 2, false), "quantize: instruction set changes bits");
#if defined(__x86_64__)
  const unsigned int mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // FTZ, DAZ
  const Result flushed = run(c, kernels(), 0x7F, 1, false);
  check(_mm_getcsr() == (mode | 0x8040), "quantize: MXCSR is not restored");
  _mm_setcsr(mode);
  equal(flushed, "quantize: denormals are flushed");
#endif
  const QuantizeProblem& p = c.problem;
  test_transpose(c, first.column);
  if (p.row.wanted) test_dequantize(first.row, p, p.m, p.k);
  if (p.column.wanted) test_dequantize(first.column, p, p.k, p.m);
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400;
  random_engine.seed(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  test_codec();
  int sets = 0;
  for (int i = 0; i < kernel_tables(); ++i) sets += kernel_table(i) != nullptr;
  for (int i = 0; i < cases; ++i) test_case(random_case());
  std::printf("fuzz_kernels: %d cases on %d instruction sets are equal bit for bit\n", cases, sets);
  return 0;
}
