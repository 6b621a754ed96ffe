// The operands and results of a call, read one after another and checked by name.
#pragma once

#include <array>
#include <cstdint>
#include <sstream>
#include <string>

#include "rwkv_jax/ffi.h"
#include "rwkv_jax/sequences.h"
#include "rwkv_jax/types.h"

namespace rwkv_jax {

// What an array may contain.
enum class Kind {
  kTensor,  // float32, bfloat16 or float16, the same for all tensors of a call
  kFloat,   // float32: a state, a parameter or scratch
  kSaved,   // saved states: float32 or, if the tensors are not, bfloat16
  kMarks,   // uint32
  kInts,    // int32
  kWeight,  // float32, bfloat16, float16 or int8
  kMatrix,  // as a tensor, or int8
};

// Arg and Ret take the next operand or result, check its dtype and its shape, and return its data. Axes
// are letters; a letter has the same size wherever it occurs. After the first error they return null and
// Finish returns that error, so that a handler can read everything first and ask once.
//
// B is the number of rows of tokens, and S the number of sequences of all rows. Without sequences of
// different lengths each row is one sequence, and S stands for B.
class Operands {
 public:
  Operands(std::string op, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t packing = 0)
      : op_(std::move(op)), args_(args), rets_(rets), packing_(static_cast<Packing>(packing)) {
    Require(packing >= 0 && packing <= 2, "packing is ", packing,
            "; expected 0 (none), 1 (marks) or 2 (sequences)");
  }

  const void* Arg(const std::string& name, const std::string& axes, Kind kind) {
    return Next(args_, arg_, name, axes, kind);
  }
  void* Ret(const std::string& name, const std::string& axes, Kind kind) {
    return Next(rets_, ret_, name, axes, kind);
  }

  // The packing operands, which follow all other operands.
  void ReadPacking(Marks& marks, Sequences& sequences) {
    if (packing_ == Packing::kMarks) {
      const void* const words = Arg("marks", "BM", Kind::kMarks);
      const int64_t tokens = Size('T'), expected = Marks::Words(tokens);
      Require(Size('M') == expected, "marks has M = ", Size('M'), "; expected ", expected, " for ",
              tokens, " tokens");
      marks = {static_cast<const uint32_t*>(words), Size('M')};
    } else if (packing_ == Packing::kSequences) {
      sequences.spans = static_cast<const int32_t*>(Arg("spans", "SW", Kind::kInts));
      // Its axis is N, but the states of a forward pass may have N = 0.
      sequences.owners = static_cast<const int32_t*>(Arg("owners", "BO", Kind::kInts));
      sequences.count = Size('S'), sequences.words = Size('W');
      sequences.tokens = Size('B') * Size('T');
      Require(sequences.words == Sequences::kWords || sequences.words == Sequences::kWordsInTurn,
              "spans has W = ", sequences.words, "; expected 4 or 8");
      const int64_t chunks = RowChunks(Size('B'), Size('T'), Size('S'));
      Require(Size('O') == chunks, "owners has O = ", Size('O'), "; expected ", chunks, " for ",
              Size('T'), " tokens");
      Require(Size('B') == 0 ? Size('S') == 0 : Size('S') % Size('B') == 0,
              "spans has S = ", Size('S'), "; expected as many in each of ", Size('B'), " rows");
    }
  }

  // The size of an axis, 0 for an axis that no operand has.
  int64_t Size(char axis) const { return axes_[Letter(axis) - 'A'].size; }
  Packing packing() const { return packing_; }
  // The dtype of the tensors, and that of the saved states.
  Dtype dtype() const { return DtypeOf(dtype_); }
  Dtype saved_dtype() const { return DtypeOf(saved_dtype_); }
  // The type of the last weight or matrix that was read.
  ffi::DataType weight_type() const { return weight_type_; }

  // Unless `condition` holds, an error of the given parts; the first error is the one that counts.
  template <typename... Parts>
  void Require(bool condition, const Parts&... parts) {
    if (condition || error_.failure()) return;
    error_ = ffi::Error::InvalidArgument((op_ + ": " + ... + Text(parts)));
  }

  // The sizes of an operator with heads of up to `max_head_size` channels: of K = V, a power of two, or, if
  // `pads`, of any K and V that are multiples of kHeadPiece.
  HeadDims Heads(int64_t tokens, int64_t max_head_size, bool pads) {
    const int64_t keys = Size('K'), values = Size('V');
    const auto in_range = [&](int64_t x) { return x >= kMinHeadSize && x <= max_head_size; };
    const bool suits = pads ? keys % kHeadPiece == 0 && values % kHeadPiece == 0
                            : keys == values && IsPowerOfTwo(keys);
    Require(suits && in_range(keys) && in_range(values), "r and v have K = ", keys,
            " and V = ", values,
            pads ? "; expected multiples of 8 from " : "; expected K = V, a power of two from ",
            kMinHeadSize, " to ", max_head_size);
    // G is the number of key heads, where operands have it.
    const int64_t heads = Size('H'), groups = axes_['G' - 'A'].first.empty() ? heads : Size('G');
    Require(groups > 0 ? heads % groups == 0 : heads == 0, "r and v have G = ", groups,
            " and H = ", heads, "; expected an H that is a multiple of G");
    return {Size('S'), tokens,  heads,  keys,
            values,    Saved(), groups, groups > 0 ? heads / groups : 1};
  }

  Decay ReadDecay(int64_t decay, Decay last) {
    const bool sigmoid = last == Decay::kSigmoid;
    Require(
        decay >= 0 && decay <= static_cast<int64_t>(last), "decay is ", decay,
        sigmoid ? "; expected 0 (log), 1 (exp) or 2 (sigmoid)" : "; expected 0 (log) or 1 (exp)");
    return static_cast<Decay>(decay);
  }
  bool ReadExact(int64_t exact) {
    Require(exact == 0 || exact == 1, "exact is ", exact, "; expected 0 or 1");
    return exact != 0;
  }

