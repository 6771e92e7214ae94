// Fuzz test of the device kernels against the CPU kernels, bit for bit: no XLA, no Python.
// fuzz_cuda [cases] [seed].
//
// nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -ftz=false -fmad=false -prec-div=true
// -prec-sqrt=true -cudart static, over xla_ffi/kernels/*.cu, this file and, compiled as for the CPU
// module, xla_ffi/cpu/*.cc (kernels.cc once for each instruction set). compute-sanitizer runs it.
//
// Cases are those of cases.h. Outputs and scratch are poisoned with 0x7F, and stand between guards
// that must survive. Two cases run at once on two streams, or one after the other on one stream and
// one scratch, without a pause; then each is captured in a CUDA graph and replayed on other data:
// another x, other amaxes, other group sizes. Every other call, and its replay, begins while a
// kernel before it on the stream still makes its x. Activations, under computed amaxes and given
// ones, are held to the CPU kernels on arguments for which exp and tanh are exact.
#include <cuda_runtime_api.h>

#include "../../xla_ffi/kernels/dequantize.h"
#include "../../xla_ffi/kernels/ptx.cuh"
#include "../../xla_ffi/kernels/quantize_transpose.h"
#include "cases.h"

namespace {

using namespace jax_fp4;  // the test of a namespace, in one file

constexpr int kPoison = 0x7F;
constexpr size_t kGuard = 256;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void print(const Case& c) {
  const QuantizeProblem& p = c.call.entry;
  std::printf(
      "x %d compute %d batch %lld m %lld k %lld tile %d row_scaled %d random %d grouped %d "
      "split %d groups %lld given %d row %d column %d hadamard %d norm %d bound %d\n",
      static_cast<int>(p.x_dtype), static_cast<int>(p.compute),
      static_cast<long long>(c.call.batch), static_cast<long long>(p.m),
      static_cast<long long>(p.k), p.tile, p.row_scaled, !c.seed.empty(), c.call.grouped,
      c.call.split_groups, static_cast<long long>(c.call.groups), c.given, p.row.wanted,
      p.column.wanted, p.column.hadamard, static_cast<int>(p.row.four_over_six), p.row.bound);
  for (int32_t size : c.group_sizes) std::printf("%d ", size);
}

void check_launch(cudaError_t error, const Case& c) {
  if (error != cudaSuccess) print(c);
  check_cuda(error, "launch");
}

// Device memory between two guards.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&base_), size + 2 * kGuard), "cudaMalloc");
    poison();
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(base_ + kGuard);
  }
  void poison() { check_cuda(cudaMemset(base_, kPoison, size_ + 2 * kGuard), "cudaMemset"); }
  void put(const void* from) {
    if (size_ > 0)
      check_cuda(cudaMemcpy(as<void>(), from, size_, cudaMemcpyHostToDevice), "to the device");
  }
  Bytes get() const {
    Bytes all(size_ + 2 * kGuard);
    check_cuda(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost), "to the host");
    for (size_t i = 0; i < kGuard; ++i)
      check(all[i] == kPoison && all[kGuard + size_ + i] == kPoison, "a guard is overwritten");
    return Bytes(all.begin() + kGuard, all.end() - kGuard);
  }

 private:
  size_t size_;
  uint8_t* base_ = nullptr;
};

// What makes x before a call: late, after it has let begin what could be launched early.
__global__ void produce(uint8_t* x, const uint8_t* from, size_t size) {
  cuda::let_next_pass_begin();
  __nanosleep(20000);
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride)
    x[i] = from[i];
}

// The buffers of one stored form.
struct DeviceForm {
  Buffer codes, block_scale, amax, given;

  DeviceForm(size_t blocks, size_t amaxes)
      : codes(blocks * kBlockCodeBytes), block_scale(blocks), amax(4 * amaxes), given(4 * amaxes) {}
  void poison() {
    codes.poison();
    block_scale.poison();
    amax.poison();
  }
};

size_t blocks_of(const QuantizeCall& call, const StoredForm& form) {
  return form.wanted ? static_cast<size_t>(call.batch * form.rows * form.blocks) : 0;
}

size_t amaxes_of(const QuantizeCall& call, bool row_wise) {
  const bool wanted = (row_wise ? call.entry.row : call.entry.column).wanted;
  return wanted ? static_cast<size_t>(amax_count(call, row_wise)) : 0;
}

// What is asked of the device beyond the call of the CPU.
enum class Values { kNone, kBeside, kAlone };

