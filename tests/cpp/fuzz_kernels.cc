// Fuzz and property test of the CPU kernels: no XLA, no Python. tests/test_kernels_cpp.py builds it
// under sanitizers, with the kernels of every instruction set: fuzz_kernels [cases] [seed].
//
// Every buffer lies on the heap with its exact size, so the sanitizer sees any step outside. Each
// case runs with outputs poisoned with 0x7F and with 0x00 (all bytes are written), on every
// compiled instruction set, with one thread and with several, and under FTZ and DAZ: the bits must
// be equal. In a call with groups each of them equals that group quantized alone.
#include "cases.h"

namespace {

using namespace jax_fp4;  // the test of a namespace, in one file

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

// The division by 6 B of tile_four.cuh, which is a product and one correction: of every
// significand, at the ends of what is calm there and between them.
void test_quotient() {
  for (const float bound : {256.0f, 448.0f}) {
    const float six_bound = 6 * bound, inverse = 1 / six_bound;
    for (const uint32_t first : {to_bits(0x1p-100f), to_bits(1.0f), to_bits(0x1p112f)})
      for (uint32_t bits = first; bits < first + (1u << 23); ++bits) {
        const float wide = from_bits(bits), guess = wide * inverse;
        const float quotient = std::fma(std::fma(-guess, six_bound, wide), inverse, guess);
        check(quotient == wide / six_bound, "the quotient of four-over-six");
      }
  }
}

// "Quantize column-wise" equals "transpose, then quantize row-wise".
void test_transpose(const Case& c, const Form& column) {
  const QuantizeProblem& p = c.call.entry;
  if (!p.column.wanted || p.column.hadamard || !c.seed.empty() || c.call.grouped ||
      (p.tile != 1 && p.row.four_over_six != ErrorNorm::kNone))
    return;
  Case turned = c;
  const size_t width = width_of(p.x_dtype);
  for (int64_t b = 0; b < c.call.batch; ++b)
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t j = 0; j < p.k; ++j)
        std::memcpy(&turned.x[static_cast<size_t>((b * p.k + j) * p.m + i) * width],
                    &c.x[static_cast<size_t>((b * p.m + i) * p.k + j) * width], width);
  std::swap(turned.call.entry.m, turned.call.entry.k);
  turned.call.entry.row = p.column;
  turned.call.entry.column.wanted = false;
  turned.row_amax = c.column_amax;
  check(same(run(turned, kernels(), 0x7F, 1, false).row, column),
        "column-wise = rows of transpose");
}

// ---- Groups ----------------------------------------------------------------------------------

// The rows of group `number` of batch entry `entry`, by definition; group `groups` is the rest.
struct Rows {
  int64_t begin, count, block;
};

Rows rows_of(const Case& c, int64_t entry, int64_t number) {
  int64_t total = 0, begin = 0, block = 0;
  for (int64_t i = 0; i < number; ++i) {
    total += std::max(c.group_sizes[static_cast<size_t>(entry * c.call.groups + i)], 0);
    const int64_t end = std::min(total, c.call.entry.m);
    block += ceil_div(end - begin, kBlock);
    begin = end;
  }
  if (number == c.call.groups) return {begin, c.call.entry.m - begin, block};
  total += std::max(c.group_sizes[static_cast<size_t>(entry * c.call.groups + number)], 0);
  return {begin, std::min(total, c.call.entry.m) - begin, block};
}

template <class T>
std::vector<T> slice(const std::vector<T>& from, int64_t begin, int64_t count) {
  return std::vector<T>(from.begin() + begin, from.begin() + begin + count);
}

// Blocks of consecutive stored rows, `rows` of them from `row` on.
Form cut(const Form& from, int64_t stride, int64_t row, int64_t rows, int64_t block,
         int64_t blocks) {
  Form form;
  for (int64_t i = row; i < row + rows; ++i) {
    const int64_t at = i * stride + block;
    const Bytes codes = slice(from.codes, at * kBlockCodeBytes, blocks * kBlockCodeBytes);
    const Bytes block_scale = slice(from.block_scale, at, blocks);
    form.codes.insert(form.codes.end(), codes.begin(), codes.end());
    form.block_scale.insert(form.block_scale.end(), block_scale.begin(), block_scale.end());
  }
  return form;
}

// What the call made of one group, in the shapes that the group alone would have.
Result cut_group(const Case& c, const Result& r, int64_t entry, int64_t number) {
  const QuantizeProblem& p = c.call.entry;
  const Rows rows = rows_of(c, entry, number);
  const int64_t part = entry * c.call.groups + number, row = entry * p.m + rows.begin;
  Result own;
  if (p.row.wanted) {
    own.row = cut(r.row, p.row.blocks, row, rows.count, 0, p.row.blocks);
    own.row.amax = p.row_scaled ? slice(r.row.amax, row, rows.count) : slice(r.row.amax, part, 1);
  }
  if (p.column.wanted) {
    own.column =
        cut(r.column, p.column.blocks, entry * p.k, p.k, rows.block, ceil_div(rows.count, kBlock));
    own.column.amax =
        p.row_scaled ? slice(r.column.amax, part * p.k, p.k) : slice(r.column.amax, part, 1);
  }
  return own;
}

