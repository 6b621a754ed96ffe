// What the native modules tell Python about problems and about themselves, without any binding library.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>

#include "rwkv_jax/problem.h"
#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

// The fields of a problem that Python gives as integers, besides the operator and the pass.
constexpr const char* kProblemFields[] = {"decay",     "exact",      "packing",   "dtype",
                                          "rows",      "tokens",     "sequences", "heads",
                                          "head_size", "value_size", "saves"};

// A problem from Python's description of it: `number(name)` gives the field of that name. Throws
// std::invalid_argument where a name or a code is unknown.
template <typename Number>
Problem ReadProblem(const std::string& op, const std::string& pass, const Number& number) {
  const auto named = [](const char* what, const std::string& name, const auto& names) {
    int code = 0;
    for (const char* known : names) {
      if (name == known) return code;
      ++code;
    }
    throw std::invalid_argument(std::string(what) + " is '" + name + "'");
  };
  const auto code = [&](const char* name, int64_t last) {
    const int64_t value = number(name);
    if (value < 0 || value > last)
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                  "; expected 0 to " + std::to_string(last));
    return value;
  };
  Problem problem;
  problem.op = static_cast<Op>(named("op", op, kOpNames));
  problem.pass = static_cast<Pass>(named("pass", pass, kPassNames));
  problem.decay = static_cast<Decay>(code("decay", 2));
  problem.exact = code("exact", 1) != 0;
  problem.packing = static_cast<Packing>(code("packing", 2));
  problem.dtype = static_cast<Dtype>(code("dtype", 2));
  problem.rows = number("rows"), problem.tokens = number("tokens");
  problem.sequences = number("sequences");
  problem.heads = number("heads"), problem.head_size = number("head_size");
  problem.value_size = number("value_size");
  problem.saves = number("saves") != 0;
  return problem;
}

// What a module tells Python about a problem, and about itself.
using Description = std::map<std::string, std::variant<int64_t, double, std::string>>;

template <typename Enum>
constexpr int64_t Code(Enum value) {
  return static_cast<int64_t>(value);
}

// The constants and codes that Python shares with a module whose heads have up to `max_head_size`
// channels.
inline Description Constants(int64_t max_head_size) {
  return {{"chunk", kChunk},
          {"tile", int64_t{kTileTokens}},
          {"word_tokens", kWordTokens},
          {"min_head_size", kMinHeadSize},
          {"max_head_size", max_head_size},
          {"min_log_decay", double{kMinLogDecay}},
          {"sigmoid_scale", double{kSigmoidScale}},
          {"max_log_rate", double{kMaxLogRate}},
          {"decay_log", Code(Decay::kLog)},
          {"decay_exp", Code(Decay::kExp)},
          {"decay_sigmoid", Code(Decay::kSigmoid)},
          {"packing_none", Code(Packing::kNone)},
          {"packing_marks", Code(Packing::kMarks)},
          {"packing_sequences", Code(Packing::kSequences)},
          {"dtype_float32", Code(Dtype::kF32)},
          {"dtype_bfloat16", Code(Dtype::kBF16)},
          {"dtype_float16", Code(Dtype::kF16)},
          {"span_words", Sequences::kWords},
          {"span_words_in_turn", Sequences::kWordsInTurn}};
}

}  // namespace rwkv_jax
