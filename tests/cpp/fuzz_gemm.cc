// Random grouped products against sums in double on the host, with poisoned outputs, NaN in all
// that must not be read or must not count, and every kind, layout, type, factor and pattern of
// groups:
//   nvcc -O2 -gencode=arch=compute_90a,code=sm_90a tests/cpp/fuzz_gemm.cc \
//     xla_ffi/kernels/grouped_gemm_sm90.cu -o fuzz_gemm && ./fuzz_gemm 500 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../xla_ffi/kernels/gemm_decode.cuh"
#include "../../xla_ffi/kernels/grouped_gemm.h"

namespace {

using namespace jax_fp4;  // the test of a namespace, in one file
using cuda::Gemm;
using cuda::GemmProblem;

std::mt19937_64 engine;
int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}
bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(engine) < p; }
float normal() { return std::normal_distribution<float>()(engine); }

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

constexpr size_t kGuard = 512;

// A copy on the device, between guards.
struct Device {
  uint8_t* base = nullptr;
  size_t size = 0;
  explicit Device(size_t bytes, int fill = 0xFF) : size(bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&base), bytes + 2 * kGuard), "malloc");
    check(cudaMemset(base, fill, bytes + 2 * kGuard), "memset");
  }
  template <class T>
  explicit Device(const std::vector<T>& from) : Device(from.size() * sizeof(T)) {
    check(cudaMemcpy(data(), from.data(), size, cudaMemcpyHostToDevice), "copy");
  }
  ~Device() { cudaFree(base); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void* data() const { return base + kGuard; }
  bool guards_hold() const {
    std::vector<uint8_t> all(size + 2 * kGuard);
    check(cudaMemcpy(all.data(), base, all.size(), cudaMemcpyDeviceToHost), "copy");
    for (size_t i = 0; i < kGuard; ++i)
      if (all[i] != 0xFF || all[all.size() - 1 - i] != 0xFF) return false;
    return true;
  }
};

uint16_t bf16_bits(float value) {
  const __nv_bfloat16 rounded(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
double bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
double code_value(int code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}
double scale_value(int byte) {
  if (byte == 0x7F) return std::nan("");
  const int e = byte >> 3, m = byte & 7;
  return e == 0 ? std::ldexp(m / 8.0, -6) : std::ldexp(1 + m / 8.0, e - 7);
}

std::vector<float> factors(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = 0.25f + std::fabs(normal());
  return values;
}
std::vector<uint16_t> bf16s(int64_t count) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& v : values) v = bf16_bits(normal());
  return values;
}

struct Case {
  GemmProblem p = {};
  std::vector<int32_t> sizes;
  std::vector<int64_t> start, length;  // rows of each group
  std::vector<int64_t> place;          // where a group's positions begin in memory
  std::vector<uint16_t> lhs, rhs;
  std::vector<uint8_t> codes, scales;
  std::vector<float> lhs_factor, rhs_factor, bias, row_weights;
};

void draw_sizes(Case& c) {
  GemmProblem& p = c.p;
  const bool wild = chance(0.1);
  int64_t left = p.m;
  for (int64_t e = 0; e < p.groups; ++e) {
    int64_t size = chance(0.2) ? 0 : draw(0, std::max<int64_t>(1, 2 * p.m / p.groups));
    if (wild && chance(0.3)) size = chance(0.5) ? -draw(1, 1 << 30) : draw(0, (1LL << 31) - 1);
    if (!wild) size = std::min(size, left);
    if (p.groups == 1 && !wild && chance(0.7)) size = p.m;
    c.sizes.push_back(static_cast<int32_t>(size));
    left -= std::max<int64_t>(size, 0);
  }
  int64_t sum = 0, place = 0;
  for (int32_t size : c.sizes) {
    const int64_t begin = std::min(sum, p.m);
    sum += std::max(size, 0);
    const int64_t end = std::min(sum, p.m);
    c.start.push_back(begin), c.length.push_back(end - begin), c.place.push_back(place);
    place += (end - begin + 15) / 16 * 16;
  }
}

