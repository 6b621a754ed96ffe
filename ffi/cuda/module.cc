#include "rwkv_jax/module.h"
#include "rwkv_jax/wkv4_calls.h"
#include "rwkv_jax/wkv6_calls.h"
#include "rwkv_jax/wkv7_calls.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5ChunkFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5ChunkBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5SequencesFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5SequencesBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5Summary);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5ReverseSummary);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6ChunkFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6ChunkBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6SequencesFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6SequencesBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6Summary);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6ReverseSummary);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7ChunkFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7ChunkBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7SequencesFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7SequencesBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7Summary);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7ReverseSummary);

NB_MODULE(_cuda, module) {
  rwkv_jax::Export(module, {{"rwkv_wkv4_fwd_v1", Wkv4Fwd},
                            {"rwkv_wkv4_bwd_v1", Wkv4Bwd},
                            {"rwkv_wkv4_step_v1", Wkv4Step},
                            {"rwkv_wkv5_fwd_v1", Wkv5Fwd},
                            {"rwkv_wkv5_bwd_v1", Wkv5Bwd},
                            {"rwkv_wkv5_chunk_fwd_v1", Wkv5ChunkFwd},
                            {"rwkv_wkv5_chunk_bwd_v1", Wkv5ChunkBwd},
                            {"rwkv_wkv5_sequences_fwd_v1", Wkv5SequencesFwd},
                            {"rwkv_wkv5_sequences_bwd_v1", Wkv5SequencesBwd},
                            {"rwkv_wkv5_summary_v1", Wkv5Summary},
                            {"rwkv_wkv5_reverse_summary_v1", Wkv5ReverseSummary},
                            {"rwkv_wkv5_step_v1", Wkv5Step},
                            {"rwkv_wkv6_fwd_v1", Wkv6Fwd},
                            {"rwkv_wkv6_bwd_v1", Wkv6Bwd},
                            {"rwkv_wkv6_chunk_fwd_v1", Wkv6ChunkFwd},
                            {"rwkv_wkv6_chunk_bwd_v1", Wkv6ChunkBwd},
                            {"rwkv_wkv6_sequences_fwd_v1", Wkv6SequencesFwd},
                            {"rwkv_wkv6_sequences_bwd_v1", Wkv6SequencesBwd},
                            {"rwkv_wkv6_summary_v1", Wkv6Summary},
                            {"rwkv_wkv6_reverse_summary_v1", Wkv6ReverseSummary},
                            {"rwkv_wkv6_step_v1", Wkv6Step},
                            {"rwkv_wkv7_fwd_v1", Wkv7Fwd},
                            {"rwkv_wkv7_bwd_v1", Wkv7Bwd},
                            {"rwkv_wkv7_chunk_fwd_v1", Wkv7ChunkFwd},
                            {"rwkv_wkv7_chunk_bwd_v1", Wkv7ChunkBwd},
                            {"rwkv_wkv7_sequences_fwd_v1", Wkv7SequencesFwd},
                            {"rwkv_wkv7_sequences_bwd_v1", Wkv7SequencesBwd},
                            {"rwkv_wkv7_summary_v1", Wkv7Summary},
                            {"rwkv_wkv7_reverse_summary_v1", Wkv7ReverseSummary},
                            {"rwkv_wkv7_step_v1", Wkv7Step}});
}
