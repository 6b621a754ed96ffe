// Answers of CUDA that are kept for all threads.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace rwkv_jax::cuda {

// Answers by device and key. An object of this class is never destroyed, since threads may launch kernels until
// the process ends.
template <typename Key, typename Answer>
class AskedOnce {
 public:
  // The answer for a key on the current device, which ask(answer, device) finds the first time. Where that
  // fails, it is asked again the next time.
  template <typename Ask>
  cudaError_t Get(const Key& key, Answer& answer, Ask&& ask) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const std::pair<int, Key> of_device(device, key);
    {
      const std::shared_lock lock(mutex_);
      if (const auto known = answers_.find(of_device); known != answers_.end()) {
        answer = known->second;
        return cudaSuccess;
      }
    }
    error = ask(answer, device);
    if (error != cudaSuccess) return error;
    const std::unique_lock lock(mutex_);
    answers_.emplace(of_device, answer);
    return cudaSuccess;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<int, Key>, Answer> answers_;
};

}  // namespace rwkv_jax::cuda
