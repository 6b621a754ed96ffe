#include "rwkv_jax/module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "handler.h"

NB_MODULE(_cuda, module) {
  using rwkv_jax::cuda::Cuda;
  rwkv_jax::Export<Cuda>(module);
  module.def("device", Cuda::DeviceOf, nanobind::arg("ordinal"));
}
