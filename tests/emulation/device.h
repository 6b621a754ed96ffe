// The device that host code sees and the kernels that it has launched, the same for both variants of
// emulation.h.
#pragma once

#include <string>
#include <vector>

namespace emulation {

struct Device {
  int multiprocessors, shared_memory;  // the latter in bytes, the most that a block can have
};
inline Device device = {132, 232448};

inline std::vector<std::string> launched;  // the source files of the kernels

// A launch of a kernel in `file` whose blocks have so many bytes of shared memory; whether the device has
// as many.
inline bool Records(const char* file, int shared_memory) {
  if (shared_memory > device.shared_memory) return false;
  launched.emplace_back(file);
  return true;
}

}  // namespace emulation