// h and the rest that x, the x of a case, is made of on the device.
struct Made {
  cuda::ActivatedInput input = {};
  DType h_dtype = DType::kF32;
  Bytes h;
  std::vector<float> weights;  // empty = none
};

// All but the pointers.
cuda::QuantizeProblem shape_of(const Case& c, Values values, const Made* made) {
  const QuantizeCall& call = c.call;
  const QuantizeProblem& p = call.entry;
  const auto form = [](const StoredForm& f) {
    cuda::StoredForm out = {};
    out.wanted = f.wanted;
    out.hadamard = f.hadamard;
    out.four_over_six = f.four_over_six;
    out.bound = f.bound;
    out.blocks = f.blocks;
    return out;
  };
  cuda::QuantizeProblem d = {};
  d.x_dtype = made == nullptr ? p.x_dtype : made->h_dtype;
  if (made != nullptr) d.activation = made->input;
  d.compute = p.compute;
  d.batch = call.batch;
  d.m = p.m;
  d.k = p.k;
  d.tile = p.tile;
  d.row_scaled = p.row_scaled;
  d.split_groups = call.split_groups;
  d.m_total = p.m_total;
  d.k_total = p.k_total;
  d.grouped = call.grouped;
  d.groups = call.groups;
  d.row = form(p.row);
  d.column = form(p.column);
  // A place to point to until the buffers exist.
  static uint16_t present;
  d.values = values == Values::kNone ? nullptr : &present;
  return d;
}

// One call with all its device memory. Half of them have x made by a kernel just before.
class DeviceCall {
 public:
  DeviceCall(const Case& c, Values values, const Made* made = nullptr)
      : values_(values),
        produced_(chance(0.5)),
        problem_(shape_of(c, values, made)),
        x_size_(made == nullptr ? c.x.size() : made->h.size()),
        x_(x_size_),
        source_(produced_ ? x_size_ : 0),
        weights_(made == nullptr ? 0 : 4 * made->weights.size()),
        seed_(4 * c.seed.size()),
        sizes_(4 * c.group_sizes.size()),
        row_(blocks_of(c.call, c.call.entry.row), amaxes_of(c.call, true)),
        column_(blocks_of(c.call, c.call.entry.column), amaxes_of(c.call, false)),
        product_(values == Values::kNone
                     ? 0
                     : static_cast<size_t>(2 * problem_.batch * problem_.m * problem_.k)),
        scratch_(scratch_bytes()) {
    problem_.x = x_.as<void>();
    if (made != nullptr && !made->weights.empty())
      problem_.activation.weights = weights_.as<float>();
    problem_.seed = c.seed.empty() ? nullptr : seed_.as<uint32_t>();
    problem_.group_sizes = sizes_.as<int32_t>();
    attach(problem_.row, row_, c.given);
    attach(problem_.column, column_, c.given);
    if (values == Values::kAlone) problem_.row.codes = problem_.row.block_scale = nullptr;
    if (values != Values::kNone) problem_.values = product_.as<uint16_t>();
  }

  // Data of a case with the same shapes.
  void put(const Case& c, const Made* made = nullptr) {
    x_.poison();
    (produced_ ? source_ : x_).put(made == nullptr ? c.x.data() : made->h.data());
    if (made != nullptr) weights_.put(made->weights.data());
    seed_.put(c.seed.data());
    sizes_.put(c.group_sizes.data());
    if (c.call.entry.row.wanted) row_.given.put(c.row_amax.data());
    if (c.call.entry.column.wanted) column_.given.put(c.column_amax.data());
    row_.poison();
    column_.poison();
    product_.poison();
    scratch_.poison();
  }

  size_t scratch_bytes() const { return static_cast<size_t>(cuda::scratch_bytes(problem_)); }

  // Null = its own scratch.
  cudaError_t launch(cudaStream_t stream, void* scratch = nullptr) const {
    if (produced_)
      produce<<<16, 256, 0, stream>>>(x_.as<uint8_t>(), source_.as<uint8_t>(), x_size_);
    check_cuda(cudaGetLastError(), "produce");
    if (scratch == nullptr) scratch = scratch_.as<void>();
    return cuda::launch_quantize_transpose(problem_, scratch, stream);
  }

