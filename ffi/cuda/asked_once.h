// What CUDA is asked once, and then known.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <shared_mutex>

namespace rwkv_jax::cuda {

// Answers by key, for all threads of the process.
template <typename Key, typename Answer>
class AskedOnce {
 public:
  // The answer for a key, which ask(answer) finds the first time. Where that fails, it is asked again the next
  // time.
  template <typename Ask>
  cudaError_t Get(const Key& key, Answer& answer, Ask&& ask) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto known = answers_.find(key); known != answers_.end()) {
        answer = known->second;
        return cudaSuccess;
      }
    }
    const cudaError_t error = ask(answer);
    if (error != cudaSuccess) return error;
    const std::unique_lock lock(mutex_);
    answers_.emplace(key, answer);
    return cudaSuccess;
  }

 private:
  std::shared_mutex mutex_;
  std::map<Key, Answer> answers_;
};

}  // namespace rwkv_jax::cuda
