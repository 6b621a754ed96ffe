// The CUDA handlers and kernels as a Python module: numpy arrays take the place of XLA's buffers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulation.h"
#include "handler.h"
#include "layers/kernels.h"
#include "rwkv_jax/decoding.h"
#include "rwkv_jax/description.h"
#include "rwkv_jax/targets.h"

// XLA's type for an error, which only its owner defines.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

namespace py = pybind11;
using rwkv_jax::cuda::Cuda;

// What XLA offers to a handler, as far as the handlers use it.
XLA_FFI_Api Api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->errc, args->message};
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = emulation::Stream();
    return nullptr;
  };
  return api;
}

// As XLA writes them.
const char* Name(XLA_FFI_Error_Code code) {
  switch (code) {
    case XLA_FFI_Error_Code_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case XLA_FFI_Error_Code_INTERNAL: return "INTERNAL";
    case XLA_FFI_Error_Code_UNIMPLEMENTED: return "UNIMPLEMENTED";
    default: return "UNKNOWN";
  }
}

XLA_FFI_DataType TypeOf(const py::array& array) {
  static const std::map<std::string, XLA_FFI_DataType> types = {
      {"bfloat16", XLA_FFI_DataType_BF16}, {"float16", XLA_FFI_DataType_F16},
      {"float32", XLA_FFI_DataType_F32},   {"int32", XLA_FFI_DataType_S32},
      {"uint32", XLA_FFI_DataType_U32},    {"uint8", XLA_FFI_DataType_U8},
      {"int8", XLA_FFI_DataType_S8}};
  const std::string name = py::str(array.dtype().attr("name"));
  const auto found = types.find(name);
  if (found == types.end()) throw py::type_error("no handler takes an array of " + name);
  return found->second;
}

// Arrays as a handler gets them: copies in the memory of the device. Results may be operands as well. Where no
// kernel runs there are no copies, and arrays of any size may be views of one number.
class Buffers {
 public:
  void AddOperand(const py::array& array) {
    const auto memory = Add(array);
    if (memory->size() > 0) memory->Write(array.data());
  }
  // Its memory holds nothing but poison.
  void AddResult(const py::array& array) { Add(array); }
  // Each one's buffer from a number on.
  std::vector<void*> From(size_t first) {
    std::vector<void*> pointers;
    for (size_t i = first; i < buffers_.size(); ++i) pointers.push_back(&buffers_[i]);
    return pointers;
  }
  // What a handler has made of them, the first `operands` of which it may not change unless they are
  // results.
  void Finish(size_t operands) {
    if (emulation::dry) return;
    for (size_t i = operands; i < arrays_.size(); ++i)
      arrays_[i].second->Read(arrays_[i].first.mutable_data());
    for (size_t i = 0; i < arrays_.size(); ++i) {
      const auto& [array, memory] = arrays_[i];
      const bool operand = i < operands;
      const std::string name =
          operand ? "operand " + std::to_string(i) : "result " + std::to_string(i - operands);
      if (operand && !Holds(*memory, array)) throw std::runtime_error(name + " was changed");
      if (!memory->Intact()) throw std::runtime_error("memory around " + name + " was written");
    }
  }

 private:
  static bool Holds(const emulation::Memory& memory, const py::array& array) {
    std::vector<unsigned char> bytes(memory.size());
    memory.Read(bytes.data());
    return std::memcmp(array.data(), bytes.data(), bytes.size()) == 0;
  }
  std::shared_ptr<emulation::Memory> Add(const py::array& array) {
    const size_t bytes = emulation::dry ? 0 : array.nbytes();
    if (bytes > 0 && !(array.flags() & py::array::c_style))
      throw py::value_error("an array is not dense");
    std::shared_ptr<emulation::Memory>& memory = memories_[bytes == 0 ? nullptr : array.data()];
    if (memory == nullptr || bytes == 0) memory = std::make_shared<emulation::Memory>(bytes);
    auto sizes =
        std::make_unique<std::vector<int64_t>>(array.shape(), array.shape() + array.ndim());
    void* const data = emulation::dry ? const_cast<void*>(array.data()) : memory->data();
    buffers_.push_back(
        {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, TypeOf(array), data, array.ndim(), sizes->data()});
    arrays_.push_back({array, memory});
    sizes_.push_back(std::move(sizes));
    return memory;
  }

