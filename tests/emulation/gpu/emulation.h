// Takes the place of ../cpu/emulation.h where a GPU runs the kernels.
#pragma once

#include <cuda_runtime.h>

namespace emulation {

inline struct {
  void seed(unsigned) {}
} random;

}  // namespace emulation
