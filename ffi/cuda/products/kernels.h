// The products in tiles (tiled_products.h), for those who launch none themselves.
#pragma once

namespace rwkv_jax::cuda {

// Whether this build has code for the current device.
bool HasTiledProducts();

}  // namespace rwkv_jax::cuda
