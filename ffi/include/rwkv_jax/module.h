// What a native module exports to Python, by nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <string>
#include <vector>

#include "rwkv_jax/description.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax {

inline Problem ProblemOf(const std::string& op, const std::string& pass,
                         const nanobind::kwargs& fields) {
  if (fields.size() != std::size(kProblemFields))
    throw std::invalid_argument("a problem has " + std::to_string(std::size(kProblemFields)) +
                                " fields; given are " + std::to_string(fields.size()));
  return ReadProblem(op, pass, [&](const char* name) {
    if (!fields.contains(name)) throw std::invalid_argument(std::string(name) + " is missing");
    return nanobind::cast<int64_t>(fields[name]);
  });
}

// `Platform` has its Targets(), and says how a problem is solved: ScratchFloats(problem),
// HasTransition(problem), and PlanOf(multiprocessors, shared_memory, problem).
template <typename Platform>
void Export(nanobind::module_& module) {
  namespace nb = nanobind;
  nb::dict targets;
  for (const auto& [name, handler] : Platform::Targets())
    targets[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
  module.def("registrations", [targets] { return targets; });
  module.def("ffi_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  module.def("constants", [] { return Constants(Platform::kMaxHeadSize); });
  module.def(
      "scratch",
      [](const std::string& op, const std::string& pass, const nb::kwargs& problem) {
        return Platform::ScratchFloats(ProblemOf(op, pass, problem));
      },
      nb::arg("op"), nb::arg("pass"), nb::arg("problem"));
  module.def(
      "plan",
      [](const std::string& op, const std::string& pass, int64_t multiprocessors,
         int64_t shared_memory, const nb::kwargs& problem) {
        return Platform::PlanOf(multiprocessors, shared_memory, ProblemOf(op, pass, problem));
      },
      nb::arg("op"), nb::arg("pass"), nb::kw_only(), nb::arg("multiprocessors"),
      nb::arg("shared_memory"), nb::arg("problem"));
  module.def(
      "has_transition",
      [](const std::string& op, const nb::kwargs& problem) {
        return Platform::HasTransition(ProblemOf(op, "transition", problem));
      },
      nb::arg("op"), nb::arg("problem"));
}

}  // namespace rwkv_jax
