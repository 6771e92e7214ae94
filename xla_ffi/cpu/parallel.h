// Items of work over a pool that may be busy, tiny, or the very pool that the caller runs in.
//
// The caller takes items like everybody else, so the work ends even if no task ever starts; it then
// waits only for items that somebody has begun. A task that starts late finds the counter spent and
// touches nothing but the shared state, which it owns a share of.
#ifndef JAX_FP4_XLA_FFI_CPU_PARALLEL_H_
#define JAX_FP4_XLA_FFI_CPU_PARALLEL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

#include "float_mode.h"

namespace jax_fp4 {

// Runs work(begin, end) over ranges that cover [0, items). `work` must not throw.
class Executor {
 public:
  virtual ~Executor() = default;

  template <class Work>
  void run(int64_t items, const Work& work) {
    run(items, &work, [](const void* data, int64_t begin, int64_t end) {
      (*static_cast<const Work*>(data))(begin, end);
    });
  }

 protected:
  using Function = void (*)(const void* work, int64_t begin, int64_t end);
  virtual void run(int64_t items, const void* work, Function function) = 0;
};

class Shared {
 public:
  using Function = void (*)(const void* work, int64_t begin, int64_t end);

  Shared(int64_t items, int64_t grain, const void* work, Function function)
      : items_(items), grain_(grain), work_(work), function_(function) {}

  // Takes ranges until none is left.
  void help() {
    const ExactFloatMode mode;
    for (;;) {
      const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= items_) return;
      const int64_t end = begin + grain_ < items_ ? begin + grain_ : items_;
      function_(work_, begin, end);
      finish(end - begin);
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == items_; });
  }

 private:
  void finish(int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += count;
    if (done_ == items_) all_done_.notify_one();
  }

  const int64_t items_, grain_;
  const void* const work_;  // dead once all items are done, like function_'s captures
  const Function function_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;  // guarded by mutex_
};

// Pool needs num_threads() and Schedule(callable).
template <class Pool>
class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(Pool& pool) : pool_(pool) {}

 protected:
  void run(int64_t items, const void* work, Function function) override {
    if (items <= 0) return;
    const int64_t threads = pool_.num_threads();
    const int64_t grain = items / (threads * 8 + 1) + 1;
    const int64_t helpers =
        (threads < (items + grain - 1) / grain ? threads : (items + grain - 1) / grain) - 1;
    std::shared_ptr<Shared> shared;
    try {
      if (helpers > 0) shared = std::make_shared<Shared>(items, grain, work, function);
      for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([shared] { shared->help(); });
    } catch (const std::bad_alloc&) {
      // fewer helpers: the caller does what is left
    }
    if (shared != nullptr) {
      shared->help();
      shared->wait();
    } else {
      const ExactFloatMode mode;
      function(work, 0, items);
    }
  }

 private:
  Pool& pool_;
};

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_PARALLEL_H_