  std::map<const void*, std::shared_ptr<emulation::Memory>> memories_;
  std::vector<std::pair<py::array, std::shared_ptr<emulation::Memory>>> arrays_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> sizes_;
  std::vector<XLA_FFI_Buffer> buffers_;
};

XLA_FFI_Handler* HandlerOf(const std::string& target) {
  static const std::vector<rwkv_jax::Registration> targets = Cuda::Targets();
  for (const auto& [name, handler] : targets)
    if (name == target) return handler;
  throw py::key_error(target);
}

void Call(const std::string& target, const std::vector<py::array>& operands,
          const std::vector<py::array>& results, std::map<std::string, int64_t> attributes) {
  static const XLA_FFI_Api api = Api();
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;

  Buffers buffers;
  for (const py::array& array : operands) buffers.AddOperand(array);
  for (const py::array& array : results) buffers.AddResult(array);
  std::vector<void*> args = buffers.From(0), rets = buffers.From(operands.size());
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()),
                arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                ret_types.data(), rets.data()};

  // A map is sorted by name, as a handler expects attributes to be.
  const size_t count = attributes.size();
  std::vector<XLA_FFI_AttrType> attribute_types(count, XLA_FFI_AttrType_SCALAR);
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_Scalar> scalars;
  for (auto& [name, value] : attributes) {
    names.push_back({name.data(), name.size()});
    scalars.push_back({XLA_FFI_DataType_S64, &value});
  }
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> values;
  for (size_t i = 0; i < count; ++i) {
    name_pointers.push_back(&names[i]);
    values.push_back(&scalars[i]);
  }
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,   nullptr,
                 static_cast<int64_t>(count), attribute_types.data(),
                 name_pointers.data(),        values.data()};

  emulation::Begin();
  const std::unique_ptr<XLA_FFI_Error> error(HandlerOf(target)(&frame));
  const std::string failure = emulation::Finish();
  if (cudaGetLastError() != cudaSuccess) throw std::logic_error("an error stays behind");
  if (error != nullptr)
    throw std::runtime_error(std::string(Name(error->code)) + ": " + error->message);
  if (!failure.empty()) throw std::runtime_error(failure);
  buffers.Finish(operands.size());
}

// Where the gaps behind the parts of a scratch begin, of which each begins where the next part or the end is.
std::vector<int64_t> GapsBefore(const std::vector<int64_t>& next) {
  std::vector<int64_t> gaps;
  for (const int64_t end : next)
    if (end >= rwkv_jax::kScratchGap) gaps.push_back(end - rwkv_jax::kScratchGap);
  return gaps;
}

std::vector<int64_t> BlockGaps(int64_t dtype, int64_t rows, int64_t width, int64_t hidden,
                               int64_t ranks) {
  const auto scratch = rwkv_jax::BlockScratchOf(dtype, rows, width, hidden, ranks);
  return GapsBefore({scratch.normalised, scratch.mixed, scratch.low_rank, scratch.read,
                     scratch.between, scratch.hidden, scratch.sums, scratch.tickets,
                     scratch.floats});
}

// Those of an operator that has `floats` of scratch. Backwards, the kernel that goes token by token has the
// memory of transitions and gradients, too, where it stands in for the kernels on matrix units.
std::vector<int64_t> OperatorGaps(const rwkv_jax::Problem& problem, int64_t floats) {
  rwkv_jax::cuda::Device device;
  rwkv_jax::cuda::CurrentDevice(device);
  const auto plan = rwkv_jax::cuda::MakePlan(device, problem, floats);
  if (problem.op == rwkv_jax::Op::kWkv4) return GapsBefore({plan.sums, plan.scratch});
  if (plan.matrix_units && problem.pass == rwkv_jax::Pass::kBackward && plan.replay_floats > 0)
    return GapsBefore({plan.sums, plan.replay});
  return GapsBefore({plan.sums, plan.replay, plan.gradients, plan.scratch});
}

rwkv_jax::Problem ProblemOf(const std::string& op, const std::string& pass,
                            const py::kwargs& fields) {
  return rwkv_jax::ReadProblem(op, pass,
                               [&](const char* name) { return py::cast<int64_t>(fields[name]); });
}

}  // namespace

