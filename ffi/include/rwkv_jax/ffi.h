// The XLA FFI under a short name, and the one way in which this library defines a handler.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace rwkv_jax {
namespace ffi = xla::ffi;
}

// Defines the handler symbol `fn`, which `impl` implements: RWKV_JAX_HANDLER(fn, impl, binding) or
// RWKV_JAX_HANDLER(fn, impl, binding, traits). To be used outside any namespace.
#define RWKV_JAX_HANDLER(fn, impl, ...) \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(fn);   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(fn, impl, __VA_ARGS__)
