// Speed of the device kernels beside a device-to-device copy of the same bytes in the same run:
// quantize_cuda [repetitions], or quantize_cuda 1 VARIANT for one launch under a profiler. Every
// figure is the median over CUDA events of launches on random data; each tensor is larger than the
// L2 cache, or several take turns. "copy" is the time of cudaMemcpyAsync moving as many bytes in
// total (half read, half written) as the kernel must move, each counted once, and the fraction is
// copy over kernel.
//
// nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -ftz=false -fmad=false -prec-div=true
// -prec-sqrt=true -cudart static benchmarks/quantize_cuda.cc xla_ffi/kernels/*.cu
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "../xla_ffi/kernels/dequantize.h"
#include "../xla_ffi/kernels/nvfp4.h"
#include "../xla_ffi/kernels/quantize_transpose.h"

namespace {

using namespace jax_fp4;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* allocate(int64_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

int repetitions = 31;

double median_us(const std::function<void(int)>& launch, int inner = 1) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) launch(i);
  std::vector<float> times;
  for (int i = 0; i < repetitions; ++i) {
    check(cudaEventRecord(begin, nullptr));
    for (int j = 0; j < inner; ++j) launch(i * inner + j);
    check(cudaEventRecord(end, nullptr));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1000 / static_cast<float>(inner));
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Of x_float and `out`, an element: x of any variant, its outputs, or half of what a copy moves.
constexpr int64_t kBufferBytes = 6;

// Everything that any variant needs, for the largest shape.
struct Memory {
  int64_t elements;
  uint8_t *x_half, *x_float, *out, *copy_from, *copy_to;
  float* amax;
  uint32_t* seed;
  int32_t* sizes;
  void* scratch;

  // The tables of groups, and what an activation makes.
  int64_t scratch_bytes() const { return (1 << 24) + 2 * elements; }

  explicit Memory(int64_t count) : elements(count) {
    x_half = allocate<uint8_t>(4 * count);
    x_float = allocate<uint8_t>(kBufferBytes * count);
    out = allocate<uint8_t>(kBufferBytes * count);
    copy_from = x_float;
    copy_to = out;
    amax = allocate<float>(1 << 22);
    seed = allocate<uint32_t>(4);
    sizes = allocate<int32_t>(64);
    scratch = allocate<uint8_t>(scratch_bytes());
    fill();
  }

  void fill() {
    const size_t some = 1 << 22;  // random values, repeated
    std::vector<uint16_t> half(some);
    std::vector<float> whole(some);
    std::mt19937_64 engine(5);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < some; ++i) {
      whole[i] = normal(engine);
      half[i] = static_cast<uint16_t>(*reinterpret_cast<const uint32_t*>(&whole[i]) >> 16);
    }
    for (size_t i = 0; i < static_cast<size_t>(elements); i += some) {
      for (int64_t half_of : {int64_t{0}, 2 * elements})
        check(cudaMemcpy(x_half + half_of + 2 * i, half.data(), 2 * some, cudaMemcpyHostToDevice));
      check(cudaMemcpy(x_float + 4 * i, whole.data(), 4 * some, cudaMemcpyHostToDevice));
    }
    std::vector<float> amaxes(1 << 22, 5.5f);
    check(cudaMemcpy(amax, amaxes.data(), amaxes.size() * 4, cudaMemcpyHostToDevice));
    const uint32_t words[4] = {1, 2, 0, 0};
    check(cudaMemcpy(seed, words, sizeof(words), cudaMemcpyHostToDevice));
  }
};

struct Variant {
  const char* name;
  double bytes;  // an element of x
  DType x_dtype;
  bool row, column, values, given, hadamard, random, row_scaled;
  int32_t tile;
  int64_t groups;       // 0 = not grouped
  bool swiglu = false;  // x is made of its gate and linear columns
  ErrorNorm four_over_six = ErrorNorm::kNone;
};