Case draw_case(int64_t largest) {
  Case c;
  GemmProblem& p = c.p;
  p.kind = static_cast<Gemm>(draw(0, 2));
  p.contracts_last = p.kind == Gemm::kPacked || chance(0.5);
  p.out_dtype = static_cast<DType>(draw(0, 2));
  p.groups = chance(0.3) ? 1 : draw(1, chance(0.1) ? 100 : 9);
  p.m = draw(1, largest * (chance(0.3) ? 4 : 1));
  p.n = draw(1, largest), p.k = draw(1, largest);
  p.parts = p.kind == Gemm::kContraction && chance(0.3) ? draw(2, 3) : 1;
  if (p.parts > 1) p.k = p.parts * cuda::kPartRows * draw(1, 2);
  if (p.kind == Gemm::kPacked) p.k = (p.k + 63) / 64 * 64;
  if (p.kind == Gemm::kRows) p.k = (p.k + 7) / 8 * 8;
  if (!p.contracts_last) p.n = (p.n + 7) / 8 * 8, p.k = (p.k + 7) / 8 * 8;
  draw_sizes(c);
  const int64_t groups = p.groups;
  const bool contraction = p.kind == Gemm::kContraction;
  if (contraction && p.contracts_last) p.stored = (p.m + 15 * groups) / 16 * 16;
  const int64_t lhs_rows = p.stored > 0 ? p.stored : p.m;
  c.lhs = bf16s(lhs_rows * p.k);
  if (p.kind == Gemm::kPacked) {
    c.codes.resize(static_cast<size_t>(groups * p.n * p.k / 2));
    c.scales.resize(static_cast<size_t>(groups * p.n * p.k / 16));
    for (uint8_t& b : c.codes) b = static_cast<uint8_t>(draw(0, 255));
    for (uint8_t& b : c.scales) b = static_cast<uint8_t>(chance(0.05) ? draw(0, 7) : draw(40, 88));
    if (chance(0.3)) c.scales[static_cast<size_t>(draw(0, c.scales.size() - 1))] = 0x7F;
  } else {
    c.rhs = bf16s((contraction ? lhs_rows : groups * p.k) * p.n);
  }
  if (chance(0.5)) {
    p.lhs_by_row = chance(0.5);
    c.lhs_factor = factors(!p.lhs_by_row ? groups : contraction ? groups * p.k : p.m);
  }
  if (chance(0.5)) {
    p.rhs_by_column = chance(0.5);
    c.rhs_factor = factors(p.rhs_by_column ? groups * p.n : groups);
  }
  if (!contraction && chance(0.4)) {
    c.bias = factors(groups * p.n);
    if (chance(0.5)) c.row_weights = factors(p.m);
  }
  return c;
}

// NaN in what belongs to no group.
void poison(Case& c) {
  const GemmProblem& p = c.p;
  const uint16_t nan = 0x7FC0;
  const int64_t used = c.start.back() + c.length.back();
  if (p.stored == 0) {
    for (int64_t i = used * p.k; i < p.m * p.k; ++i) c.lhs[i] = nan;
    if (p.kind == Gemm::kContraction)
      for (int64_t i = used * p.n; i < p.m * p.n; ++i) c.rhs[i] = nan;
    return;
  }
  const int64_t end = c.place.back() + (c.length.back() + 15) / 16 * 16;
  for (int64_t row = 0; row < p.k; ++row)
    for (int64_t i = end; i < p.stored; ++i) c.lhs[row * p.stored + i] = nan;
  for (int64_t row = 0; row < p.n; ++row)
    for (int64_t i = end; i < p.stored; ++i) c.rhs[row * p.stored + i] = nan;
}

struct Sum {
  double value = 0, size = 0;
  void add(double a, double b) { value += a * b, size += std::fabs(a * b); }
};

// Element (row, column) of group e's result; row counts from the first of all in rows of m.
Sum expected_sum(const Case& c, int64_t e, int64_t row, int64_t column) {
  const GemmProblem& p = c.p;
  Sum sum;
  if (p.kind == Gemm::kPacked) {
    for (int64_t i = 0; i < p.k; ++i) {
      const int64_t k = i / 64 * 64 + cuda::interleaved(static_cast<int>(i % 64));
      const int64_t line = e * p.n + column;
      const int code = c.codes[(line * p.k + k) / 2] >> (k % 2 * 4) & 15;
      sum.add(bf16_value(c.lhs[row * p.k + i]),
              code_value(code) * scale_value(c.scales[line * p.k / 16 + k / 16]));
    }
  } else if (p.kind == Gemm::kRows) {
    for (int64_t k = 0; k < p.k; ++k)
      sum.add(bf16_value(c.lhs[row * p.k + k]),
              bf16_value(c.rhs[p.contracts_last ? (e * p.n + column) * p.k + k
                                                : (e * p.k + k) * p.n + column]));
  } else if (p.contracts_last) {
    const int64_t count = (c.length[e] + 15) / 16 * 16;
    for (int64_t i = c.place[e]; i < c.place[e] + count; ++i)
      sum.add(bf16_value(c.lhs[row * p.stored + i]), bf16_value(c.rhs[column * p.stored + i]));
  } else {
    for (int64_t i = c.start[e]; i < c.start[e] + c.length[e]; ++i)
      sum.add(bf16_value(c.lhs[i * p.k + row]), bf16_value(c.rhs[i * p.n + column]));
  }
  double factor = 1;
  if (!c.lhs_factor.empty())
    factor *= c.lhs_factor[!p.lhs_by_row ? e : p.kind == Gemm::kContraction ? e * p.k + row : row];
  if (!c.rhs_factor.empty()) factor *= c.rhs_factor[p.rhs_by_column ? e * p.n + column : e];
  sum.value *= factor, sum.size *= factor;
  if (!c.bias.empty())
    sum.add(c.row_weights.empty() ? 1.0 : c.row_weights[row], c.bias[e * p.n + column]);
  return sum;
}

