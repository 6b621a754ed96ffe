// WKV5 and WKV6 on CUDA: from XLA's operands to the kernels, which they share.
#include "wkv6/kernels.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv6_calls.h"
#include "sequences_handler.h"

namespace rwkv_jax::cuda {
namespace {

template <bool kConstantDecay>
ffi::Error Forward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5" : "wkv6";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call, {call.y});
  if (error == cudaSuccess) error = Wkv6Forward(stream, call);
  return Launched(op, error);
}

cudaError_t ClearGradients(cudaStream_t stream, const Operands& operands,
                           const Wkv6BackwardCall& call) {
  if (call.constant_decay)
    return ClearOutside(stream, operands, call, {call.dr, call.dk, call.dv});
  return ClearOutside(stream, operands, call, {call.dr, call.dw, call.dk, call.dv});
}

template <bool kConstantDecay>
ffi::Error Backward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  const ReplayScratch scratch = ReadReplayScratch(operands, Wkv6ScratchSize(call.dims.head_size));
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearGradients(stream, operands, call);
  if (error == cudaSuccess) error = Wkv6Backward(stream, call, scratch);
  return Launched(op, error);
}

template <bool kConstantDecay>
ffi::Error Step(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5_step" : "wkv6_step";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6Forward(stream, call));
}

void RequireMatrices(Operands& operands, const Wkv6Call& call) {
  operands.Require(call.dims.head_size == kMatrixHeadSize, "v has K = ", call.dims.head_size,
                   "; the kernels on matrix units take 64");
  RequireMatrixUnits(operands, call);
}

void RequireChunked(Operands& operands, const Wkv6Call& call, int64_t splits, int64_t floats) {
  RequireMatrices(operands, call);
  RequireRows(operands);
  RequireScratch(operands, call, splits, floats);
}

template <bool kConstantDecay>
ffi::Error ChunkForward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5" : "wkv6";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadForward(operands, decay, kMaxHeadSize, call);
  float* const scratch = operands.FloatRet("scratch", "BHX");
  const Splits splits{count, scratch, kWkv6SummarySize};
  RequireChunked(operands, call, count, splits.Stride());
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6ChunkForward(stream, call, splits));
}

template <bool kConstantDecay>
ffi::Error ChunkBackward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  float* const memory = operands.FloatRet("scratch", "BHX");
  RequireChunked(operands, call, count, Wkv6ChunkScratch::Size(call, count));
  operands.Require(call.partials == call.dims.saved, "du has P = ", call.partials, "; expected ",
                   call.dims.saved, ", one for each chunk");
  const Wkv6ChunkScratch scratch{memory, operands.Size('X'), count};
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6ChunkBackward(stream, call, scratch));
}

template <bool kConstantDecay>
ffi::Error Summary(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5 summary" : "wkv6 summary";
  Operands operands(op, args, rets);
  Wkv6SummaryCall call = {};
  call.constant_decay = kConstantDecay;
  call.w = internal::ReadDecays(operands, "BTHK", kConstantDecay);
  call.k = operands.Arg("k", "BTHK");
  call.v = operands.Arg("v", "BTHV");
  call.factor = operands.FloatRet("factor", "BHK");
  call.added = operands.FloatRet("added", "BHVK");
  call.marks = operands.MarksArg();
  internal::ReadSizes(operands, operands.Size('T'), decay, kMaxHeadSize, call);
  RequireMatrices(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6Summary(stream, call));
}

template <bool kConstantDecay>
ffi::Error ReverseSummary(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5 reverse summary" : "wkv6 reverse summary";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call = {};
  call.constant_decay = kConstantDecay;
  call.r = operands.Arg("r", "BTHK");
  call.w = internal::ReadDecays(operands, "BTHK", kConstantDecay);
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "BHVK");
  call.dinitial_state = operands.FloatRet("dinitial_state", "BHVK");
  call.marks = operands.MarksArg();
  internal::ReadSizes(operands, operands.Size('T'), decay, kMaxHeadSize, call);
  RequireMatrices(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6ReverseSummary(stream, call));
}

void RequireSequences(Operands& operands, const Wkv6Call& call, const Splits& splits) {
  RequireMatrices(operands, call);
  RequireScratch(operands, call, splits.count, splits.Stride());
}

template <bool kConstantDecay>
ffi::Error SequencesForward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5" : "wkv6";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadForward(operands, decay, kMaxHeadSize, call);
  const Splits splits = ReadSplits(operands, count, kWkv6SummarySize);
  RequireSequences(operands, call, splits);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call, {call.y});
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0)
    error = Wkv6Scan(stream, call, splits);
  return Launched(op, error);
}

// With a partial sum for each chunk of a row.
template <bool kConstantDecay>
ffi::Error SequencesBackward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadBackward(operands, decay, kMaxHeadSize, call, "BNHK");
  const Splits splits = ReadSplits(operands, count, kWkv6SummarySize);
  uint4* const gradients = ReadStateGradients(operands, call);
  RequireSequences(operands, call, splits);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearGradients(stream, operands, call);
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0) {
    error = Wkv6ReverseScan(stream, call, splits, gradients);
    if (error == cudaSuccess) error = Wkv6Gradients(stream, call, gradients);
  }
  return Launched(op, error);
}

}  // namespace
}  // namespace rwkv_jax::cuda

RWKV_JAX_CUDA_HANDLER(Wkv5SequencesFwd, rwkv_jax::cuda::SequencesForward<true>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv5SequencesBwd, rwkv_jax::cuda::SequencesBackward<true>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv6SequencesFwd, rwkv_jax::cuda::SequencesForward<false>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv6SequencesBwd, rwkv_jax::cuda::SequencesBackward<false>, rwkv_jax::cuda::ChunkBinding());

RWKV_JAX_CUDA_HANDLER(Wkv5Fwd, rwkv_jax::cuda::Forward<true>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv5Bwd, rwkv_jax::cuda::Backward<true>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv5Step, rwkv_jax::cuda::Step<true>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv6Fwd, rwkv_jax::cuda::Forward<false>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv6Bwd, rwkv_jax::cuda::Backward<false>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv6Step, rwkv_jax::cuda::Step<false>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv5ChunkFwd, rwkv_jax::cuda::ChunkForward<true>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv5ChunkBwd, rwkv_jax::cuda::ChunkBackward<true>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv6ChunkFwd, rwkv_jax::cuda::ChunkForward<false>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv6ChunkBwd, rwkv_jax::cuda::ChunkBackward<false>, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv5Summary, rwkv_jax::cuda::Summary<true>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv5ReverseSummary, rwkv_jax::cuda::ReverseSummary<true>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv6Summary, rwkv_jax::cuda::Summary<false>, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv6ReverseSummary, rwkv_jax::cuda::ReverseSummary<false>, rwkv_jax::cuda::Binding());