// The group as a call of its own, without groups.
Case group_alone(const Case& c, int64_t entry, int64_t number) {
  Case alone = c;
  QuantizeProblem& p = alone.call.entry;
  const Rows rows = rows_of(c, entry, number);
  const int64_t part = entry * c.call.groups + number, row = entry * p.m + rows.begin;
  const int64_t width = static_cast<int64_t>(width_of(p.x_dtype)) * p.k;
  alone.x = slice(c.x, row * width, rows.count * width);
  alone.group_sizes.clear();
  alone.row_amax = p.row_scaled ? slice(c.row_amax, row, rows.count) : slice(c.row_amax, part, 1);
  alone.column_amax =
      p.row_scaled ? slice(c.column_amax, part * p.k, p.k) : slice(c.column_amax, part, 1);
  alone.seed.clear();
  alone.call.batch = alone.call.groups = 1;
  alone.call.grouped = alone.call.split_groups = false;
  p.m = p.m_total = p.row.rows = rows.count;
  p.column.blocks = ceil_div(rows.count, kBlock);
  return alone;
}

// The result of that call. Its codes are stochastic if `c` has a seed, which is spelled out here
// because a call without groups has no expert: the kernel makes them under the amaxes of the call.
Result run_alone(const Case& c, int64_t entry, int64_t number) {
  const Case alone = group_alone(c, entry, number);
  Result r = run(alone, kernels(), 0x7F, 1, false);
  if (c.seed.empty()) return r;
  QuantizeProblem p = alone.call.entry;
  const int64_t groups = c.call.groups, words = seed_words(c.call.split_groups, groups);
  const uint32_t* seed = &c.seed[static_cast<size_t>(words * entry)];
  p.x = alone.x.data();
  p.key = seed;
  p.expert = seed[2] + static_cast<uint32_t>(number);
  p.k_origin = seed[3];
  if (c.call.split_groups) p.m_origin = seed[4 + number], p.m_total = seed[4 + groups + number];
  attach(p, r);
  const int64_t items = quantize_in_block_order(p)
                            ? ceil_div(p.m * p.row.blocks, kItemBlocks)
                            : ceil_div(p.m, kItemRows) * ceil_div(p.k, kItemColumns);
  kernels().quantize(p, 0, items);
  return r;
}

void check_zero(const Form& form, const char* what) {
  for (const uint8_t byte : form.codes) check(byte == 0, what);
  for (const uint8_t byte : form.block_scale) check(byte == 0, what);
}

// What belongs to no group: zero, and the amaxes of its rows 0 or as they were given.
void test_rest(const Case& c, const Result& r, int64_t entry) {
  const QuantizeProblem& p = c.call.entry;
  const Rows rest = rows_of(c, entry, c.call.groups);
  const int64_t row = entry * p.m + rest.begin;
  if (p.row.wanted) {
    check_zero(cut(r.row, p.row.blocks, row, rest.count, 0, p.row.blocks), "rows of no group");
    for (int64_t i = row; p.row_scaled && i < row + rest.count; ++i) {
      const float stored = r.row.amax[static_cast<size_t>(i)];
      const float given = c.row_amax[static_cast<size_t>(i)];
      check(to_bits(stored) == (c.given ? to_bits(given) : 0), "amaxes of rows of no group");
    }
  }
  if (p.column.wanted)
    check_zero(
        cut(r.column, p.column.blocks, entry * p.k, p.k, rest.block, p.column.blocks - rest.block),
        "blocks of no group");
}

// Every group equals that group quantized alone, and nothing is read beyond the groups: NaN there
// changes nothing, and of the last batch entry those rows do not even exist.
void test_groups(const Case& c, const Result& r) {
  if (!c.call.grouped) return;
  const QuantizeProblem& p = c.call.entry;
  Case unread = c;
  const int64_t width = static_cast<int64_t>(width_of(p.x_dtype)) * p.k;
  for (int64_t entry = 0; entry < c.call.batch; ++entry) {
    for (int64_t number = 0; number < c.call.groups; ++number) {
      const Result own = cut_group(c, r, entry, number), alone = run_alone(c, entry, number);
      check(same(own.row, alone.row), "row-wise: a group is that group alone");
      check(same(own.column, alone.column), "column-wise: a group is that group alone");
    }
    test_rest(c, r, entry);
    const Rows rest = rows_of(c, entry, c.call.groups);
    const auto begin = unread.x.begin() + (entry * p.m + rest.begin) * width;
    std::fill(begin, begin + rest.count * width, uint8_t{0xFF});
    if (entry + 1 == c.call.batch) unread.x = Bytes(unread.x.begin(), begin);
  }
  const Result blind = run(unread, kernels(), 0x00, 2, false);
  check(same(blind.row, r.row) && same(blind.column, r.column), "rows of no group are read");
}

// ----------------------------------------------------------------------------------------------

void test_dequantize(Form form, const QuantizeCall& call, int64_t rows, int64_t extent) {
  if (chance(0.5))  // any byte may come as a scale
    for (uint8_t& byte : form.block_scale) byte = static_cast<uint8_t>(draw(0, 255));
  DequantizeProblem d = {};
  d.codes = form.codes.data();
  d.block_scale = form.block_scale.data();
  d.amax = chance(0.3) ? nullptr : form.amax.data();
  d.row_scaled = call.entry.row_scaled;
  d.bound = chance(0.5) ? 256 : 448;
  d.batch = call.batch;
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
  test_transpose(c, first.column);
  test_groups(c, first);
  const QuantizeProblem& p = c.call.entry;
  if (c.call.grouped) return;  // dequantize knows no groups
  if (p.row.wanted) test_dequantize(first.row, c.call, p.m, p.k);
  if (p.column.wanted) test_dequantize(first.column, c.call, p.k, p.m);
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400;
  random_engine.seed(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  test_codec();
  test_quotient();
  int sets = 0;
  for (int i = 0; i < kernel_tables(); ++i) sets += kernel_table(i) != nullptr;
  for (int i = 0; i < cases; ++i) test_case(random_case());
  std::printf("fuzz_kernels: %d cases on %d instruction sets are equal bit for bit\n", cases, sets);
  return 0;
}
