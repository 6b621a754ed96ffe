// The problem that a call poses: which operator and pass, its attributes and its sizes.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

namespace rwkv_jax {

// The names are those in the targets: rwkv_{op}_{pass}_v2.
enum class Op { kWkv4, kWkv5, kWkv6, kWkv7 };
constexpr const char* kOpNames[] = {"wkv4", "wkv5", "wkv6", "wkv7"};

enum class Pass { kForward, kBackward, kStep, kTransition, kReverseTransition };
constexpr const char* kPassNames[] = {"fwd", "bwd", "step", "transition", "reverse_transition"};

struct Problem {
  Op op;
  Pass pass;
  Decay decay;
  bool exact;  // precision HIGHEST: all arithmetic in float32
  Packing packing;
  Dtype dtype;
  int64_t rows, tokens;  // B and T
  int64_t sequences;     // S, those of all rows; equal to B without kSequences
  int64_t heads;         // H, or the channels C of WKV4
  int64_t head_size;     // K, or 1 for WKV4
  int64_t value_size;    // V, or 1 for WKV4
  bool saves;            // whether the forward pass saves states

  // Whether the kernels that go token by token take such heads.
  bool RunsByToken() const { return head_size == value_size && IsPowerOfTwo(head_size); }
  int64_t AllHeads() const { return sequences * heads; }
  int64_t ChunksOfRow() const { return RowChunks(rows, tokens, sequences); }
};

}  // namespace rwkv_jax
