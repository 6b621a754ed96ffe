// The XLA FFI under a short name.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace rwkv_jax {
namespace ffi = xla::ffi;
}