  void compare(const Case& c) const {
    const Result expected = run(c, kernels(), 0x55, 2, false);
    scratch_.get();
    const QuantizeProblem& p = c.call.entry;
    if (p.row.wanted) {
      equal(c, row_.amax, bytes_of(expected.row.amax), "row-wise amax");
      if (values_ == Values::kAlone) {
        const Bytes codes = row_.codes.get();
        check(std::count(codes.begin(), codes.end(), kPoison) == static_cast<int64_t>(codes.size()),
              "codes that nobody asked for");
      } else {
        equal(c, row_.block_scale, expected.row.block_scale, "row-wise scales");
        equal(c, row_.codes, expected.row.codes, "row-wise codes");
      }
      if (values_ != Values::kNone) equal(c, product_, product(c, expected.row), "values");
    }
    if (p.column.wanted) {
      equal(c, column_.amax, bytes_of(expected.column.amax), "column-wise amax");
      equal(c, column_.block_scale, expected.column.block_scale, "column-wise scales");
      equal(c, column_.codes, expected.column.codes, "column-wise codes");
    }
  }

 private:
  static void attach(cuda::StoredForm& form, const DeviceForm& buffers, bool given) {
    form.codes = buffers.codes.as<uint8_t>();
    form.block_scale = buffers.block_scale.as<uint8_t>();
    form.amax = buffers.amax.as<float>();
    form.given_amax = given ? buffers.given.as<float>() : nullptr;
  }

  static Bytes bytes_of(const std::vector<float>& values) {
    Bytes bytes(4 * values.size());
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  static Bytes product(const Case& c, const Form& row) {
    const QuantizeProblem& p = c.call.entry;
    Bytes out(static_cast<size_t>(2 * c.call.batch * p.m * p.k));
    DequantizeProblem d = {};
    d.codes = row.codes.data();
    d.block_scale = row.block_scale.data();
    d.bound = 448;
    d.batch = c.call.batch;
    d.rows = p.m;
    d.blocks = p.row.blocks;
    d.extent = p.k;
    d.out = out.data();
    d.out_dtype = DType::kBF16;
    TestPool pool(1, false);
    PoolExecutor<TestPool> executor(pool);
    dequantize(kernels(), executor, d);
    return out;
  }

  static void equal(const Case& c, const Buffer& buffer, const Bytes& expected, const char* what) {
    const Bytes got = buffer.get();
    if (got == expected) return;
    const auto first = std::mismatch(got.begin(), got.end(), expected.begin());
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
    std::printf("FAILED: %s differ in %zu of %zu bytes, first at %lld: %02x, not %02x\n", what,
                wrong, got.size(), static_cast<long long>(first.first - got.begin()), *first.first,
                *first.second);
    print(c);
    std::exit(1);
  }

  Values values_;
  bool produced_;
  cuda::QuantizeProblem problem_;
  size_t x_size_;
  Buffer x_, source_, weights_, seed_, sizes_;
  DeviceForm row_, column_;
  Buffer product_, scratch_;
};

// The same shapes and options with other data.
Case redrawn(const Case& c) {
  Case other = c;
  const QuantizeProblem& p = c.call.entry;
  other.x = random_words(c.call.batch * p.m * p.k, p.x_dtype);
  if (!c.seed.empty()) other.seed = random_seed(c.call);
  other.group_sizes.clear();
  for (int64_t i = 0; c.call.grouped && i < c.call.batch; ++i) {
    const std::vector<int32_t> sizes = random_sizes(p.m, c.call.groups);
    other.group_sizes.insert(other.group_sizes.end(), sizes.begin(), sizes.end());
  }
  other.row_amax = random_amaxes(amax_count(c.call, true));
  other.column_amax = random_amaxes(amax_count(c.call, false));
  return other;
}

cudaGraphExec_t capture(const DeviceCall& call, const Case& c, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
  check_launch(call.launch(stream), c);
  check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
  check_cuda(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
  check_cuda(cudaGraphDestroy(graph), "graph");
  return replay;
}

// ---- Dequantize ------------------------------------------------------------------------------

bool is_nan(uint32_t word, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return (word & kMagnitude) > kInfBits;
    case DType::kBF16:
      return (word & 0x7FFFu) > 0x7F80u;
    case DType::kF16:
      return (word & 0x7FFFu) > 0x7C00u;
  }
  return false;
}

void test_dequantize(const Case& c, const Form& form, const StoredForm& stored, int64_t extent,
                     cudaStream_t stream) {
  DequantizeProblem d = {};
  d.row_scaled = c.call.entry.row_scaled;
  d.bound = chance(0.5) ? 256 : 448;
  d.batch = c.call.batch;
  d.rows = stored.rows;
  d.blocks = stored.blocks;
  d.extent = chance(0.5) ? extent : d.blocks * kBlock;
  d.out_dtype = static_cast<DType>(draw(0, 2));
  d.codes = form.codes.data();
  d.block_scale = form.block_scale.data();
  d.amax = chance(0.3) ? nullptr : form.amax.data();
  const size_t width = width_of(d.out_dtype);
  Bytes expected(static_cast<size_t>(d.batch * d.rows * d.extent) * width);
  d.out = expected.data();
  TestPool pool(2, false);
  PoolExecutor<TestPool> executor(pool);
  dequantize(kernels(), executor, d);

  Buffer codes(form.codes.size()), scale(form.block_scale.size()), amax(4 * form.amax.size());
  Buffer out(expected.size());
  codes.put(form.codes.data());
  scale.put(form.block_scale.data());
  amax.put(form.amax.data());
  DequantizeProblem g = d;
  g.codes = codes.as<uint8_t>();
  g.block_scale = scale.as<uint8_t>();
  g.amax = d.amax == nullptr ? nullptr : amax.as<float>();
  g.out = out.as<void>();
  check_launch(cuda::launch_dequantize(g, nullptr, stream), c);
  check_cuda(cudaStreamSynchronize(stream), "dequantize");
  const Bytes got = out.get();
  for (size_t i = 0; i < got.size(); i += width) {
    uint32_t a = 0, b = 0;
    std::memcpy(&a, &got[i], width);
    std::memcpy(&b, &expected[i], width);
    check(a == b || (is_nan(a, d.out_dtype) && is_nan(b, d.out_dtype)), "dequantized values");
  }
}

// ---- Activations -----------------------------------------------------------------------------

float value_of(const uint8_t* word, DType dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, word, width_of(dtype));
  switch (dtype) {
    case DType::kF32:
      return from_bits(bits);
    case DType::kBF16:
      return from_bits(bits << 16);
    case DType::kF16: {
      const int exponent = static_cast<int>(bits >> 10) & 31;
      const float fraction = static_cast<float>(bits & 1023u) * 0x1p-10f;
      const float most = fraction == 0 ? INFINITY : NAN;
      const float size = exponent == 0    ? std::ldexp(fraction, -14)
                         : exponent == 31 ? most
                                          : std::ldexp(1 + fraction, exponent - 15);
      return (bits >> 15) != 0 ? -size : size;
    }
  }
  return 0;
}

