// One token of WKV7, or of a form of it, in float: exact for every decay.
//
// To read and write the states is nearly all the work, so a multiprocessor has to have many loads and stores under
// way at any time. The rows of a state do not depend on each other: a block has few of them, and the blocks that
// run at once on a multiprocessor load, compute and store at different times.
#include "kernel_choice.cuh"
#include "launch_chain.cuh"
#include "fragment.cuh"
#include "wkv7/kernels.h"
#include "wkv7/token.cuh"

namespace rwkv_jax::cuda {
namespace {

// The rows of a state that a block has.
template <int N>
struct StepPartition : StatePartition<N, 4> {
  static constexpr int kBlockRows = Min(32, N);
  static constexpr int kBlocksOfHead = N / kBlockRows;
  static constexpr int kThreads = StatePartition<N, 4>::kThreads / kBlocksOfHead;
  static constexpr int kBlocks = Min(16, 1024 / kThreads);  // that fit any multiprocessor
};

// An element of an array of any dtype. Its bits are loaded first, and made a float once they are needed.
__device__ inline uint32_t LoadBits(const void* x, int64_t index, Dtype dtype) {
  if (dtype == Dtype::kF32) return static_cast<const uint32_t*>(x)[index];
  return static_cast<const uint16_t*>(x)[index];
}
__device__ inline float BitsToFloat(uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kF32) return __uint_as_float(bits);
  return ToFloat(AnyHalf{static_cast<uint16_t>(bits)}, dtype);
}
__device__ inline void StoreFloat(void* to, int64_t index, float x, Dtype dtype) {
  if (dtype == Dtype::kF32)
    static_cast<float*>(to)[index] = x;
  else
    static_cast<AnyHalf*>(to)[index] = FromFloat<AnyHalf>(x, dtype);
}

// What WKV7 takes of one channel of the keys of a token, w as a decay factor.
struct Channel {
  float d, k, a, b, r;
};

// The inputs of a token, from which a thread makes one channel in two steps: Load starts to load what Make needs.
struct Wkv7Token {
  const void *w, *k, *a, *b, *r;
  Decay decay;

  struct Loaded {
    uint32_t w, k, a, b, r;
  };

  __device__ Loaded Load(uint32_t head, int size, int channel, Dtype dtype) const {
    const int64_t i = int64_t{head} * size + channel;
    return {LoadBits(w, i, dtype), LoadBits(k, i, dtype), LoadBits(a, i, dtype),
            LoadBits(b, i, dtype), LoadBits(r, i, dtype)};
  }
  __device__ Channel Make(const Loaded& x, Dtype dtype) const {
    const auto number = [&](uint32_t bits) { return BitsToFloat(bits, dtype); };
    return {DecayAndSlope(number(x.w), decay).x, number(x.k), number(x.a), number(x.b),
            number(x.r)};
  }
};

struct DeltaToken {
  const void *q, *k, *g;
  const float *beta, *scale;
  uint32_t group;
  bool head_decay;

  struct Loaded {
    uint32_t q, k, g;
    float beta, scale;
  };

  __device__ Loaded Load(uint32_t head, int size, int channel, Dtype dtype) const {
    const int64_t of_keys = int64_t{head / group} * size + channel;
    const int64_t of_g = head_decay ? head : int64_t{head} * size + channel;
    return {LoadBits(q, of_keys, dtype), LoadBits(k, of_keys, dtype), LoadBits(g, of_g, OfG(dtype)),
            beta[head], *scale};
  }
  __device__ Channel Make(const Loaded& x, Dtype dtype) const {
    const float d = DecayAndSlope(BitsToFloat(x.g, OfG(dtype)), Decay::kLog).x;
    const float key = BitsToFloat(x.k, dtype);
    return {d, x.beta * key, d * key, -x.beta * key, x.scale * BitsToFloat(x.q, dtype)};
  }
  __device__ Dtype OfG(Dtype dtype) const { return head_decay ? Dtype::kF32 : dtype; }
};

template <int N, typename Token>
__global__ __launch_bounds__(StepPartition<N>::kThreads, StepPartition<N>::kBlocks) void StepKernel(
    ChainPlace place, const __grid_constant__ Token token, const void* values, Dtype dtype,
    const float* state, void* y, float* next_state) {
  using G = StepPartition<N>;
  static_assert(N <= G::kThreads, "a thread has a channel");
  __shared__ __align__(16) float vectors[kDy][N];
  const EarlierKernels earlier(place);
  earlier.LetNextStart();
  const G partition;
  const int thread = threadIdx.x, channel = thread % N, row = thread % G::kBlockRows;
  const int64_t first_row = int64_t{blockIdx.x} * G::kBlockRows;  // of those of all states

  // All loads are under way before one is waited for. A branch around some would make others wait.
  Fragment<G> s;
  LoadState(partition, state + first_row * N, s);
  const auto loaded = token.Load(blockIdx.x / G::kBlocksOfHead, N, channel, dtype);
  const uint32_t value = LoadBits(values, first_row + row, dtype);

  const Channel made = token.Make(loaded, dtype);
  const float v = BitsToFloat(value, dtype);
  if (thread == channel) {
    vectors[kW][thread] = made.d, vectors[kK][thread] = made.k, vectors[kA][thread] = made.a;
    vectors[kB][thread] = made.b, vectors[kR][thread] = made.r;
  }
  if (thread == row) vectors[kV][thread] = v;
  __syncthreads();

  const TokenView<N, 1> at{vectors[0], 0};
  float sa[G::kRows], r[G::kCols], out[G::kRows];
  ReadFromState(partition, at, s, sa);
  UpdateState(partition, at, sa, s);
  StoreState(partition, next_state + first_row * N, s);
  LoadCols(partition, at.Row(kR), r);
  PartialDot<G>(s, r, out);
  const int first_sum = ReduceScatter<1, G::kColGroups>(out, partition.lane);
  if (first_sum >= 0) StoreFloat(y, first_row + partition.first_row + first_sum, out[0], dtype);
}

template <typename Token>
cudaError_t LaunchStep(cudaStream_t stream, const Wkv7ForwardCall& call, const Token& token) {
  return ForHeadSize<16, 32, 64, 128>(call.dims.head_size, 0, [&](int, auto size) {
    using G = StepPartition<size()>;
    return LaunchChain(stream).Launch(
        StepKernel<size(), Token>, call.dims.batch * call.dims.heads * G::kBlocksOfHead,
        G::kThreads, 0, token, call.v, call.dtype, call.initial_state, call.y, call.final_state);
  });
}

}  // namespace

cudaError_t Wkv7Step(cudaStream_t stream, const Wkv7ForwardCall& call) {
  return LaunchStep(stream, call, Wkv7Token{call.w, call.k, call.a, call.b, call.r, call.decay});
}

cudaError_t Wkv7Step(cudaStream_t stream, const Wkv7DeltaForwardCall& call) {
  return LaunchStep(stream, call,
                    DeltaToken{call.r, call.k, call.w, call.beta, call.scale,
                               static_cast<uint32_t>(call.dims.group), call.head_decay});
}

}  // namespace rwkv_jax::cuda