double stored_value(const std::vector<uint8_t>& out, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(out.data())[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(out.data())[i];
  if (dtype == DType::kBF16) return bf16_value(bits);
  __half half;
  std::memcpy(&half, &bits, 2);
  return __half2float(half);
}

void fail(const Case& c, const char* what, int64_t row, int64_t column, double got, double want) {
  const GemmProblem& p = c.p;
  std::printf(
      "FAILED: %s at %lld, %lld: %g, not %g\nkind %d last %d out %d m %lld n %lld k %lld "
      "groups %lld factors %zu %zu bias %zu\n",
      what, static_cast<long long>(row), static_cast<long long>(column), got, want,
      static_cast<int>(p.kind), p.contracts_last, static_cast<int>(p.out_dtype),
      static_cast<long long>(p.m), static_cast<long long>(p.n), static_cast<long long>(p.k),
      static_cast<long long>(p.groups), c.lhs_factor.size(), c.rhs_factor.size(), c.bias.size());
  for (int32_t size : c.sizes) std::printf("%d ", size);
  std::printf("\n");
  std::exit(1);
}

void compare(const Case& c, const std::vector<uint8_t>& out, int64_t samples) {
  const GemmProblem& p = c.p;
  const bool contraction = p.kind == Gemm::kContraction;
  const int64_t rows = contraction ? p.groups * p.k : p.m;
  const double ulp = p.out_dtype == DType::kF32    ? 0
                     : p.out_dtype == DType::kBF16 ? 0x1p-8
                                                   : 0x1p-10;
  const bool all = rows * p.n <= samples;
  for (int64_t s = 0; s < (all ? rows * p.n : samples); ++s) {
    const int64_t at = all ? s : draw(0, rows * p.n - 1);
    const int64_t line = at / p.n, column = at % p.n;
    int64_t e = contraction ? line / p.k : 0;
    if (!contraction)
      while (e < p.groups && line >= c.start[e] + c.length[e]) ++e;
    const int64_t part_rows = p.k / p.parts, row_of_group = line % p.k;
    const int64_t place = row_of_group / part_rows * p.groups + e;  // the matrix of the result
    const int64_t from =
        contraction ? (place * part_rows + row_of_group % part_rows) * p.n + column : at;
    const double got = stored_value(out, p.out_dtype, from);
    if (e == p.groups) {
      if (got != 0 || std::signbit(got)) fail(c, "tail", line, column, got, 0);
      continue;
    }
    const Sum want = expected_sum(c, e, contraction ? line % p.k : line, column);
    if (std::isnan(want.value) != std::isnan(got)) fail(c, "NaN", line, column, got, want.value);
    const double room = 4e-5 * want.size + ulp * std::fabs(want.value) + 1e-30;
    if (std::fabs(want.value) < 60000 && std::fabs(got - want.value) > room)
      fail(c, "sum", line, column, got, want.value);
  }
}

void run(Case& c, int64_t samples) {
  GemmProblem& p = c.p;
  if (chance(0.5)) poison(c);
  const Device lhs(c.lhs), rhs(c.rhs), codes(c.codes), scales(c.scales), sizes(c.sizes);
  const Device lhs_factor(c.lhs_factor), rhs_factor(c.rhs_factor), bias(c.bias),
      row_weights(c.row_weights);
  const auto given = [](const Device& d) {
    return d.size > 0 ? static_cast<const float*>(d.data()) : nullptr;
  };
  const bool contraction = p.kind == Gemm::kContraction;
  const int64_t count = (contraction ? p.groups * p.k : p.m) * p.n;
  const Device out(static_cast<size_t>(count * (p.out_dtype == DType::kF32 ? 4 : 2)));
  p.lhs = lhs.data();
  p.rhs = p.kind == Gemm::kPacked ? codes.data() : rhs.data();
  p.block_scale = static_cast<const uint8_t*>(scales.data());
  p.lhs_factor = given(lhs_factor), p.rhs_factor = given(rhs_factor);
  p.bias = given(bias), p.row_weights = given(row_weights);
  p.group_sizes = static_cast<const int32_t*>(sizes.data());
  p.out = out.data();
  const Device scratch(static_cast<size_t>(cuda::scratch_bytes(p)));
  check(cuda::launch_grouped_gemm(p, scratch.data(), nullptr), cuda::why_not(p));
  check(cudaDeviceSynchronize(), "run");
  std::vector<uint8_t> host(out.size);
  check(cudaMemcpy(host.data(), out.data(), out.size, cudaMemcpyDeviceToHost), "copy");
  if (!out.guards_hold()) fail(c, "guard", 0, 0, 0, 0);
  compare(c, host, samples);
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const int64_t largest = argc > 3 ? std::atoi(argv[3]) : 600;
  for (int i = 0; i < cases; ++i) {
    Case c = draw_case(largest);
    run(c, 3000);
  }
  std::printf("fuzz_gemm: %d cases agree\n", cases);
  return 0;
}
