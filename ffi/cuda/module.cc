#include "rwkv_jax/module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "handler.h"
#include "rwkv_jax/decoding.h"

NB_MODULE(_cuda, module) {
  using rwkv_jax::cuda::Cuda;
  rwkv_jax::Export<Cuda>(module);
  module.def("device", Cuda::DeviceOf, nanobind::arg("ordinal"));
  module.def(
      "limit_devices",
      [](int64_t multiprocessors, int64_t shared_memory, bool hopper) {
        rwkv_jax::cuda::device_limits = {multiprocessors, shared_memory};
        rwkv_jax::cuda::hopper_allowed = hopper;
      },
      nanobind::arg("multiprocessors"), nanobind::arg("shared_memory"), nanobind::arg("hopper"));
  module.def("block_scratch", rwkv_jax::BlockScratchFloats, nanobind::kw_only(),
             nanobind::arg("dtype"), nanobind::arg("rows"), nanobind::arg("width"),
             nanobind::arg("hidden"), nanobind::arg("ranks"));
}
