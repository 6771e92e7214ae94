// The steps of quantize_float8.cu on the host: a loop over tiles, in each a loop over the threads
// for every step, where the kernel has its threads and barriers. tests/test_float8_tiles.py calls
// it, and compares with the specification in NumPy. Codes are made by float8_encode, where the
// device may have an instruction; everything else, all indices above all, is what the device runs.
#include <vector>

#include "../../xla_ffi/kernels/float8_tile.cuh"

namespace {

using namespace jax_fp4;        // the test of a namespace, in one file
using namespace jax_fp4::cuda;  // NOLINT

template <class Thread>
void by_block(const Float8Problem& p, std::vector<Thread>& threads,
              typename Thread::Shared& shared) {
  for (Thread& t : threads) t.note_peaks(shared);
  for (Thread& t : threads) t.find_peaks(shared);
  if (p.tile > 1) {
    for (Thread& t : threads) t.share_peaks(shared);
    for (Thread& t : threads) t.join_peaks(shared);
  }
  for (Thread& t : threads) t.make_scales(p, shared);
  for (Thread& t : threads) t.encode(p, shared);
}

// The amax of what a tile has, as under a given scale, goes to p.row.amax.
template <class Thread>
void by_tensor(const Float8Problem& p, std::vector<Thread>& threads,
               typename Thread::Shared& shared) {
  for (Thread& t : threads) t.note_peaks(shared);
  for (Thread& t : threads) t.find_peaks(shared);
  const int64_t entry = threads[0].tile.entry;
  auto* amax = reinterpret_cast<uint32_t*>(p.row.amax) + entry;
  for (int i = 0; i < kFloat8Tile; ++i)
    *amax = Lanes<float>::greater(*amax, stored_amax<float>(threads[i].peak[0]));
  for (Thread& t : threads) t.encode(p, p.given_scale[entry]);
}

template <DType dtype, Float8Codes codes, int kLength>
void run_tiles(const Float8Problem& p) {
  using Thread = Float8Thread<dtype, codes, kLength>;
  std::vector<Thread> threads(kFloat8Threads);
  Float8Shared<dtype> shared;
  const int64_t tiles = p.batch * tiles_of(p.m) * tiles_of(p.k);
  for (int64_t number = 0; number < tiles; ++number) {
    memset(&shared, 0xA5, sizeof(shared));
    for (int i = 0; i < kFloat8Threads; ++i) threads[i].begin(p, static_cast<uint32_t>(number), i);
    if constexpr (kLength == 0)
      by_tensor(p, threads, shared);
    else
      by_block(p, threads, shared);
  }
}

template <DType dtype, Float8Codes codes>
void run_scaling(const Float8Problem& p) {
  switch (p.scaling) {
    case Float8Scaling::kMxfp8:
      return run_tiles<dtype, codes, 32>(p);
    case Float8Scaling::kBlock:
      return run_tiles<dtype, codes, 128>(p);
    case Float8Scaling::kTensor:
      return run_tiles<dtype, codes, 0>(p);
  }
}

template <DType dtype>
void run_codes(const Float8Problem& p) {
  if (p.codes == Float8Codes::kE4M3) return run_scaling<dtype, Float8Codes::kE4M3>(p);
  return run_scaling<dtype, Float8Codes::kE5M2>(p);
}

}  // namespace

// Null codes: a form that is not wanted. Under one scale a tensor `given` is what x is multiplied
// by, and the scales are not written.
extern "C" void emulate_float8(const void* x, const int32_t attributes[5], const int64_t extents[3],
                               int32_t power_of_two, float eps, const float* given, uint8_t* codes,
                               void* scale, uint8_t* codes_t, void* scale_t, float* amax) {
  Float8Problem p = {};
  p.x = x;
  p.x_dtype = static_cast<DType>(attributes[0]);
  p.compute = static_cast<DType>(attributes[1]);
  p.scaling = static_cast<Float8Scaling>(attributes[2]);
  p.codes = static_cast<Float8Codes>(attributes[3]);
  p.tile = attributes[4];
  p.batch = extents[0];
  p.m = extents[1];
  p.k = extents[2];
  p.power_of_two = power_of_two != 0;
  p.eps = eps;
  p.given_scale = given;
  const int64_t block = float8_block(p.scaling);
  const auto form = [&](int64_t along, uint8_t* codes_to, void* scale_to) {
    const int64_t blocks = ceil_div(along, block);
    return StoredFloat8{codes_to != nullptr, blocks * block, blocks, codes_to, scale_to, amax};
  };
  p.row = form(p.k, codes, scale);
  p.column = form(p.m, codes_t, scale_t);
  switch (held_dtype(p.x_dtype, p.compute)) {
    case DType::kF32:
      return run_codes<DType::kF32>(p);
    case DType::kBF16:
      return run_codes<DType::kBF16>(p);
    case DType::kF16:
      return run_codes<DType::kF16>(p);
  }
}
