// The step of a whole block of RWKV-7 for one token of each row: what its kernels take and give.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rwkv_jax/products.h"
#include "rwkv_jax/scratch.h"
#include "rwkv_jax/types.h"

namespace rwkv_jax {

// The kernels take heads of this size, up to so many rows, fewer with weights of int8 or by input, and ranks
// that are multiples of kRankMultiple.
constexpr int64_t kBlockHeadSize = 64;
constexpr int64_t kMaxBlockRows = 32;
constexpr int64_t kMaxQuantisedRows = 1, kMaxRowsByInput = 1;
constexpr int64_t kRankMultiple = 8, kMaxRank = 1024;

// Rows of float32 are computed so many at a time.
constexpr int64_t kRowsAtOnce = 8;

// Products on the matrix units, which take several rows of 16-bit elements, have a ticket for each group of
// outputs, and rows in 1, 2 or 4 fragments. Each of up to kMaxSumBlocks blocks of threads has room for its sums
// of two groups.
constexpr int kFragmentRows = 8;
constexpr int64_t kMaxSumBlocks = 384;

constexpr int64_t FragmentsOf(int64_t rows) {
  return rows <= kFragmentRows ? 1 : rows <= 2 * kFragmentRows ? 2 : 4;
}
constexpr int64_t SumFloats(int64_t blocks, int64_t fragments) {
  return 2 * blocks * fragments * kFragmentRows * kGroupOutputs;
}
static_assert(FragmentsOf(kMaxBlockRows) * kFragmentRows == kMaxBlockRows);

// More rows, up to so many, are for bfloat16 and GPUs of compute capability 9.0, with products in tiles.
constexpr int64_t kMaxManyRows = 1024;

// One row of whose inputs many are zeros: so many blocks of threads share out the inputs of a group of
// outputs, which has a ticket and at least kGroupOutputs / 4 outputs.
constexpr int64_t kSharesOfInputs = 8;

// Up to so many tokens wait until the state is updated with them and the next one at once, each with the
// vectors w, k, v, a and b of `wkv7` in every head, w as the low-rank map of the decay gives it. Where a row has
// no token, the first two elements of w are NaN whose bits are all 1.
constexpr int64_t kMostWaiting = 5, kWaitingVectors = 5;

// What a step does with the tokens that wait: how many there are, whether it updates the state, whether the
// state of a head lies in halves, without which a step always updates it, and whether an update leaves it so.
// With the bits x of a float, its upper half is (x + 2^15) / 2^16, the nearest bfloat16, and its lower one the
// rest of x + 2^15. Where they lie is the kernels' own affair.
enum Schedule { kWaiting, kUpdates, kInHalves, kIntoHalves, kScheduleNumbers };

// Widths up to this one, those of hidden activations included, are indexed with 32 bits.
constexpr int64_t kMaxBlockWidth = 1 << 20;

// The low-rank maps of a time mixing: of the decay, of the in-context learning rate, of the gate, and of
// the share of the first layer's value, which the first layer does not have.
enum LowRankMap { kDecayMap, kRateMap, kGateMap, kShareMap, kLowRankMaps };

// What the mixes of a time mixing are for.
enum Mix { kMixR, kMixW, kMixK, kMixV, kMixA, kMixG, kMixes };

struct LowRank {
  const void *first, *second;  // [C, rank], [rank, C]
  int64_t rank;                // 0 without the map
};

struct LayerNorm {
  const void *weight, *bias;
};

// A matrix [outputs, inputs]. One of int8 is multiplied by a scale [outputs], which all others do not have.
struct Matrix {
  const void* weight;
  const float* scale;
};

// Arrays are dense and row-major, and of `dtype` unless they are of float. Vectors are [C]. Either all
// matrices of products are of int8 or none.
struct Rwkv7BlockCall {
  static constexpr const char* kName = "rwkv7_block";
  int64_t rows, width, heads, hidden;  // B, C, H, F
  int64_t all_rows;                    // of the call, if `rows` are some of them at a time
  Dtype dtype;

  const void* x;               // [B, C]
  const void* first;           // [B, C]: the value of the first layer; null in that layer
  const int32_t* segment_ids;  // [B]: a row whose id is 0 has no token, and its states stay
  const void *time_before, *channel_before;  // [B, C]: the states of both token shifts
  const float* state;                        // [B, H, V, K]
  // Null if no token waits; otherwise the states and the tokens that wait lie where their results lie.
  const int32_t* schedule;  // [kScheduleNumbers]
  void* waiting;            // [B, H, kMostWaiting, kWaitingVectors, K] of bfloat16

