// The device that host code sees and the launches that it has asked for, the same for both variants of
// emulation.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulation {

// The bytes of shared memory are the most that a block can have.
struct Device {
  int64_t multiprocessors, shared_memory;
};
inline Device device = {132, 232448};

// With it, launches are recorded, and no kernel runs.
inline bool dry = false;

// How often CUDA has been asked about a kernel, or told to set an attribute.
inline int asked = 0;

// What a launch asks of a device: `file` is the source of the kernel, and `bytes` are those of shared memory
// of a block.
struct Launched {
  std::string file;
  int64_t x, y, z, threads, bytes, cluster;
};
inline std::vector<Launched> launched;

// Records a launch; whether a GPU would take it.
inline bool Records(const Launched& launch) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1, kMostOfOtherAxes = 65535;
  const auto within = [](int64_t x, int64_t most) { return 0 < x && x <= most; };
  if (!within(launch.x, kMostBlocks) || !within(launch.y, kMostOfOtherAxes) ||
      !within(launch.z, kMostOfOtherAxes) || !within(launch.threads, 1024) ||
      launch.threads % 32 != 0 || launch.bytes < 0 || launch.bytes > device.shared_memory ||
      !within(launch.cluster, 8) || launch.x % launch.cluster != 0)
    return false;
  launched.push_back(launch);
  return true;
}

}  // namespace emulation