// An argument, as a word, at which sigmoid is 0, .5 or 1 and tanh of a 25th is -1, 0 or 1.
void put_saturated(uint8_t* word, DType dtype) {
  const uint32_t exponent = static_cast<uint32_t>(draw(9, 14)), negative = chance(0.4);
  uint32_t bits = 0;
  if (dtype == DType::kF16) bits = negative << 15 | (exponent + 15) << 10;
  if (dtype == DType::kBF16) bits = negative << 15 | (exponent + 127) << 7;
  if (dtype == DType::kF32) bits = negative << 31 | (exponent + 127) << 23;
  if (chance(0.1)) bits = 0;
  std::memcpy(word, &bits, width_of(dtype));
}

float saturated_sigmoid(float x) { return x > 1 ? 1.0f : x < -1 ? 0.0f : 0.5f; }
float saturated_tanh(float x) { return x > 1 ? 1.0f : x < -1 ? -1.0f : 0.0f; }

float activated(const cuda::ActivatedInput& a, float x, float linear) {
  switch (a.kind) {
    case Activation::kNone:
      break;
    case Activation::kSwiglu:
    case Activation::kGeglu:
      return x * saturated_sigmoid(x) * linear;
    case Activation::kClampedQgeglu: {
      const float gate = std::min(x, a.limit);
      const float clipped = linear < -a.limit ? -a.limit : linear > a.limit ? a.limit : linear;
      return gate * saturated_sigmoid(gate) * (clipped + a.offset);
    }
    case Activation::kSituGlu:
      return a.beta1 * saturated_tanh(x) * saturated_sigmoid(x) *
             (a.beta2 * saturated_tanh(linear));
    case Activation::kSilu:
    case Activation::kGelu:
      return x * saturated_sigmoid(x);
    case Activation::kRelu:
      return x <= 0 ? 0 : x;
    case Activation::kSquaredRelu:
      return x <= 0 ? 0 : x * x;
  }
  return x;
}