PYBIND11_MODULE(rwkv_jax_emulation, module) {
  module.def("call", &Call);
  module.def("seed", &emulation::Seed, "Draws the order of warps anew.");
  module.def("set_device", [](int64_t multiprocessors, int64_t shared_memory, bool hopper) {
    emulation::device = {multiprocessors, shared_memory};
    rwkv_jax::cuda::device_limits = {multiprocessors, shared_memory};
    rwkv_jax::cuda::hopper_allowed = hopper;
  });
  module.def(
      "asked", [] { return std::exchange(emulation::asked, 0); },
      "How often the attributes of a kernel have been asked for or set since the last call.");
  module.def(
      "set_dry", [](bool dry) { emulation::dry = dry; },
      "Whether handlers launch kernels without any of them running.");
  module.def(
      "launches",
      [] {
        py::list launches;
        for (const auto& [file, x, y, z, threads, bytes, cluster] :
             std::exchange(emulation::launched, {}))
          launches.append(py::make_tuple(file, py::make_tuple(x, y, z), threads, bytes, cluster));
        return launches;
      },
      "The launches since the last call: the source file of the kernel, the blocks along each "
      "axis, and of a "
      "block the threads and the bytes of shared memory, and the blocks of a cluster.");

  module.def("targets", [] {
    std::vector<std::string> names;
    for (const auto& [name, handler] : Cuda::Targets()) names.push_back(name);
    return names;
  });
  module.def(
      "layer_constants",
      [] {
        using rwkv_jax::Code, rwkv_jax::Origin;
        return rwkv_jax::Description{{"run", rwkv_jax::kRun},
                                     {"max_width", rwkv_jax::cuda::kMaxLayerWidth},
                                     {"max_mixes", int64_t{rwkv_jax::kMaxMixes}},
                                     {"layer_norm_eps", double{rwkv_jax::kLayerNormEps}},
                                     {"group_norm_eps", double{rwkv_jax::kGroupNormEps}},
                                     {"unit_length_eps", double{rwkv_jax::kUnitLengthEps}},
                                     {"origin_token", Code(Origin::kToken)},
                                     {"origin_nothing", Code(Origin::kNothing)},
                                     {"origin_state", Code(Origin::kState)}};
      },
      "What the layer functions share with Python.");

  // As ffi/cuda/module.cc and rwkv_jax/module.h export them.
  module.def("constants", [] { return rwkv_jax::Constants(Cuda::kMaxHeadSize); });
  module.def("device", &Cuda::DeviceOf, py::arg("ordinal"));
  module.def("block_gaps", &BlockGaps, py::kw_only(), py::arg("dtype"), py::arg("rows"),
             py::arg("width"), py::arg("hidden"), py::arg("ranks"),
             "Where the scratch of a block has 64 numbers that belong to none of its parts.");
  module.def(
      "gaps",
      [](const std::string& op, const std::string& pass, int64_t floats,
         const py::kwargs& problem) { return OperatorGaps(ProblemOf(op, pass, problem), floats); },
      py::arg("op"), py::arg("pass"), py::arg("floats"), "The same for an operator.");
  module.def("block_scratch", &rwkv_jax::BlockScratchFloats, py::kw_only(), py::arg("dtype"),
             py::arg("rows"), py::arg("width"), py::arg("hidden"), py::arg("ranks"));
  module.def("scratch",
             [](const std::string& op, const std::string& pass, const py::kwargs& problem) {
               return Cuda::ScratchFloats(ProblemOf(op, pass, problem));
             });
  module.def(
      "plan",
      [](const std::string& op, const std::string& pass, int64_t multiprocessors,
         int64_t shared_memory, const py::kwargs& problem) {
        return Cuda::PlanOf(multiprocessors, shared_memory, ProblemOf(op, pass, problem));
      },
      py::arg("op"), py::arg("pass"), py::kw_only(), py::arg("multiprocessors"),
      py::arg("shared_memory"));
  module.def("has_transition", [](const std::string& op, const py::kwargs& problem) {
    return Cuda::HasTransition(ProblemOf(op, "transition", problem));
  });
}
