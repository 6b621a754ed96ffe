#include "rwkv_jax/module.h"
#include "rwkv_jax/wkv7_calls.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7ChunkFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7ChunkBwd);

NB_MODULE(_cuda, module) {
  rwkv_jax::Export(module, {{"rwkv_wkv7_fwd_v1", Wkv7Fwd},
                            {"rwkv_wkv7_bwd_v1", Wkv7Bwd},
                            {"rwkv_wkv7_chunk_fwd_v1", Wkv7ChunkFwd},
                            {"rwkv_wkv7_chunk_bwd_v1", Wkv7ChunkBwd},
                            {"rwkv_wkv7_step_v1", Wkv7Step}});
}