void test_activation(cudaStream_t stream) {
  Case c = random_case(chance(0.6));
  QuantizeProblem& p = c.call.entry;
  Made made;
  made.input.kind = static_cast<Activation>(draw(1, 8));
  made.input.limit = 100;
  made.input.alpha = 1.702f;
  made.input.offset = 1;
  made.input.beta1 = 4;
  made.input.beta2 = 25;
  made.h_dtype = p.x_dtype;
  const bool gated = made.input.kind <= kLastGated;
  const bool any =
      made.input.kind == Activation::kRelu || made.input.kind == Activation::kSquaredRelu;
  const int64_t rows = c.call.batch * p.m, columns = gated ? 2 * p.k : p.k;
  const size_t width = width_of(made.h_dtype);
  made.h = random_words(rows * columns, made.h_dtype);
  const bool weighted = chance(0.5);
  for (int64_t row = 0; weighted && row < rows; ++row) made.weights.push_back(random_value(0));
  std::vector<float> x;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < p.k; ++column) {
      uint8_t* gate = &made.h[static_cast<size_t>(row * columns + column) * width];
      uint8_t* linear = gated ? gate + static_cast<size_t>(p.k) * width : gate;
      if (!any) put_saturated(gate, made.h_dtype);
      if (made.input.kind == Activation::kSituGlu) put_saturated(linear, made.h_dtype);
      const float value =
          activated(made.input, value_of(gate, made.h_dtype), value_of(linear, made.h_dtype));
      x.push_back(made.weights.empty() ? value : value * made.weights[static_cast<size_t>(row)]);
    }
  p.x_dtype = DType::kF32;
  c.x.resize(4 * x.size());
  if (!x.empty()) std::memcpy(c.x.data(), x.data(), c.x.size());
  DeviceCall call(c, p.row.wanted ? static_cast<Values>(draw(0, 2)) : Values::kNone, &made);
  call.put(c, &made);
  check_cuda(cudaDeviceSynchronize(), "synchronize");
  check_launch(call.launch(stream), c);
  check_cuda(cudaDeviceSynchronize(), "activate and quantize");
  call.compare(c);
}

// ---- Cases -----------------------------------------------------------------------------------

// Two cases at once, or on one stream and one scratch; then the replays.
void test_pair(cudaStream_t streams[2]) {
  Case cases[2];
  std::vector<DeviceCall*> calls;
  for (Case& c : cases) {
    c = random_case(chance(0.6));
    const bool row = c.call.entry.row.wanted;
    calls.push_back(new DeviceCall(c, row ? static_cast<Values>(draw(0, 2)) : Values::kNone));
    calls.back()->put(c);
  }
  const bool apart = chance(0.5);
  const Buffer scratch(std::max(calls[0]->scratch_bytes(), calls[1]->scratch_bytes()));
  check_cuda(cudaDeviceSynchronize(), "synchronize");
  for (int i = 0; i < 2; ++i)
    check_launch(
        apart ? calls[i]->launch(streams[i]) : calls[i]->launch(streams[0], scratch.as<void>()),
        cases[i]);
  check_cuda(cudaDeviceSynchronize(), "quantize");
  scratch.get();
  for (int i = 0; i < 2; ++i) calls[i]->compare(cases[i]);
  for (int i = 0; i < 2; ++i) {
    const cudaGraphExec_t replay = capture(*calls[i], cases[i], streams[i]);
    const Case other = redrawn(cases[i]);
    calls[i]->put(other);
    check_cuda(cudaDeviceSynchronize(), "synchronize");
    check_cuda(cudaGraphLaunch(replay, streams[i]), "replay");
    check_cuda(cudaDeviceSynchronize(), "replayed");
    calls[i]->compare(other);
    check_cuda(cudaGraphExecDestroy(replay), "graph");
    delete calls[i];
    if (cases[i].call.grouped) continue;
    const Result forms = run(cases[i], kernels(), kPoison, 1, false);
    const QuantizeProblem& p = cases[i].call.entry;
    if (p.row.wanted) test_dequantize(cases[i], forms.row, p.row, p.k, streams[i]);
    if (p.column.wanted) test_dequantize(cases[i], forms.column, p.column, p.m, streams[i]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int pairs = argc > 1 ? std::atoi(argv[1]) / 2 : 200;
  random_engine.seed(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 1);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams)
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  for (int i = 0; i < pairs; ++i) {
    test_pair(streams);
    test_activation(streams[i % 2]);
  }
  std::printf("fuzz_cuda: %d cases, and their replays, are equal bit for bit\n", 2 * pairs);
  return 0;
}
