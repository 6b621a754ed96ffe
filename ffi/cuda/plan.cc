// The rules that all operators share; those of one operator are in its plan.cc.
#include "plan.h"

#include <algorithm>
#include <string>

#include "rules.h"
#include "rwkv_jax/scratch.h"
#include "splits.h"

namespace rwkv_jax::cuda {
namespace {

// The kernel that goes token by token backwards has hundreds of kilobytes of scratch for each head. It
// takes so many heads at a time, 8 for each of 132 multiprocessors.
constexpr int64_t kReplayHeads = 1056;
// Where it only stands in for the kernels on matrix units, on devices with too little shared memory, or for
// steep chunks, there is scratch for so many heads, or blocks.
constexpr int64_t kFallbackHeads = 264;

// The kernels on matrix units index the channels of a token with 32 bits.
constexpr int64_t kMaxStride = std::numeric_limits<int32_t>::max();

Rules RulesOf(const Problem& problem) {
  return problem.op == Op::kWkv7 ? Wkv7Rules(problem) : Wkv6Rules(problem);
}

// Why the kernels on matrix units take no such problem, or nothing where they take it on a device with
// enough shared memory.
const char* WhyByToken(const Rules& rules, const Problem& problem) {
  const bool whole = problem.pass == Pass::kForward || problem.pass == Pass::kBackward;
  const bool no_float32 = problem.dtype == Dtype::kF32 && !rules.takes_float32;
  if (problem.exact) return "precision is 'highest'";
  if (no_float32 && whole) return "of float32 only heads with K = V = 64 run on matrix units";
  if (rules.matrix_head_size == 0)
    return problem.op == Op::kWkv7
               ? "only head sizes that are multiples of 8 from 16 to 128 run on matrix units"
               : "only heads of 64 and 128 run on matrix units";
  static_assert(kTileTokens == 16);
  if (problem.tokens < kTileTokens) return "only 16 or more tokens run on matrix units";
  if (problem.heads * rules.matrix_head_size > kMaxStride) return "a token has too many channels";
  if (problem.pass == Pass::kStep || no_float32 ||
      (!whole && problem.packing == Packing::kSequences))
    return "there are no such kernels on matrix units";
  return nullptr;
}

// The next part of the scratch, in whole lines of memory.
int64_t Take(int64_t floats, int64_t& end) { return TakePart((floats + 63) / 64 * 64, end); }

// The floats of one partial sum of all shared inputs for every sequence.
int64_t SumFloats(const Rules& rules, const Problem& problem) {
  return rules.shared_inputs * problem.heads * problem.head_size;
}

void LayOutMatrixUnits(const Rules& rules, const Problem& problem, Plan& plan) {
  const bool backward = problem.pass == Pass::kBackward;
  const bool sequences = problem.packing == Packing::kSequences;
  const int64_t chunks = problem.ChunksOfRow();
  plan.split_chunks = 0;
  if (sequences && plan.splits > 1) {
    const int64_t all = Chunks(problem.rows * problem.tokens);
    plan.split_chunks = (all + plan.splits - 1) / plan.splits;
  }
  const int64_t states = backward ? problem.rows * chunks * problem.heads : 0;
  const int64_t steep_blocks = rules.blocks_per_steep_chunk * states;
  plan.scratch = 0;
  plan.steep = Take(steep_blocks > 0 ? 1 + states : 0, plan.scratch);
  // A sum for each chunk, or for each split: where sequences have different lengths, at its first chunk.
  plan.partials = rules.walks_backwards ? plan.splits : chunks;
  plan.chunks_per_partial = rules.walks_backwards ? plan.split_chunks : 1;
  plan.adds_up = backward && (plan.partials > 1 || (sequences && !rules.walks_backwards));
  const int64_t sums = plan.adds_up ? sequences ? chunks : plan.partials : 0;
  plan.sums = Take(problem.rows * sums * SumFloats(rules, problem), plan.scratch);
  plan.transition_floats = rules.transition_floats;
  const Splits splits{plan.splits, nullptr, plan.transition_floats, plan.split_chunks};
  const int64_t heads_with_transitions = sequences ? problem.heads : problem.AllHeads();
  plan.transitions = Take(heads_with_transitions * splits.Stride(), plan.scratch);
  const int64_t floats = StateGradientFloats(problem.dtype, rules.matrix_head_size);
  plan.gradients = Take(rules.walks_backwards ? 0 : states * floats, plan.scratch);
  plan.replay_heads = std::min(steep_blocks, plan.replay_heads);
  plan.replay = Take(plan.replay_heads * plan.replay_floats, plan.scratch);
}

void LayOutTokens(const Rules& rules, const Problem& problem, Plan& plan) {
  plan.scratch = 0;
  plan.partials = plan.splits;
  plan.adds_up = plan.splits > 1;
  plan.sums = Take(plan.adds_up ? problem.sequences * plan.splits * SumFloats(rules, problem) : 0,
                   plan.scratch);
  plan.replay = Take(plan.replay_heads * plan.splits * plan.replay_floats, plan.scratch);
}

// How many of at most `most` splits have chunks: all have the same number, but for the last one, which
// may have fewer.
int64_t CountSplits(int64_t chunks, int64_t most) {
  if (chunks <= 1 || most <= 1) return 1;
  const int64_t each = (chunks + most - 1) / most;
  return (chunks + each - 1) / each;
}

// In how many splits at most the kernel that goes token by token backwards runs: they fill a GPU that has
// few heads. Splits cost a pass over the sequence, so many heads do without.
int64_t MostReplaySplits(const Device& device, const Problem& problem) {
  const int64_t heads = problem.AllHeads();
  return heads == 0 || heads > Scaled(128, device) ? 1 : Scaled(512, device) / heads;
}

int64_t MostMatrixSplits(const Rules& rules, const Device& device, const Problem& problem) {
  const int64_t heads = problem.rows * problem.heads;
  return heads == 0 ? 1 : rules.most_splits(device, heads, rules.matrix_head_size);
}

// The chunks that are shared out among splits. On matrix units all sequences of different lengths have
// splits as long as if they were one sequence.
int64_t ChunksToSplit(const Problem& problem, bool matrix_units) {
  if (!matrix_units) return problem.ChunksOfRow();
  const bool sequences = problem.packing == Packing::kSequences;
  return Chunks(sequences ? problem.rows * problem.tokens : problem.tokens);
}

Plan MakePlanOfHeads(const Rules& rules, const Device& device, const Problem& problem,
                     int64_t available) {
  Plan plan;
  plan.device = device;
  plan.why_by_token = WhyByToken(rules, problem);
  const bool suits = plan.why_by_token == nullptr;
  plan.shared_memory = suits ? rules.shared_memory : 0;
  plan.matrix_units = suits && plan.shared_memory <= device.shared_memory;
  if (!plan.matrix_units && !problem.RunsByToken()) return plan;
  plan.few_heads = problem.AllHeads() < Scaled(200, device);
  const bool backward = problem.pass == Pass::kBackward;
  if (backward) {
    plan.replay_heads =
        plan.matrix_units ? kFallbackHeads : std::min(problem.AllHeads(), kReplayHeads);
    plan.replay_floats =
        rules.replay_floats(plan.matrix_units ? rules.matrix_head_size : problem.head_size);
  } else if (problem.pass != Pass::kForward || !plan.matrix_units) {
    return plan;
  }

  const auto lay_out = [&] {
    plan.matrix_units ? LayOutMatrixUnits(rules, problem, plan)
                      : LayOutTokens(rules, problem, plan);
  };
  const int64_t chunks = ChunksToSplit(problem, plan.matrix_units);
  plan.splits = CountSplits(chunks, plan.matrix_units ? MostMatrixSplits(rules, device, problem)
                                                      : MostReplaySplits(device, problem));
  lay_out();
  while (plan.splits > 1 && plan.scratch > available) {
    plan.splits = CountSplits(chunks, plan.splits - 1);
    lay_out();
  }
  if (plan.scratch > available && plan.replay_heads > 1) {
    const int64_t fitting = (available - plan.replay) / plan.replay_floats;
    plan.replay_heads = std::clamp<int64_t>(fitting, 1, plan.replay_heads);
    lay_out();
  }
  return plan;
}

}  // namespace

Plan MakePlan(const Device& device, const Problem& problem, int64_t available) {
  const Device bounded{std::min(device.multiprocessors, kMaxMultiprocessors), device.shared_memory};
  if (problem.op == Op::kWkv4) return MakeWkv4Plan(bounded, problem, available);
  return MakePlanOfHeads(RulesOf(problem), bounded, problem, available);
}

int64_t ScratchFloats(const Problem& problem) {
  const Device largest{kMaxMultiprocessors, std::numeric_limits<int64_t>::max()};
  const Plan plan = MakePlan(largest, problem);
  if (!plan.matrix_units) return plan.scratch;
  const Device smallest{1, 0};
  const Plan fallback = MakePlan(smallest, problem, kFallbackHeads * plan.replay_floats);
  return std::max(plan.scratch, fallback.scratch);
}

bool HasTransition(const Problem& problem) {
  Problem transition = problem;
  transition.pass = Pass::kTransition;
  return problem.op != Op::kWkv4 && WhyByToken(RulesOf(transition), transition) == nullptr;
}

Description Describe(const Plan& plan) {
  std::string why = plan.why_by_token == nullptr ? "" : plan.why_by_token;
  if (plan.shared_memory > plan.device.shared_memory)
    why = "a block on matrix units needs " + std::to_string(plan.shared_memory) +
          " bytes of shared memory";
  return {{"kernel", std::string(plan.matrix_units ? "matrix units" : "token by token")},
          {"why", why},
          {"splits", plan.splits},
          {"scratch", plan.scratch},
          {"shared_memory", plan.shared_memory}};
}

}  // namespace rwkv_jax::cuda
