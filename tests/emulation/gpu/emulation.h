// Takes the place of ../cpu/emulation.h where a GPU runs the kernels. It is included before anything
// else, so that host code sees the emulated device, which has no more than the real one.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "device.h"

namespace emulation {

inline void Seed(unsigned) {}

// Memory that CPU and GPU share, of exactly so many bytes, so that compute-sanitizer sees every
// access outside.
class Memory {
 public:
  explicit Memory(size_t bytes) { cudaMallocManaged(&data_, bytes == 0 ? 1 : bytes); }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  void* data() const { return data_; }
  bool Intact() const { return true; }

 private:
  void* data_ = nullptr;
};

// Waits for all kernels; the text of their error, if there is one.
inline std::string Finish() {
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// Every launch sets the attribute.
template <typename Kernel>
static cudaError_t SetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  if (!Records(__BASE_FILE__, value)) return cudaErrorInvalidValue;
  return cudaFuncSetAttribute(kernel, attribute, value);
}

inline cudaError_t GetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return *value = device.multiprocessors, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = device.shared_memory, cudaSuccess;
    default: return cudaDeviceGetAttribute(value, attribute, ordinal);
  }
}

}  // namespace emulation

#define cudaFuncSetAttribute emulation::SetAttribute
#define cudaDeviceGetAttribute emulation::GetAttribute
