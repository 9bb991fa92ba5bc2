#include "bagualu/sim/parallel_tasks.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

namespace bagualu {

void run_tasks(int threads, int64_t count, const std::function<void(int worker, int64_t i)>& task) {
  const int workers =
      static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1)));
  if (workers == 1) {
    for (int64_t i = 0; i < count; ++i) task(0, i);
    return;
  }
  // Tasks are handed out in order, so when one throws, all with lower numbers have been handed out
  // and are finished: the lowest that throws is the same for any number of threads.
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  int64_t error_at = std::numeric_limits<int64_t>::max();
  const auto work = [&](int worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        task(worker, i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < error_at) {
          error_at = i;
          error = std::current_exception();
        }
        next.store(count);
      }
    }
  };
  std::vector<std::jthread> pool;
  for (int worker = 1; worker < workers; ++worker) pool.emplace_back(work, worker);
  work(0);
  pool.clear();
  if (error) std::rethrow_exception(error);
}

}  // namespace bagualu
