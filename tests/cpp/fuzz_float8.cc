// Fuzz of the CPU kernels of the 8-bit formats, as fuzz_kernels.cc: fuzz_float8 [cases] [seed].
// Poisoned outputs of exact size, every compiled instruction set, several threads, FTZ and DAZ: the
// bits must be equal; each group equals that group quantized alone. That they are those of the
// specification is for tests/test_ffi_float8.py.
#include "../../xla_ffi/cpu/float8.h"
#include "../../xla_ffi/kernels/float8.h"
#include "cases.h"

namespace {

using namespace jax_fp4;  // the test of a namespace, in one file

struct Float8Case {
  Float8Call call = {};
  Bytes x;
  std::vector<int32_t> group_sizes;
  std::vector<float> given;  // amaxes or scales
  bool given_amax = false, given_scale = false;
};

struct Float8Result {
  Bytes codes, scale;
  std::vector<float> amax;
};

bool same(const Float8Result& a, const Float8Result& b) {
  return a.codes == b.codes && a.scale == b.scale && a.amax.size() == b.amax.size() &&
         (a.amax.empty() || std::memcmp(a.amax.data(), b.amax.data(), 4 * a.amax.size()) == 0);
}

int64_t matrices(const Float8Call& call) { return call.batch * call.groups; }

// Sets the extents of a form.
void shape_form(const Float8Call& call, Float8Form& form, bool along_k) {
  const Float8Problem& p = call.entry;
  const int64_t block = float8_block(p.scaling);
  form.rows = along_k ? p.m : p.k;
  form.blocks = call.grouped && !along_k ? (p.m + (block - 1) * call.groups) / block
                                         : ceil_div(along_k ? p.k : p.m, block);
  form.extent = form.blocks * block;
}

size_t scale_size(const Float8Call& call, const Float8Form& form) {
  switch (call.entry.scaling) {
    case Float8Scaling::kMxfp8:
      return static_cast<size_t>(call.batch * form.rows * form.blocks);
    case Float8Scaling::kBlock:
      return static_cast<size_t>(4 * call.batch * ceil_div(form.rows, call.entry.tile) *
                                 form.blocks);
    case Float8Scaling::kTensor:
      return static_cast<size_t>(4 * matrices(call));
  }
  return 0;
}

Float8Result attach(const Float8Call& call, Float8Form& form, float** amax, int poison) {
  Float8Result r;
  if (!form.wanted) return r;
  const auto byte = static_cast<uint8_t>(poison);
  r.codes.assign(static_cast<size_t>(call.batch * form.rows * form.extent), byte);
  r.scale.assign(scale_size(call, form), byte);
  if (call.entry.scaling == Float8Scaling::kTensor)
    r.amax.resize(static_cast<size_t>(matrices(call)));
  form.codes = r.codes.data();
  form.scale = r.scale.data();
  *amax = r.amax.data();
  return r;
}

struct Pair {
  Float8Result row, column;
};

Pair run(const Float8Case& c, const Kernels& kernels, int poison, int64_t threads, bool late) {
  Float8Call call = c.call;
  Pair r = {attach(call, call.entry.row, &call.row_amax, poison),
            attach(call, call.entry.column, &call.column_amax, poison)};
  call.entry.x = c.x.data();
  call.group_sizes = c.group_sizes.data();
  call.given_amax = c.given_amax ? c.given.data() : nullptr;
  call.given_scale = c.given_scale ? c.given.data() : nullptr;
  TestPool pool(threads, late);
  PoolExecutor<TestPool> executor(pool);
  quantize_float8(kernels, executor, call);
  return r;
}

Float8Case random_float8_case() {
  Float8Case c;
  Float8Call& call = c.call;
  Float8Problem& p = call.entry;
  call.batch = chance(0.3) ? draw(0, 3) : 1;
  p.m = random_extent();
  p.k = random_extent();
  p.x_dtype = static_cast<DType>(draw(0, 2));
  p.compute = static_cast<DType>(draw(0, 2));
  p.scaling = static_cast<Float8Scaling>(draw(0, 2));
  p.codes = static_cast<Float8Codes>(draw(0, 1));
  p.tile = chance(0.3) ? static_cast<int32_t>(float8_block(p.scaling)) : 1;
  p.power_of_two = chance(0.5);
  p.eps = chance(0.3) ? 1e-3f : 0.0f;
  call.grouped = p.tile == 1 && chance(0.5);
  call.groups = call.grouped ? draw(0, 7) : 1;
  for (int64_t i = 0; call.grouped && i < call.batch; ++i) {
    const std::vector<int32_t> sizes = random_sizes(p.m, call.groups);
    c.group_sizes.insert(c.group_sizes.end(), sizes.begin(), sizes.end());
  }
  const int64_t wanted = draw(1, 3);
  p.row.wanted = (wanted & 1) != 0;
  p.column.wanted = (wanted & 2) != 0;
  shape_form(call, p.row, true);
  shape_form(call, p.column, false);
  c.x = random_words(call.batch * p.m * p.k, p.x_dtype);
  c.given = random_amaxes(matrices(call));
  c.given_amax = p.scaling == Float8Scaling::kTensor && !c.given.empty() && chance(0.3);
  c.given_scale =
      p.scaling == Float8Scaling::kTensor && !c.given.empty() && !c.given_amax && chance(0.3);
  return c;
}

// ---- Groups ----------------------------------------------------------------------------------

// The bytes of one group in rows of `stride` bytes, `rows` of them from `row` on.
Bytes cut(const Bytes& from, int64_t stride, int64_t row, int64_t rows, int64_t begin,
          int64_t count) {
  Bytes out;
  for (int64_t i = row; i < row + rows; ++i) {
    const auto at = from.begin() + i * stride + begin;
    out.insert(out.end(), at, at + count);
  }
  return out;
}

// Codes and scales in each stored row: bytes of codes and of scales that a block has.
void check_part(const Float8Call& call, const Float8Form& form, const Float8Result& r, int64_t row,
                int64_t rows, int64_t block, int64_t blocks, const Float8Result* alone) {
  const Float8Problem& p = call.entry;
  const int64_t length = float8_block(p.scaling);
  const int64_t bytes = p.scaling == Float8Scaling::kMxfp8 ? 1 : 4;
  const Bytes codes = cut(r.codes, form.extent, row, rows, block * length, blocks * length);
  check(codes == (alone ? alone->codes : Bytes(codes.size())), "codes of a group, or of none");
  if (p.scaling == Float8Scaling::kTensor) return;
  const Bytes scale = cut(r.scale, form.blocks * bytes, row, rows, block * bytes, blocks * bytes);
  check(scale == (alone ? alone->scale : Bytes(scale.size())), "scales of a group, or of none");
}

void test_group(const Float8Case& c, const Pair& r, int64_t entry, int64_t number, int64_t row,
                int64_t rows, int64_t block) {
  const Float8Problem& p = c.call.entry;
  const int64_t part = entry * c.call.groups + number, first = entry * p.m + row;
  const int64_t width = static_cast<int64_t>(width_of(p.x_dtype)) * p.k;
  Float8Case own = c;
  own.call.batch = own.call.groups = 1;
  own.call.grouped = false;
  own.call.entry.m = rows;
  shape_form(own.call, own.call.entry.row, true);
  shape_form(own.call, own.call.entry.column, false);
  own.x = Bytes(c.x.begin() + first * width, c.x.begin() + (first + rows) * width);
  own.given = {c.given[static_cast<size_t>(part)]};
  const Pair alone = run(own, kernels(), 0x7F, 1, false);
  const int64_t blocks = own.call.entry.column.blocks;
  if (p.row.wanted) check_part(c.call, p.row, r.row, first, rows, 0, p.row.blocks, &alone.row);
  if (p.column.wanted)
    check_part(c.call, p.column, r.column, entry * p.k, p.k, block, blocks, &alone.column);
  if (p.scaling != Float8Scaling::kTensor) return;
  for (const bool row_wise : {true, false}) {
    if (!(row_wise ? p.row : p.column).wanted) continue;
    const Float8Result &all = row_wise ? r.row : r.column,
                       &one = row_wise ? alone.row : alone.column;
    check(std::memcmp(&all.amax[static_cast<size_t>(part)], one.amax.data(), 4) == 0, "amax");
    check(std::memcmp(&all.scale[static_cast<size_t>(4 * part)], one.scale.data(), 4) == 0,
          "the scale of a group");
  }
}

void test_groups(const Float8Case& c, const Pair& r) {
  const Float8Problem& p = c.call.entry;
  const int64_t length = float8_block(p.scaling);
  for (int64_t entry = 0; c.call.grouped && entry < c.call.batch; ++entry) {
    int64_t row = 0, block = 0;
    for (int64_t e = 0; e < c.call.groups; ++e) {
      const int64_t size = c.group_sizes[static_cast<size_t>(entry * c.call.groups + e)];
      const int64_t rows = std::min(std::max<int64_t>(size, 0), p.m - row);
      test_group(c, r, entry, e, row, rows, block);
      row += rows;
      block += ceil_div(rows, length);
    }
    if (p.row.wanted)
      check_part(c.call, p.row, r.row, entry * p.m + row, p.m - row, 0, p.row.blocks, nullptr);
    if (p.column.wanted)
      check_part(c.call, p.column, r.column, entry * p.k, p.k, block, p.column.blocks - block,
                 nullptr);
  }
}

// ----------------------------------------------------------------------------------------------

void test_dequantize(const Float8Call& call, const Float8Form& form, Float8Result r) {
  const Float8Problem& p = call.entry;
  if (call.grouped && p.scaling == Float8Scaling::kTensor) return;
  for (uint8_t& byte : r.codes) byte = static_cast<uint8_t>(draw(0, 255));
  Float8DequantizeProblem d = {};
  d.codes = r.codes.data();
  d.scale = r.scale.data();
  d.scaling = p.scaling;
  d.code_type = p.codes;
  d.tile = p.scaling == Float8Scaling::kBlock ? p.tile : 1;
  d.batch = call.batch;
  d.rows = form.rows;
  d.padded = form.extent;
  d.extent = draw(0, form.extent);
  d.out_dtype = static_cast<DType>(draw(0, 2));
  Bytes first;
  for (int i = 0; i < kernel_tables(); ++i)
    for (int poison : {0x7F, 0x00}) {
      if (kernel_table(i) == nullptr) continue;
      Bytes out(static_cast<size_t>(d.batch * d.rows * d.extent) * width_of(d.out_dtype),
                static_cast<uint8_t>(poison));
      d.out = out.data();
      TestPool pool(2, false);
      PoolExecutor<TestPool> executor(pool);
      dequantize_float8(*kernel_table(i), executor, d);
      if (i == 0 && poison == 0x7F) first = out;
      check(out == first, "dequantize: poison or instruction set changes bits");
    }
}

void test_case(const Float8Case& c) {
  const Kernels& baseline = *kernel_table(0);
  const Pair first = run(c, baseline, 0x7F, 1, false);
  const auto equal = [&](const Pair& r, const char* what) {
    check(same(r.row, first.row) && same(r.column, first.column), what);
  };
  equal(run(c, baseline, 0x00, 3, false), "quantize: a byte is not written, or threads change it");
  equal(run(c, baseline, 0x00, 3, true), "quantize: late tasks change bits");
  for (int i = 1; i < kernel_tables(); ++i)
    if (const Kernels* table = kernel_table(i))
      equal(run(c, *table, 0x7F, 2, false), "quantize: instruction set changes bits");
#if defined(__x86_64__)
  const unsigned int mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // FTZ, DAZ
  const Pair flushed = run(c, kernels(), 0x7F, 1, false);
  _mm_setcsr(mode);
  equal(flushed, "quantize: denormals are flushed");
#endif
  test_groups(c, first);
  const Float8Problem& p = c.call.entry;
  if (p.row.wanted) test_dequantize(c.call, p.row, first.row);
  if (p.column.wanted) test_dequantize(c.call, p.column, first.column);
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400;
  random_engine.seed(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  int sets = 0;
  for (int i = 0; i < kernel_tables(); ++i) sets += kernel_table(i) != nullptr;
  for (int i = 0; i < cases; ++i) test_case(random_float8_case());
  std::printf("fuzz_float8: %d cases on %d instruction sets are equal bit for bit\n", cases, sets);
  return 0;
}