  LayerNorm time_norm, channel_norm, head_norm;
  const void *mix[kMixes], *channel_mix;
  LowRank maps[kLowRankMaps];
  const void *w0, *a0, *v0, *k_k, *k_a, *r_k;
  Matrix receptance, key, value, output;  // [C, C]
  Matrix channel_key, channel_value;      // [F, C], [C, F]
  bool value_by_input;                    // channel_value is [F, C]

  // The states may lie where those before the token lie.
  void *out, *made_first;  // [B, C]; the latter in the first layer only
  void *time_after, *channel_after;
  float *state_after, *scratch;

  int64_t Ranks() const {
    int64_t ranks = 0;
    for (const LowRank& map : maps) ranks += map.rank;
    return ranks;
  }
  bool Quantised() const { return receptance.scale != nullptr; }
  bool OnMatrixUnits() const { return rows > 1 && dtype != Dtype::kF32; }
  bool Defers() const { return schedule != nullptr; }
};

// What lies where in the scratch of a block, in floats. Each part has room for an array of float, unless it
// says otherwise. Those of 0 floats are parts of the other way to compute a block.
struct BlockScratch {
  // r, k, v and, without matrix units, the low-rank maps between their products, [B, 3 C + ranks]; on
  // matrix units r, k, v and the results of all low-rank maps, [B, 7 C] of 16 bits.
  int64_t projected, projected_width;
  int64_t normalised;  // [B, C]: what a token shift has next
  int64_t mixed;       // [kMixes, B, C] of 16 bits: the inputs of the products
  int64_t low_rank;    // [B, rank] of 16 bits for each low-rank map: what is between its products
  int64_t read;        // [B, C]: the inputs of the output product
  int64_t between;     // [B, C]: the activations between both mixings
  int64_t hidden;      // [B, F]: the hidden activations of the channel mixing
  int64_t sums, sum_floats;  // of groups of outputs that several blocks of threads share
  int64_t tickets, ticket_count;
  int64_t floats = 0;

  explicit BlockScratch(const Rwkv7BlockCall& call) {
    const bool matrix_units = call.OnMatrixUnits(), many_rows = call.rows > kMaxBlockRows;
    const int64_t rows =
        matrix_units ? call.rows : std::min(std::max(call.rows, call.all_rows), kRowsAtOnce);
    const int64_t width = call.width, ranks = call.Ranks(), tokens = rows * width;
    projected_width = matrix_units ? (3 + kLowRankMaps) * width : 3 * width + ranks;
    projected = Take(rows * projected_width / (matrix_units ? 2 : 1));
    normalised = Take(matrix_units ? 0 : tokens);
    mixed = Take(matrix_units ? kMixes * tokens / 2 : 0);
    low_rank = Take(matrix_units ? rows * ranks / 2 : 0);
    read = Take(tokens), between = Take(tokens);
    hidden = Take(rows * call.hidden);
    sum_floats = many_rows      ? kMaxTileBlocks * kTileRows * kMaxTileOutputs
                 : matrix_units ? SumFloats(kMaxSumBlocks, FragmentsOf(rows))
                                : kSharesOfInputs * width;
    sums = Take(sum_floats);
    // No fewer than there are groups: widths are multiples of 64, and ranks of 8.
    ticket_count = many_rows      ? 0
                   : matrix_units ? ((5 + kLowRankMaps) * width + call.hidden) / 64 + ranks / 8
                                  : width / 32;
    tickets = Take(ticket_count);
  }

 private:
  int64_t Take(int64_t count) { return TakePart(count, floats); }
};

// The scratch of a block, for Python.
inline BlockScratch BlockScratchOf(int64_t dtype, int64_t rows, int64_t width, int64_t hidden,
                                   int64_t ranks) {
  Rwkv7BlockCall call = {};
  call.dtype = static_cast<Dtype>(dtype), call.rows = rows, call.width = width;
  call.hidden = hidden, call.maps[0].rank = ranks;
  return BlockScratch(call);
}
inline int64_t BlockScratchFloats(int64_t dtype, int64_t rows, int64_t width, int64_t hidden,
                                  int64_t ranks) {
  return BlockScratchOf(dtype, rows, width, hidden, ranks).floats;
}

}  // namespace rwkv_jax
