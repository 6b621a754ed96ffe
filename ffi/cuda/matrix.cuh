// Products on the matrix units, and how their operands lie in shared memory and in registers.
//
// Operands are bfloat16, sums are float. The sum of a product is in the registers of a warp, which has 16
// rows of it; the left operand too, or it is in shared memory as the right operand is.
// Compiled for sm_90a a product is one instruction of a warpgroup (four warps, 64 rows) that runs on
// while the warps go on; for any other architecture it is mma.sync. Only this file knows of that.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RWKV_JAX_WARPGROUP_PRODUCTS 1
#else
#define RWKV_JAX_WARPGROUP_PRODUCTS 0
#endif

namespace rwkv_jax::cuda {

// A 16 x 16 left operand. Lane l has rows l/4 (registers 0 and 2) and l/4 + 8 (1 and 3), and of them
// columns 2(l%4) and the next (0 and 1) and those plus 8 (2 and 3).
using Left = uint32_t[4];

// Sums, in tiles of 16 x 8. Lane l has columns 2(l%4) and the next of rows l/4 (elements 0 and 1) and
// l/4 + 8 (2 and 3). Two tiles side by side, rounded, are a Left.
template <int kTiles>
using Accumulator = float[kTiles][4];

// Two elements of a 16-bit type in one register.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ uint32_t Round(float low, float high) { return RoundToBf16(low, high); }
  static __device__ uint32_t Multiply(uint32_t a, uint32_t b) { return MultiplyBf16(a, b); }
  static __device__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
};

template <>
struct Pair<__half> {
  static __device__ uint32_t Round(float low, float high) { return RoundToHalf(low, high); }
  static __device__ float Low(uint32_t pair) {
    return __low2float(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ float High(uint32_t pair) {
    return __high2float(*reinterpret_cast<const __half2*>(&pair));
  }
};

using Bf16 = Pair<__nv_bfloat16>;

template <typename T>
__device__ uint32_t ToBf16(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return pair;
  return Bf16::Round(Pair<T>::Low(pair), Pair<T>::High(pair));
}

// Two tiles of sums, rounded; as bfloat16 they are a left operand.
template <typename T = __nv_bfloat16>
__device__ void Round(const float (&left)[4], const float (&right)[4], uint32_t (&x)[4]) {
  x[0] = Pair<T>::Round(left[0], left[1]);
  x[1] = Pair<T>::Round(left[2], left[3]);
  x[2] = Pair<T>::Round(right[0], right[1]);
  x[3] = Pair<T>::Round(right[2], right[3]);
}

// 64 columns of sums as left operands.
__device__ inline void RoundPanel(const Accumulator<8>& sum, Left (&rounded)[4]) {
#pragma unroll
  for (int block = 0; block < 4; ++block)
    Round(sum[2 * block], sum[2 * block + 1], rounded[block]);
}

__device__ inline int Lane() { return threadIdx.x % 32; }

// By way of a shuffle, so that the compiler knows that all lanes agree.
__device__ inline int Warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// A tile in shared memory has rows of 64 elements, 128 bytes: eight pieces of 16 bytes, of which the
// p-th lies in place p ^ (row % 8), so that eight rows of one piece, or eight pieces of one row, lie
// in different banks. Tiles start at multiples of 1024 bytes.
constexpr int kPanelCols = 64;
constexpr int kRowBytes = 2 * kPanelCols;
constexpr int kPanelAlignment = 1024;

__device__ inline uint32_t PieceAddress(uint32_t tile, int row, int piece) {
  return tile + row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// Where this lane points for the four 8 x 8 matrices of the 16 x 16 block at `row` (a multiple of 16)
// and columns 16 * block: upper left, lower left, upper right, lower right, as in a Left; or, by rows,
// upper left, upper right, lower left, lower right. A block has pieces 2 * block and the next of each
// row, so the swizzle leaves the bits of `block` to a constant.
__device__ inline uint32_t TileAddress(uint32_t tile, int row, int block) {
  const int lane = Lane();
  return tile + row * kRowBytes + (PieceAddress(0, lane % 16, lane / 16) ^ (block << 5));
}

__device__ inline uint32_t TileAddressByRows(uint32_t tile, int row, int block) {
  const int lane = Lane();
  return tile + row * kRowBytes +
         (PieceAddress(0, lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ (block << 5));
}

// A small operand of 16 x 16 blocks of 512 bytes in a column; each is four 8 x 8 matrices of 128
// bytes: upper left, upper right, lower left, lower right.
constexpr int kTileBytes = 512;

__device__ inline uint32_t PackedTileAddress(uint32_t block) {
  const int lane = Lane();
  return block + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16;
}

__device__ inline uint32_t PackedTileAddressByRows(uint32_t block) {
  return block + Lane() * 16;
}

__device__ inline void StoreMatrices(uint32_t address, const uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  StoreMatricesNatively(address, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    StoreWord(__shfl_sync(~0u, address, 8 * i + Lane() / 4) + 4 * (Lane() % 4), x[i]);
#endif
}

__device__ inline void StoreTransposed(uint32_t address, const uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  StoreTransposedNatively(address, x);
#else
  StoreMatrices(address, {Transposed(x[0]), Transposed(x[1]), Transposed(x[2]), Transposed(x[3])});
#endif
}

// The block at `row` and columns 16 * block of a tile as a left operand, and its transpose.
__device__ inline void LoadLeft(uint32_t tile, int row, int block, Left& a) {
  LoadMatrices(TileAddress(tile, row, block), a);
}

__device__ inline void LoadLeftTransposed(uint32_t tile, int row, int block, Left& a) {
  LoadTransposed(TileAddressByRows(tile, row, block), a);
}

// Operands in shared memory: 16 steps k of the sum, and 8 * kTiles columns of a right operand or, for
// the four warps of a warpgroup, 64 rows of a left one. `Load` gives the registers of a right operand
// for two tiles of columns, 2 * pair and the next, in the order {tile 0 upper, tile 0 lower, tile 1
// upper, tile 1 lower}; `LoadLeft` those of a left operand for the rows of a warp.

// k runs along the rows of a tile, from column 16 * block on.
struct KAlongRows {
  uint32_t tile;
  int block = 0;

  static constexpr bool kDown = false;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadMatrices(TileAddressByRows(tile, 16 * pair, block), b);
  }
  __device__ void LoadLeft(int warp, Left& a) const {
    cuda::LoadLeft(tile, 16 * warp, block, a);
  }
  __device__ uint64_t Descriptor() const;
};

// k runs down the rows of a tile, from row 16 * block on; the operand starts at column 16 * column.
struct KDownRows {
  uint32_t tile;
  int block = 0, column = 0;

  static constexpr bool kDown = true;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadTransposed(TileAddress(tile, 16 * block, column + pair), b);
  }
  __device__ void LoadLeft(int warp, Left& a) const {
    LoadLeftTransposed(tile, 16 * block, column + warp, a);
  }
  __device__ uint64_t Descriptor() const;
};

// k runs along the rows of packed blocks.
struct PackedTiles {
  uint32_t blocks;

  static constexpr bool kDown = false;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadMatrices(PackedTileAddressByRows(blocks + pair * kTileBytes), b);
  }
  __device__ uint64_t Descriptor() const;
};

// A matrix in shared memory as a warpgroup product takes it: the address of its tile and its offset
// there, the bytes between 8 x 8 matrices (in packed blocks along k and across it, in swizzled tiles
// from eight rows to the next), and whether its rows are swizzled.
__device__ inline uint64_t MatrixDescriptor(uint32_t tile, int offset, int leading_bytes,
                                            int stride_bytes, bool swizzled) {
  const uint32_t low = (tile >> 4) + (offset >> 4) + (leading_bytes >> 4 << 16);
  const uint32_t high = (stride_bytes >> 4) + (swizzled ? 1u << 30 : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ inline uint64_t KAlongRows::Descriptor() const {
  return MatrixDescriptor(tile, 32 * block, 16, 8 * kRowBytes, true);
}

__device__ inline uint64_t KDownRows::Descriptor() const {
  return MatrixDescriptor(tile, 16 * kRowBytes * block + 32 * column, 8 * kRowBytes, 8 * kRowBytes, true);
}

__device__ inline uint64_t PackedTiles::Descriptor() const {
  return MatrixDescriptor(blocks, 0, 128, 256, false);
}

// What was stored to shared memory by this thread becomes visible to products after the next barrier.
__device__ inline void PublishOperands() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Products are issued between BeginProducts and CommitProducts; WaitForProducts<n> returns when at
// most n of the committed groups still run. Until then neither operands nor sums may be touched, and
// then each sum is to be Settled before it is read.
__device__ inline void BeginProducts() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void CommitProducts() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int kRunning>
__device__ void WaitForProducts() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
#endif
}

template <int kTiles>
__device__ void Settle(Accumulator<kTiles>& sum) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    asm volatile("" : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])::"memory");
#endif
}

