// WKV5 and WKV6 on CUDA: from XLA's operands to the kernels, which they share.
#include "wkv6.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv6_calls.h"
#include "sequences.h"

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
  return Launched(op, Wkv6Forward(stream, call));
}

template <bool kConstantDecay>
ffi::Error Backward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  float* const scratch = operands.FloatRet("scratch", "BHPX");
  const int64_t floats = Wkv6ScratchSize(call.dims.head_size);
  operands.Require(call.partials >= 1 && operands.Size('X') == floats, "scratch has ",
                   call.partials, " segments of ", operands.Size('X'),
                   " floats; expected at least 1 of ", floats);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6Backward(stream, call, call.partials, scratch));
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

void RequireChunked(Operands& operands, const Wkv6Call& call, int64_t segments, int64_t floats) {
  RequireMatrices(operands, call);
  RequireScratch(operands, call, segments, floats);
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
  const Segments segments{count, scratch, kWkv6SummarySize};
  RequireChunked(operands, call, count, segments.Stride());
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6ChunkForward(stream, call, segments));
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
                   call.dims.saved, ", one for each frame");
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
  call.marks = operands.MarksArg(operands.Size('T'));
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
  call.marks = operands.MarksArg(operands.Size('T'));
  internal::ReadSizes(operands, operands.Size('T'), decay, kMaxHeadSize, call);
  RequireMatrices(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched(op, Wkv6ReverseSummary(stream, call));
}

// As of WKV7; parameters are there once for each sequence, and their gradients are sums for each frame.
void RequireSequences(Operands& operands, const Wkv6Call& call, const Segments& segments) {
  RequireMatrices(operands, call);
  RequireScratch(operands, call, segments.count, segments.Stride());
}

void ReadSequenceInputs(Operands& operands, Wkv6Call& call) {
  call.r = operands.Arg("r", "BTHK");
  call.w = call.constant_decay ? operands.FloatArg("w", "BSHK") : operands.Arg("w", "BTHK");
  call.k = operands.Arg("k", "BTHK");
  call.v = operands.Arg("v", "BTHV");
  call.u = operands.FloatArg("u", "BSHK");
}

template <bool kConstantDecay>
ffi::Error SequencesForward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5" : "wkv6";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadSequenceInputs(operands, call);
  call.initial_state = operands.FloatArg("initial_state", "BSHVK");
  call.sequences.spans = operands.IntArg("spans", "BSW");
  call.y = operands.Ret("y", "BTHV");
  call.final_state = operands.FloatRet("final_state", "BSHVK");
  call.states = operands.StatesRet("states", "BNHVK", call.states_dtype);
  float* const scratch = operands.FloatRet("scratch", "HX");
  ReadSequences(operands, decay, true, call);
  if (call.dims.saved == 0) call.states = nullptr;
  const Segments segments = SegmentsOf(operands, count, scratch, kWkv6SummarySize);
  RequireSequences(operands, call, segments);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call, {call.y});
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0)
    error = Wkv6Scan(stream, call, segments);
  return Launched(op, error);
}

template <bool kConstantDecay>
ffi::Error SequencesBackward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             int64_t decay, int64_t count) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadSequenceInputs(operands, call);
  call.states = operands.StatesArg("states", "BNHVK", call.states_dtype);
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "BSHVK");
  call.sequences.spans = operands.IntArg("spans", "BSW");
  call.sequences.owners = operands.IntArg("owners", "BN");
  call.dr = operands.Ret("dr", "BTHK");
  call.dw = kConstantDecay ? operands.FloatRet("dw", "BNHK") : operands.Ret("dw", "BTHK");
  call.dk = operands.Ret("dk", "BTHK");
  call.dv = operands.Ret("dv", "BTHV");
  call.du = operands.FloatRet("du", "BNHK");
  call.dinitial_state = operands.FloatRet("dinitial_state", "BSHVK");
  float* const scratch = operands.FloatRet("scratch", "HX");
  uint4* const gradients = reinterpret_cast<uint4*>(operands.FloatRet("gradients", "BNHY"));
  ReadSequences(operands, decay, false, call);
  const Segments segments = SegmentsOf(operands, count, scratch, kWkv6SummarySize);
  RequireSequences(operands, call, segments);
  RequireGradients(operands, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error =
      kConstantDecay ? ClearOutside(stream, operands, call, {call.dr, call.dk, call.dv})
                     : ClearOutside(stream, operands, call, {call.dr, call.dw, call.dk, call.dv});
  if (error == cudaSuccess && call.dims.batch * call.dims.heads > 0) {
    error = Wkv6ReverseScan(stream, call, segments, gradients);
    if (error == cudaSuccess) error = Wkv6FrameBackward(stream, call, gradients);
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
