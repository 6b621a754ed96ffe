// The blocks of a launch.
#pragma once

#include <cstdint>
#include <limits>

namespace rwkv_jax::cuda {

// How many blocks a launch has along each axis, and how many of them, one after another along the first axis,
// make a cluster.
struct Grid {
  int64_t x, y = 1, z = 1;
  int cluster = 1;

  Grid(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}

  Grid InClustersOf(int blocks) const {
    Grid grid = *this;
    grid.cluster = blocks;
    return grid;
  }

  // Whether a GPU can launch it. CUDA takes 32 bits of each number.
  bool Fits() const {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max(), kMostOfOthers = 65535;
    return 0 < x && x <= kMost && 0 < y && y <= kMostOfOthers && 0 < z && z <= kMostOfOthers &&
           x % cluster == 0;
  }
};

}  // namespace rwkv_jax::cuda