  // How many states of a sequence are saved; with sequences of different lengths, of all of them.
  int64_t Saved() const {
    return packing_ == Packing::kSequences ? Size('B') * Size('N') : Size('N');
  }
  // A row has one saved state for each chunk, or none if it may have none.
  void RequireSaved(bool or_none) {
    const int64_t saved = Size('N'), chunks = RowChunks(Size('B'), Size('T'), Size('S'));
    Require(saved == chunks || (or_none && saved == 0), "states has N = ", saved, "; expected ",
            or_none ? "0 or " : "", chunks, " for ", Size('T'), " tokens");
  }

  ffi::Error Internal(const std::string& what) const {
    return ffi::Error::Internal(op_ + ": " + what);
  }

  ffi::Error Finish() {
    Require(arg_ == args_.size(), args_.size(), " operands given; expected ", arg_);
    Require(ret_ == rets_.size(), rets_.size(), " results given; expected ", ret_);
    return error_;
  }

 private:
  char Letter(char axis) const {
    return axis == 'S' && packing_ != Packing::kSequences ? 'B' : axis;
  }

  struct Axis {
    int64_t size = 0;
    std::string first;  // the operand that had this axis first
  };

  static const ffi::AnyBuffer& Get(const ffi::AnyBuffer& buffer) { return buffer; }
  static const ffi::AnyBuffer& Get(ffi::Result<ffi::AnyBuffer>& buffer) { return *buffer; }

  template <typename Remaining>
  void* Next(const Remaining& remaining, size_t& position, const std::string& name,
             std::string axes, Kind kind) {
    const size_t index = position++;
    auto found = remaining.template get<ffi::AnyBuffer>(index);
    Require(found.has_value(), name, " is missing or is not an array");
    if (error_.failure()) return nullptr;
    const ffi::AnyBuffer& buffer = Get(*found);
    CheckType(name, buffer.element_type(), kind);
    for (char& letter : axes) letter = Letter(letter);
    CheckShape(name, axes, buffer.dimensions());
    return error_.failure() ? nullptr : buffer.untyped_data();
  }

  void CheckType(const std::string& name, ffi::DataType given, Kind kind) {
    const auto require = [&](ffi::DataType expected) {
      Require(given == expected, name, " is ", given, "; expected ", expected);
    };
    switch (kind) {
      case Kind::kFloat: return require(ffi::F32);
      case Kind::kInts: return require(ffi::S32);
      case Kind::kMarks: return require(ffi::U32);
      case Kind::kWeight:
        Require(given == ffi::F32 || given == ffi::BF16 || given == ffi::F16 || given == ffi::S8,
                name, " is ", given, "; expected F32, BF16, F16 or S8");
        weight_type_ = given;
        return;
      case Kind::kSaved: {
        const bool may_round = dtype_ != ffi::F32;
        Require(given == ffi::F32 || (given == ffi::BF16 && may_round), name, " is ", given,
                may_round ? "; expected F32 or BF16" : "; expected F32");
        saved_dtype_ = given;
        return;
      }
      case Kind::kMatrix:
        weight_type_ = given;
        if (given == ffi::S8) return;
        [[fallthrough]];
      case Kind::kTensor:
        Require(given == ffi::F32 || given == ffi::BF16 || given == ffi::F16, name, " is ", given,
                "; expected F32, BF16 or F16");
        if (dtype_ == ffi::DataType::INVALID) dtype_ = given, first_tensor_ = name;
        Require(given == dtype_, name, " is ", given, " where ", first_tensor_, " is ", dtype_,
                "; expected the same");
    }
  }

  static Dtype DtypeOf(ffi::DataType type) {
    return type == ffi::BF16 ? Dtype::kBF16 : type == ffi::F16 ? Dtype::kF16 : Dtype::kF32;
  }

  void CheckShape(const std::string& name, const std::string& letters,
                  ffi::AnyBuffer::Dimensions given) {
    if (given.size() != letters.size())
      Require(false, name, " has shape ", List(given), "; expected ", List(letters));
    if (error_.failure()) return;
    for (size_t i = 0; i < letters.size(); ++i) {
      Axis& axis = axes_[letters[i] - 'A'];
      if (axis.first.empty()) axis = {given[i], name};
      if (given[i] != axis.size)
        Require(false, name, " has shape ", List(given), ", so ", letters[i], " = ", given[i],
                ", where ", axis.first, " has ", letters[i], " = ", axis.size, "; expected ",
                List(letters), " of matching sizes");
    }
  }

  template <typename Items>
  static std::string List(const Items& items) {
    std::string list;
    for (size_t i = 0; i < items.size(); ++i) list += (i ? ", " : "") + Text(items[i]);
    return "[" + list + "]";
  }

  // Numbers are not written to a stream: inside a process with several C++ runtimes that may crash.
  static std::string Text(const std::string& text) { return text; }
  static std::string Text(char letter) { return std::string(1, letter); }
  static std::string Text(int64_t number) { return std::to_string(number); }
  static std::string Text(size_t number) { return std::to_string(number); }
  static std::string Text(ffi::DataType type) {
    std::ostringstream name;
    name << type;
    return name.str();
  }

  std::string op_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  Packing packing_;
  size_t arg_ = 0, ret_ = 0;
  ffi::DataType dtype_ = ffi::DataType::INVALID, saved_dtype_ = ffi::DataType::INVALID;
  ffi::DataType weight_type_ = ffi::DataType::INVALID;
  std::string first_tensor_;
  std::array<Axis, 26> axes_;
  ffi::Error error_;
};

}  // namespace rwkv_jax
