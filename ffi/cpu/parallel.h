// Work shared with XLA's thread pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "rwkv_jax/ffi.h"

namespace rwkv_jax::cpu {

// Calls body(worker, item) for each of `items` items, with at most `workers` calls at a time,
// each with its own worker number. The caller is worker 0 and does whatever the pool does not come
// to: it waits for items under way but never for the pool, so a busy pool cannot block it.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t workers, int64_t items, const Body& body) {
  struct Progress {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };
  // Shared, because a worker may start after the caller has left.
  const auto progress = std::make_shared<Progress>();
  const auto work = [progress, items, &body](int64_t worker) {
    int64_t done = 0;
    for (int64_t item; (item = progress->next++) < items; ++done) body(worker, item);
    if (done == 0) return;
    const std::lock_guard<std::mutex> lock(progress->mutex);
    if ((progress->done += done) == items) progress->all_done.notify_all();
  };
  for (int64_t worker = 1; worker < workers && worker < items; ++worker)
    pool.Schedule([work, worker] { work(worker); });
  work(0);
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, [&] { return progress->done == items; });
}

}  // namespace rwkv_jax::cpu