#if RWKV_JAX_WARPGROUP_PRODUCTS

#define RWKV_JAX_SUM(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])

template <bool kAdd, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<2>& c, const Left& a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %13, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, add, 1, 1, %14;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}), "n"(int{kRightDown}));
}

template <bool kAdd, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<4>& c, const Left& a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %21, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, %22;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}), "n"(int{kRightDown}));
}

template <bool kAdd, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<8>& c, const Left& a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3),
        RWKV_JAX_SUM(4), RWKV_JAX_SUM(5), RWKV_JAX_SUM(6), RWKV_JAX_SUM(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}), "n"(int{kRightDown}));
}

template <bool kAdd, bool kLeftDown, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<8>& c, uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, %35, %36;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3),
        RWKV_JAX_SUM(4), RWKV_JAX_SUM(5), RWKV_JAX_SUM(6), RWKV_JAX_SUM(7)
      : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kLeftDown}), "n"(int{kRightDown}));
}

#undef RWKV_JAX_SUM

#endif  // RWKV_JAX_WARPGROUP_PRODUCTS

// sum = a b, or sum += a b if kAdd, with a in registers.
template <bool kAdd, int kTiles, typename Right>
__device__ void Multiply(Accumulator<kTiles>& sum, const Left& a, const Right& b) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  WarpgroupMultiply<kAdd, Right::kDown>(sum, a, b.Descriptor());
#else
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    uint32_t x[4];
    b.Load(pair, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float(&tile)[4] = sum[2 * pair + i];
      if constexpr (!kAdd) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
      WarpMultiply(tile, a, x[2 * i], x[2 * i + 1]);
    }
  }
#endif
}

// The same with a in shared memory, for the rows of this warp of its warpgroup.
template <bool kAdd, int kTiles, typename LeftTile, typename Right>
__device__ void Multiply(Accumulator<kTiles>& sum, int warp, const LeftTile& a, const Right& b) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  WarpgroupMultiply<kAdd, LeftTile::kDown, Right::kDown>(sum, a.Descriptor(), b.Descriptor());
#else
  Left rows;
  a.LoadLeft(warp, rows);
  Multiply<kAdd>(sum, rows, b);
#endif
}

}  // namespace rwkv_jax::cuda
