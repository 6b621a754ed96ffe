// What a native module tells Python: the XLA FFI version it was built for, and its targets.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <utility>

#include "rwkv_jax/ffi.h"

namespace rwkv_jax {

using Registration = std::pair<const char*, XLA_FFI_Handler*>;

inline void Export(nanobind::module_& module, std::initializer_list<Registration> registrations) {
  namespace nb = nanobind;
  nb::dict targets;
  for (const auto& [name, handler] : registrations)
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  module.def("ffi_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  module.def("registrations", [targets] { return targets; });
}

}  // namespace rwkv_jax
