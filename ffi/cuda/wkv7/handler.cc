// WKV7 on CUDA: from XLA's operands to the kernels.
#include "wkv7/kernels.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv7_calls.h"
#include "sequences_handler.h"

namespace rwkv_jax::cuda {
namespace {

ffi::Error Forward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call, {call.y});
  if (error == cudaSuccess) error = Wkv7Forward(stream, call);
  return Launched("wkv7", error);
}

ffi::Error Step(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv7_step", args, rets);
  Wkv7ForwardCall call;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7_step", Wkv7Forward(stream, call));
}

cudaError_t ClearGradients(cudaStream_t stream, const Operands& operands,
                           const Wkv7BackwardCall& call) {
  return ClearOutside(stream, operands, call,
                      {call.dr, call.dw, call.dk, call.dv, call.da, call.db});
}

ffi::Error Backward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  const ReplayScratch scratch = ReadReplayScratch(operands, ScratchSize(call.dims.head_size));
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearGradients(stream, operands, call);
  if (error == cudaSuccess) error = Wkv7Backward(stream, call, scratch);
  return Launched("wkv7 backward", error);
}

void RequireMatrices(Operands& operands, const Wkv7Call& call) {
  operands.Require(call.dims.head_size >= 64, "w has K = ", call.dims.head_size,
                   "; the kernels on matrix units take 64 or 128");
  RequireMatrixUnits(operands, call);
}

void RequireChunked(Operands& operands, const Wkv7Call& call, int64_t splits, int64_t floats) {
  RequireMatrices(operands, call);
  RequireRows(operands);
  RequireScratch(operands, call, splits, floats);
}

void RequireSummed(Operands& operands, const Wkv7Call& call) {
  RequireMatrices(operands, call);
  operands.Require(call.decay == Decay::kSigmoid, "decay is ", static_cast<int64_t>(call.decay),
                   "; a summary on matrix units takes 2 (sigmoid)");
}

ffi::Error ChunkForward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int64_t decay, int64_t count) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  float* const scratch = operands.FloatRet("scratch", "BHX");
  float* const inexact = operands.FloatRet("inexact", "BH");
  const Splits splits{count, scratch, SummarySize(call.dims.head_size)};
  RequireChunked(operands, call, count, splits.Stride());
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7", Wkv7ChunkForward(stream, call, splits, inexact));
}

ffi::Error ChunkBackward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         int64_t decay, int64_t count) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  float* const memory = operands.FloatRet("scratch", "BHX");
  float* const inexact = operands.FloatRet("inexact", "BH");
  RequireChunked(operands, call, count, ChunkScratch::Size(call, count));
  const ChunkScratch scratch{memory, operands.Size('X'), count};
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7 backward", Wkv7ChunkBackward(stream, call, scratch, inexact));
}

ffi::Error Summary(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv7 summary", args, rets);
  Wkv7SummaryCall call = {};
  call.w = operands.Arg("w", "BTHK");
  call.k = operands.Arg("k", "BTHK");
  call.v = operands.Arg("v", "BTHV");
  call.a = operands.Arg("a", "BTHK");
  call.b = operands.Arg("b", "BTHK");
  call.factor = operands.FloatRet("factor", "BHKK");
  call.added = operands.FloatRet("added", "BHVK");
  call.marks = operands.MarksArg();
  internal::ReadSizes(operands, operands.Size('T'), decay, kMaxHeadSize, call);
  RequireSummed(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7 summary", Wkv7Summary(stream, call));
}

ffi::Error ReverseSummary(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          int64_t decay) {
  Operands operands("wkv7 reverse summary", args, rets);
  Wkv7BackwardCall call = {};
  call.r = operands.Arg("r", "BTHK");
  call.w = operands.Arg("w", "BTHK");
  call.a = operands.Arg("a", "BTHK");
  call.b = operands.Arg("b", "BTHK");
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "BHVK");
  call.dinitial_state = operands.FloatRet("dinitial_state", "BHVK");
  call.marks = operands.MarksArg();
  internal::ReadSizes(operands, operands.Size('T'), decay, kMaxHeadSize, call);
  RequireSummed(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7 reverse summary", Wkv7ReverseSummary(stream, call));
}

void RequireSequences(Operands& operands, const Wkv7Call& call, const Splits& splits) {
  RequireSummed(operands, call);
  RequireScratch(operands, call, splits.count, splits.Stride());
}

ffi::Error SequencesForward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            int64_t decay, int64_t count) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  const Splits splits = ReadSplits(operands, count, SummarySize(call.dims.head_size));
  RequireSequences(operands, call, splits);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call, {call.y});
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0)
    error = Wkv7Scan(stream, call, splits, nullptr);
  return Launched("wkv7", error);
}

ffi::Error SequencesBackward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             int64_t decay, int64_t count) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  const Splits splits = ReadSplits(operands, count, SummarySize(call.dims.head_size));
  uint4* const gradients = ReadStateGradients(operands, call);
  RequireSequences(operands, call, splits);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearGradients(stream, operands, call);
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0) {
    error = Wkv7ReverseScan(stream, call, splits, gradients, nullptr);
    if (error == cudaSuccess) error = Wkv7Gradients(stream, call, gradients, nullptr);
  }
  return Launched("wkv7 backward", error);
}

}  // namespace
}  // namespace rwkv_jax::cuda

RWKV_JAX_CUDA_HANDLER(Wkv7SequencesFwd, rwkv_jax::cuda::SequencesForward,
                      rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv7SequencesBwd, rwkv_jax::cuda::SequencesBackward,
                      rwkv_jax::cuda::ChunkBinding());

RWKV_JAX_CUDA_HANDLER(Wkv7Fwd, rwkv_jax::cuda::Forward, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv7Bwd, rwkv_jax::cuda::Backward, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv7ChunkFwd, rwkv_jax::cuda::ChunkForward, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv7ChunkBwd, rwkv_jax::cuda::ChunkBackward, rwkv_jax::cuda::ChunkBinding());
RWKV_JAX_CUDA_HANDLER(Wkv7Summary, rwkv_jax::cuda::Summary, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv7ReverseSummary, rwkv_jax::cuda::ReverseSummary,
                      rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv7Step, rwkv_jax::cuda::Step, rwkv_jax::cuda::Binding());
