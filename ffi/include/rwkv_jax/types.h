// Types and constants that handlers, plans and kernels share. This header includes nothing of the FFI,
// so that kernels do not depend on it.
#pragma once

#include <cstdint>

namespace rwkv_jax {

enum class Dtype { kF32 = 0, kBF16 = 1, kF16 = 2 };

// What w is; the codes are those of the `decay` attribute.
enum class Decay { kLog = 0, kExp = 1, kSigmoid = 2 };

// What a row of tokens holds; the codes are those of the `packing` attribute.
enum class Packing {
  kNone = 0,       // one sequence
  kMarks = 1,      // segments: the state is cleared before some tokens, and some tokens are padding
  kSequences = 2,  // sequences of different lengths, each with a state of its own
};

// The log decays of WKV5, WKV6 and WKV7 have this floor: exp(-200) is 0 in float32, and every
// derivative stays finite.
constexpr float kMinLogDecay = -200.0f;

// The same floor for kernels that sum log decays as float16 to base 2: 2^-172 is 0 in float32.
constexpr float kMinLog2Decay = -172.0f;

// exp(-1/2), the largest decay rate of RWKV-7.
constexpr float kSigmoidScale = 0.6065306597126334f;

// WKV4 has no floor, because its decays are used as logarithms. The largest w of the form
// log_decay = -exp(w) is log(1e30), so that sums of log decays stay finite.
constexpr float kMaxLogRate = 69.07755279f;

// A state is saved before each chunk of so many tokens.
constexpr int64_t kChunk = 64;

// One matrix instruction takes so many tokens.
constexpr int kTileTokens = 16;

// The native kernels take heads whose size K = V is a power of two, from this one on.
constexpr int64_t kMinHeadSize = 16;

constexpr bool IsPowerOfTwo(int64_t x) { return (x & (x - 1)) == 0; }

// The kernels of WKV7 on matrix units take any K and V that are multiples of this, the number of 16-bit elements
// in 16 bytes.
constexpr int64_t kHeadPiece = 8;

constexpr int64_t Chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

// The chunks of each row, given the number of sequences of all rows: as many as there can be, whatever
// the lengths of the sequences are. Without sequences of different lengths a row is one sequence.
constexpr int64_t RowChunks(int64_t rows, int64_t tokens, int64_t sequences) {
  if (rows == 0 || tokens == 0) return Chunks(tokens);
  const int64_t length = tokens < kChunk ? tokens : kChunk;
  return (tokens + sequences / rows * (length - 1)) / length;
}

// The sizes of an operator whose state is a matrix for each head.
struct HeadDims {
  int64_t batch, tokens, heads;
  int64_t head_size;   // K
  int64_t value_size;  // V, which is K but for WKV7 on matrix units
  int64_t saved;       // N, the states saved for the backward pass: Chunks(tokens), or 0
  // Of WKV7 on matrix units, and of the delta rule, heads may share keys: head h has those of key head h / group. All
  // others have `heads` key heads.
  int64_t key_heads, group;
};

}  // namespace rwkv_jax
