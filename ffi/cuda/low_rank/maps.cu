// Several low-rank maps: the first products of all of them in one launch, and the second ones in another.
#include "low_rank/kernels.h"
#include "products/tiled_products.h"

namespace rwkv_jax::cuda {
namespace {

Result ResultOf(Activation activation) {
  switch (activation) {
    case Activation::kIdentity: break;
    case Activation::kTanh: return Result::kTanh;
    case Activation::kSigmoid: return Result::kSigmoid;
  }
  return Result::kRounded;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const LowRankMapsCall& call, const Device& device) {
  MatrixProducts first = {}, second = {};
  first.count = second.count = call.count;
  first.rows = second.rows = static_cast<int>(call.tokens);
  const int width = static_cast<int>(call.width);
  for (int i = 0; i < call.count; ++i) {
    const LowRankMapsCall::Map& map = call.maps[i];
    const int rank = static_cast<int>(map.rank);
    MatrixProduct& down = first.of[i];
    down.matrix = map.first, down.x = map.rows, down.y = map.hidden;
    down.outputs = down.stride = rank, down.inputs = width;
    down.result = ResultOf(map.activation), down.by_input = true;
    MatrixProduct& up = second.of[i];
    up.matrix = map.second, up.x = map.hidden, up.y = map.result;
    up.outputs = up.stride = width, up.inputs = rank;
    up.result = map.offset == nullptr ? Result::kRounded : Result::kAdded, up.by_input = true;
    up.residual = map.offset, up.is_offset = true;
  }
  LaunchChain chain(stream);
  const cudaError_t error = LaunchTiledProducts(chain, device, first, nullptr);
  return error == cudaSuccess ? LaunchTiledProducts(chain, device, second, nullptr) : error;
}

}  // namespace rwkv_jax::cuda