constexpr Variant kVariants[] = {
    {"both, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 0, 0, 1, 0},
    {"both, computed", 5.125, DType::kBF16, 1, 1, 0, 0, 0, 0, 0, 1, 0},
    {"row-wise, given", 2.5625, DType::kBF16, 1, 0, 0, 1, 0, 0, 0, 1, 0},
    {"column-wise, given", 2.5625, DType::kBF16, 0, 1, 0, 1, 0, 0, 0, 1, 0},
    {"values + column, given", 4.5625, DType::kBF16, 0, 1, 1, 1, 0, 0, 0, 1, 0},
    {"float32, 2-D tiles, given", 5.125, DType::kF32, 1, 1, 0, 1, 0, 0, 0, 16, 0},
    {"2-D tiles, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 0, 0, 16, 0},
    {"Hadamard, given", 3.125, DType::kBF16, 1, 1, 0, 1, 1, 0, 0, 1, 0},
    {"stochastic, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 1, 0, 1, 0},
    {"Hadamard + stochastic, given", 3.125, DType::kBF16, 1, 1, 0, 1, 1, 1, 0, 1, 0},
    {"Hadamard + stochastic, comp.", 5.125, DType::kBF16, 1, 1, 0, 0, 1, 1, 0, 1, 0},
    {"row-scaled, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 0, 1, 1, 0},
    {"row-scaled, computed", 5.125, DType::kBF16, 1, 1, 0, 0, 0, 0, 1, 1, 0},
    {"64 groups uneven, computed", 5.125, DType::kBF16, 1, 1, 0, 0, 0, 0, 0, 1, 64},
    {"swiglu, 1 group, computed", 9.125, DType::kBF16, 1, 1, 0, 0, 0, 0, 0, 1, 1, true},
    {"swiglu, 64 groups, computed", 9.125, DType::kBF16, 1, 1, 0, 0, 0, 0, 0, 1, 64, true},
    {"swiglu, Hadamard, 64 groups", 11.125, DType::kBF16, 1, 1, 0, 0, 1, 0, 0, 1, 64, true},
    {"four-over-six, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 0, 0, 1, 0, false,
     ErrorNorm::kMae},
    {"four-over-six, 2-D tiles, given", 3.125, DType::kBF16, 1, 1, 0, 1, 0, 0, 0, 16, 0, false,
     ErrorNorm::kMae},
};

// Sizes that add up to m, unevenly.
void put_sizes(const Memory& memory, int64_t m, int64_t groups) {
  std::mt19937_64 engine(7);
  std::exponential_distribution<double> law;
  std::vector<double> weight(static_cast<size_t>(groups));
  double sum = 0;
  for (double& w : weight) sum += w = law(engine);
  std::vector<int32_t> sizes;
  int64_t left = m;
  for (size_t i = 0; i < weight.size(); ++i) {
    const auto size =
        i + 1 == weight.size()
            ? left
            : std::min(left, static_cast<int64_t>(weight[i] / sum * static_cast<double>(m)));
    sizes.push_back(static_cast<int32_t>(size));
    left -= size;
  }
  check(cudaMemcpy(memory.sizes, sizes.data(), 4 * sizes.size(), cudaMemcpyHostToDevice));
}

cuda::QuantizeProblem problem(const Memory& memory, const Variant& v, int64_t m, int64_t k,
                              int64_t copy) {
  cuda::QuantizeProblem p = {};
  p.x_dtype = v.x_dtype;
  p.compute = DType::kBF16;
  p.batch = 1;
  p.m = p.m_total = m;
  p.k = p.k_total = k;
  p.tile = v.tile;
  p.row_scaled = v.row_scaled;
  p.seed = v.random ? memory.seed : nullptr;
  p.grouped = v.groups > 0;
  p.groups = v.groups > 0 ? v.groups : 1;
  p.group_sizes = memory.sizes;
  const int64_t row_blocks = p.grouped ? grouped_blocks(m, v.groups) : (m + 15) / 16;
  const int64_t size = m * k;
  p.x = (v.x_dtype == DType::kF32 ? memory.x_float + 4 * copy * size
                                  : memory.x_half + (v.swiglu ? 4 : 2) * copy * size);
  if (v.swiglu) p.activation.kind = Activation::kSwiglu;
  uint8_t* out = memory.out + copy * 4 * size;
  const float* given = v.given ? memory.amax : nullptr;
  const int32_t bound = v.four_over_six == ErrorNorm::kNone ? 448 : 256;
  p.row = {v.row || v.values, false,   v.four_over_six,         bound, (k + 15) / 16,
           nullptr,           nullptr, memory.amax + (1 << 20), given};
  p.column = {v.column, v.hadamard, v.four_over_six,         bound, row_blocks,
              nullptr,  nullptr,    memory.amax + (1 << 21), given};
  if (v.row) {
    p.row.codes = out;
    p.row.block_scale = out + size / 2;
  }
  if (v.column) {
    p.column.codes = out + size / 2 + size / 8;
    p.column.block_scale = p.column.codes + k * row_blocks * 8;
  }
  if (v.values) p.values = reinterpret_cast<uint16_t*>(out + 2 * size - size / 4);
  if (cuda::scratch_bytes(p) > memory.scratch_bytes()) std::exit(1);
  return p;
}

double copy_us(const Memory& memory, double bytes, int inner) {
  const auto half = static_cast<size_t>(bytes / 2) / 16 * 16;
  const auto slots = kBufferBytes * memory.elements / static_cast<int64_t>(half);
  return median_us(
      [&](int i) {
        const size_t at = static_cast<size_t>(i % slots) * half;
        check(cudaMemcpyAsync(memory.copy_to + at, memory.copy_from + at, half,
                              cudaMemcpyDeviceToDevice, nullptr));
      },
      inner);
}

void report(const char* name, double kernel, double copy, double bytes) {
  std::printf("  %-31s %9.1f us  copy %8.1f us  fraction %.3f  %5.0f GB/s\n", name, kernel, copy,
              copy / kernel, bytes / kernel / 1e3);
}

void measure(const Memory& memory, int64_t m, int64_t k) {
  std::printf("[%lld, %lld]\n", static_cast<long long>(m), static_cast<long long>(k));
  const int64_t size = m * k;
  const int copies = static_cast<int>(std::min<int64_t>(memory.elements / size, 32));
  const int inner = size < (1 << 24) ? 20 : 4;
  for (const Variant& v : kVariants) {
    if (v.groups > 0) put_sizes(memory, m, v.groups);
    const auto launch = [&](int i) {
      check(cuda::launch_quantize_transpose(problem(memory, v, m, k, i % copies), memory.scratch,
                                            nullptr));
    };
    const double bytes = v.bytes * static_cast<double>(size);
    report(v.name, median_us(launch, inner), copy_us(memory, bytes, inner), bytes);
  }
  const auto decode = [&](int i) {
    const int64_t at = i % copies;
    const DequantizeProblem d = {memory.x_half + 2 * at * size,
                                 memory.x_half + 2 * at * size + size / 2,
                                 memory.amax,
                                 false,
                                 448,
                                 1,
                                 m,
                                 k / 16,
                                 k,
                                 memory.out + 4 * at * size,
                                 DType::kBF16};
    check(cuda::launch_dequantize(d, nullptr, nullptr));
  };
  const double bytes = 2.5625 * static_cast<double>(size);
  report("dequantize to bfloat16", median_us(decode, inner), copy_us(memory, bytes, inner), bytes);
}

// One small tensor inside a CUDA graph.
void measure_small(const Memory& memory, int64_t m, int64_t k) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const Variant& v : {kVariants[0], kVariants[1], kVariants[9]}) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    constexpr int kLaunches = 20;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < kLaunches; ++i)
      check(cuda::launch_quantize_transpose(problem(memory, v, m, k, i), memory.scratch, stream));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    const double us = median_us([&](int) { check(cudaGraphLaunch(replay, nullptr)); });
    std::printf("[%lld, %lld] in a graph: %-31s %6.2f us\n", static_cast<long long>(m),
                static_cast<long long>(k), v.name, us / kLaunches);
    check(cudaGraphExecDestroy(replay));
    check(cudaGraphDestroy(graph));
  }
  check(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) repetitions = std::atoi(argv[1]);
  const Memory memory(int64_t{16384} * 16384);
  if (argc > 2) {
    const Variant& v = kVariants[std::atoi(argv[2])];
    if (v.groups > 0) put_sizes(memory, 8192, v.groups);
    check(cuda::launch_quantize_transpose(problem(memory, v, 8192, 8192, 0), memory.scratch,
                                          nullptr));
    check(cudaDeviceSynchronize());
    return 0;
  }
  for (const auto& shape :
       {std::pair<int64_t, int64_t>{8192, 8192}, {16384, 4096}, {16384, 16384}, {2048, 2048}})
    measure(memory, shape.first, shape.second);
  measure_small(memory, 256, 4096);
  check(cudaDeviceSynchronize());
  return 0;
}
