// Takes the place of ../cpu/emulation.h where a GPU runs the kernels. It is included before anything
// else, so that the launches of host code are seen.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

namespace emulation {

inline void Seed(unsigned) {}

inline cudaStream_t Stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    return made;
  }();
  return stream;
}

// Memory of the GPU, of exactly so many bytes, so that compute-sanitizer sees every access outside. What the host
// writes into it is there late (see Begin). The rest is 0xff; for initcheck, which would take that for values, it
// is left as it is allocated where the variable of the environment is set.
class Memory {
 public:
  explicit Memory(size_t bytes) : size_(bytes), data_(Allocated(bytes)) {
    static const bool left = std::getenv("RWKV_JAX_EMULATION_INITCHECK") != nullptr;
    if (!left) cudaMemset(data_, 0xff, size_);
    all.push_back(this);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    all.erase(std::find(all.begin(), all.end(), this));
    cudaFree(data_), cudaFree(later_);
  }
  void* data() const { return data_; }
  void* later() const { return later_; }
  size_t size() const { return size_; }
  void Write(const void* from) {
    if (later_ == nullptr) later_ = Allocated(size_);
    cudaMemcpy(later_, from, size_, cudaMemcpyHostToDevice);
    cudaMemset(data_, 0xff, size_);
  }
  void Read(void* to) const { cudaMemcpy(to, data_, size_, cudaMemcpyDeviceToHost); }
  bool Intact() const { return true; }

 private:
  static void* Allocated(size_t bytes) {
    void* data = nullptr;
    cudaMalloc(&data, bytes == 0 ? 1 : bytes);
    return data;
  }

  size_t size_;
  void *data_, *later_ = nullptr;

 public:
  static inline std::vector<Memory*> all;
};

// Lets the next kernel start at once, and writes the contents of memory 200 microseconds later.
struct Piece {
  const unsigned char* from;
  unsigned char* to;
  size_t bytes;
};
static __global__ void ProduceKernel(const Piece* pieces, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < 200000);
  for (int i = 0; i < count; ++i)
    for (size_t j = threadIdx.x; j < pieces[i].bytes; j += blockDim.x)
      pieces[i].to[j] = pieces[i].from[j];
}

// A call begins: a kernel just before it writes its operands, late. What reads them before has waited reads
// NaN.
inline void Begin() {
  if (dry) return;
  static Piece* pieces = nullptr;
  constexpr int kMost = 256;
  if (pieces == nullptr) cudaMallocHost(&pieces, kMost * sizeof(Piece));
  int count = 0;
  for (const Memory* memory : Memory::all) {
    if (memory->later() == nullptr) continue;
    if (count == kMost) std::abort();
    pieces[count++] = {static_cast<const unsigned char*>(memory->later()),
                       static_cast<unsigned char*>(memory->data()), memory->size()};
  }
  cudaDeviceSynchronize();
  ProduceKernel<<<1, 256, 0, Stream()>>>(pieces, count);
}

// Waits for all kernels; the text of their error, if there is one.
inline std::string Finish() {
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// An error of CUDA itself.
template <typename Kernel, typename... Arguments>
cudaError_t Refused(cudaLaunchConfig_t config, Kernel* kernel, Arguments&&... arguments) {
  config.dynamicSmemBytes = size_t{1} << 30;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
static cudaError_t LaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                  Arguments&&... arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
  const dim3 blocks = config->gridDim;
  if (!Records({__BASE_FILE__, blocks.x, blocks.y, blocks.z, config->blockDim.x,
                static_cast<int64_t>(config->dynamicSmemBytes), cluster}))
    return Refused(*config, kernel, std::forward<Arguments>(arguments)...);
  if (dry) return cudaSuccess;
  return cudaLaunchKernelEx(config, kernel, std::forward<Arguments>(arguments)...);
}

inline cudaError_t GetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  ++asked;
  return cudaFuncGetAttributes(attributes, kernel);
}

template <typename Kernel>
cudaError_t SetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  ++asked;
  return cudaFuncSetAttribute(kernel, attribute, value);
}
template <typename Kernel>
cudaError_t MaxActiveClusters(int* count, Kernel* kernel, const cudaLaunchConfig_t* config) {
  ++asked;
  return cudaOccupancyMaxActiveClusters(count, kernel, config);
}

inline cudaError_t MemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  return dry ? cudaSuccess : cudaMemsetAsync(to, byte, bytes, stream);
}

}  // namespace emulation

#define cudaFuncGetAttributes emulation::GetAttributes
#define cudaFuncSetAttribute emulation::SetAttribute
#define cudaOccupancyMaxActiveClusters emulation::MaxActiveClusters
#define cudaMemsetAsync emulation::MemsetAsync
#define cudaLaunchKernelEx emulation::LaunchKernelEx
