// The operands and results of a call, read one after another and checked by name.
#pragma once

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "rwkv_jax/ffi.h"
#include "rwkv_jax/sequences.h"
#include "rwkv_jax/types.h"

namespace rwkv_jax {

// Each of the readers takes the next operand or result, checks its dtype and its shape, and
// returns its data. Axes are letters; a letter has the same size wherever it occurs. After the
// first error the readers return null and Finish returns that error, so that a handler can read
// everything first and ask once.
//
// B are the rows of tokens, and S the sequences: those of all rows together if operands of integers
// behind all others say where they are, and else the rows.
class Operands {
 public:
  Operands(const char* op, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : op_(op), args_(args), rets_(rets) {
    if (args.size() == 0) return;
    const auto last = args.get<ffi::AnyBuffer>(args.size() - 1);
    has_sequences_ = last.has_value() && last->element_type() == ffi::S32;
  }

  // A tensor of float32, bfloat16 or float16, the same for all tensors of a call.
  const void* Arg(const char* name, const char* axes) {
    return Next(args_, arg_, name, axes, kShared);
  }
  void* Ret(const char* name, const char* axes) {
    return Next(rets_, ret_, name, axes, kShared);
  }

  // A state or scratch, always float32.
  const float* FloatArg(const char* name, const char* axes) {
    return static_cast<const float*>(Next(args_, arg_, name, axes, kFloat));
  }
  float* FloatRet(const char* name, const char* axes) {
    return static_cast<float*>(Next(rets_, ret_, name, axes, kFloat));
  }

  // Saved states, float32 or, if the tensors are not, bfloat16; after at least one of those.
  const void* StatesArg(const char* name, const char* axes, Dtype& dtype) {
    return Next(args_, arg_, name, axes, kStates, &dtype);
  }
  void* StatesRet(const char* name, const char* axes, Dtype& dtype) {
    return Next(rets_, ret_, name, axes, kStates, &dtype);
  }

  // What comes behind all other operands, if anything does, for rows that are no single sequences:
  // the marks of their tokens, or where sequences are.
  void RowsArg(Marks& marks, Sequences& sequences) {
    if (has_sequences_) {
      sequences.spans = IntArg("spans", "SW");
      sequences.count = Size('S'), sequences.words = Size('W');
      sequences.tokens = Size('B') * Size('T');
      Require(sequences.words == Sequences::kWords || sequences.words == Sequences::kWordsInTurn,
              "spans has W = ", sequences.words, "; expected 4 or 8");
      Require(Size('B') == 0 ? Size('S') == 0 : Size('S') % Size('B') == 0, "spans has S = ",
              Size('S'), "; expected as many in each of ", Size('B'), " rows");
    } else {
      marks = MarksArg();
    }
  }
  Marks MarksArg() {
    if (arg_ == args_.size()) return {};
    const int64_t tokens = Size('T');
    const void* const words = Next(args_, arg_, "marks", "BM", kWords);
    Require(Size('M') == Marks::Words(tokens), "marks has M = ", Size('M'), "; expected ",
            Marks::Words(tokens), " for ", tokens, " tokens");
    return {static_cast<const uint32_t*>(words), Size('M')};
  }

  // Numbers, always int32.
  const int32_t* IntArg(const char* name, const char* axes) {
    return static_cast<const int32_t*>(Next(args_, arg_, name, axes, kInts));
  }

  // 0 for an axis that no operand has.
  int64_t Size(char axis) const { return axes_[Letter(axis) - 'A'].size; }
  bool HasSequences() const { return has_sequences_; }
  Dtype dtype() const { return DtypeOf(dtype_); }

  // Unless `condition` holds, an error of the given parts; the first error is the one that counts.
  template <typename... Parts>
  void Require(bool condition, const Parts&... parts) {
    if (condition || error_.failure()) return;
    error_ = ffi::Error::InvalidArgument((Text(op_) + ": " + ... + Text(parts)));
  }

  // The sizes of an operator with heads, the native kernels' limits checked.
  HeadDims Heads(int64_t tokens, int64_t max_head_size) {
    const int64_t keys = Size('K'), values = Size('V');
    const bool power_of_two = (keys & (keys - 1)) == 0;
    Require(keys == values && power_of_two && keys >= 16 && keys <= max_head_size,
            "r and v have K = ", keys, " and V = ", values,
            "; expected K = V, a power of two from 16 to ", max_head_size);
    return {Size('S'), tokens, Size('H'), keys, Saved()};
  }

  Decay DecayForm(int64_t decay, Decay last) {
    const bool sigmoid = last == Decay::kSigmoid;
    Require(decay >= 0 && decay <= static_cast<int64_t>(last), "decay is ", decay,
            sigmoid ? "; expected 0 (log), 1 (exp) or 2 (sigmoid)" : "; expected 0 (log) or 1 (exp)");
    return static_cast<Decay>(decay);
  }

  // The saved states of a row, or of all rows together if there are sequences.
  int64_t Saved() const { return has_sequences_ ? Size('B') * Size('N') : Size('N'); }

  // Whether a forward pass saves states, which are either none or one for each chunk.
  bool Saves() {
    RequireSaved(true);
    return Size('N') != 0;
  }
  void RequireSaved(bool or_none = false) {
    const int64_t saved = Size('N'), chunks = RowChunks();
    Require(saved == chunks || (or_none && saved == 0), "states has N = ", saved, "; expected ",
            or_none ? "0 or " : "", chunks, " for ", Size('T'), " tokens");
  }

  ffi::Error Finish() {
    Require(arg_ == args_.size(), args_.size(), " operands given; expected ", arg_);
    Require(ret_ == rets_.size(), rets_.size(), " results given; expected ", ret_);
    return error_;
  }

 private:
  // The chunks of a row; of its sequences as many as there can be.
  int64_t RowChunks() const {
    const int64_t tokens = Size('T');
    if (!has_sequences_ || tokens == 0 || Size('B') == 0) return Chunks(tokens);
    const int64_t length = tokens < kChunk ? tokens : kChunk;
    return (tokens + Size('S') / Size('B') * (length - 1)) / length;
  }

  char Letter(char axis) const { return axis == 'S' && !has_sequences_ ? 'B' : axis; }

  enum Types { kShared, kFloat, kStates, kWords, kInts };

  struct Axis {
    int64_t size = 0;
    const char* first = nullptr;  // the operand that had this axis first
  };

  static const ffi::AnyBuffer& Get(const ffi::AnyBuffer& buffer) { return buffer; }
  static const ffi::AnyBuffer& Get(ffi::Result<ffi::AnyBuffer>& buffer) { return *buffer; }

  template <typename Remaining>
  void* Next(const Remaining& remaining, size_t& position, const char* name, const char* axes,
             Types types, Dtype* dtype = nullptr) {
    const size_t index = position++;
    auto found = remaining.template get<ffi::AnyBuffer>(index);
    Require(found.has_value(), name, " is missing or is not an array");
    if (error_.failure()) return nullptr;
    const ffi::AnyBuffer& buffer = Get(*found);
    CheckType(name, buffer.element_type(), types);
    std::string letters = axes;
    for (char& letter : letters) letter = Letter(letter);
    CheckShape(name, letters, buffer.dimensions());
    if (dtype != nullptr) *dtype = DtypeOf(buffer.element_type());
    return error_.failure() ? nullptr : buffer.untyped_data();
  }

  void CheckType(const char* name, ffi::DataType given, Types types) {
    if (types == kFloat) {
      Require(given == ffi::F32, name, " is ", given, "; expected F32");
      return;
    }
    if (types == kInts) {
      Require(given == ffi::S32, name, " is ", given, "; expected S32");
      return;
    }
    if (types == kWords) {
      Require(given == ffi::U32, name, " is ", given, "; expected U32");
      return;
    }
    if (types == kStates) {
      const bool may_round = dtype_ != ffi::F32;
      Require(given == ffi::F32 || (given == ffi::BF16 && may_round), name, " is ", given,
              may_round ? "; expected F32 or BF16" : "; expected F32");
      return;
    }
    Require(given == ffi::F32 || given == ffi::BF16 || given == ffi::F16, name, " is ", given,
            "; expected F32, BF16 or F16");
    if (dtype_ == ffi::DataType::INVALID) {
      dtype_ = given;
      first_ = name;
    }
    Require(given == dtype_, name, " is ", given, " where ", first_, " is ", dtype_,
            "; expected the same");
  }

  static Dtype DtypeOf(ffi::DataType type) {
    return type == ffi::BF16 ? Dtype::kBF16 : type == ffi::F16 ? Dtype::kF16 : Dtype::kF32;
  }

  void CheckShape(const char* name, std::string_view letters,
                  ffi::AnyBuffer::Dimensions given) {
    if (given.size() != letters.size())
      Require(false, name, " has shape ", List(given), "; expected ", List(letters));
    if (error_.failure()) return;
    for (size_t i = 0; i < letters.size(); ++i) {
      Axis& axis = axes_[letters[i] - 'A'];
      if (axis.first == nullptr) axis = {given[i], name};
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

  // Not by way of a stream: inside a process with several C++ runtimes, writing a number to one may
  // crash.
  static std::string Text(const std::string& text) { return text; }
  static std::string Text(char letter) { return std::string(1, letter); }
  static std::string Text(int64_t number) { return std::to_string(number); }
  static std::string Text(size_t number) { return std::to_string(number); }
  static std::string Text(ffi::DataType type) {
    std::ostringstream name;
    name << type;
    return name.str();
  }

  const char* op_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  bool has_sequences_ = false;
  size_t arg_ = 0, ret_ = 0;
  ffi::DataType dtype_ = ffi::DataType::INVALID;
  const char* first_ = nullptr;
  std::array<Axis, 26> axes_;
  ffi::Error error_;
};

}  // namespace rwkv_jax
