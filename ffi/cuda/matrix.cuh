// Products on the matrix units, and how their operands lie in shared memory and in registers.
//
// Operands are bfloat16 and sums are float. A warp has 16 rows of a sum in its registers. The left
// operand is in registers or in shared memory, the right operand is in shared memory. Compiled for
// sm_90a, a product is one asynchronous instruction of a warpgroup (wgmma: four warps, 64 rows).
// For any other architecture it is mma.sync of each warp. Only this file knows which of the two
// runs. An operand of floats is the sum of two operands of bfloat16, its terms.
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

// A tile, 16 x 16, as the left operand of a product. Registers 0 and 2 of lane l have row l/4,
// registers 1 and 3 row l/4 + 8. Registers 0 and 1 have columns 2(l%4) and 2(l%4) + 1, registers 2
// and 3 the columns 8 further.
using Left = uint32_t[4];

// Sums of a warp, 16 rows by 8 * kFragments columns. A fragment is 16 x 8: elements 0 and 1 of lane
// l are row l/4, elements 2 and 3 row l/4 + 8, in columns 2(l%4) and 2(l%4) + 1. Two fragments side
// by side, rounded, are a Left.
template <int kFragments>
using Accumulator = float[kFragments][4];

// Calls fn(fragment, element) for all elements of an Accumulator<kFragments>.
template <int kFragments, typename Fn>
__device__ void ForEachElement(Fn&& fn) {
#pragma unroll
  for (int fragment = 0; fragment < kFragments; ++fragment)
#pragma unroll
    for (int e = 0; e < 4; ++e) fn(fragment, e);
}

// A float has two terms of bfloat16, itself rounded and the rest rounded: together 16 bits of its mantissa. An
// element of another type is one term.
template <typename T>
constexpr int kTermsOf = std::is_same_v<T, float> ? 2 : 1;

// Calls fn(i, j) for the products of term i of one operand and term j of the other. Unless kAll, the product of
// two second terms is left out: it is no larger than what two terms leave of a float.
template <int kTerms, bool kAll = false, typename Fn>
__device__ void ForProducts(Fn&& fn) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i)
#pragma unroll
    for (int j = 0; j < (kAll ? kTerms : kTerms - i); ++j) fn(i, j);
}

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
template <typename T>
__device__ uint32_t FromBf16(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return pair;
  return Pair<T>::Round(Bf16::Low(pair), Bf16::High(pair));
}

// Rounds two fragments; as bfloat16 they are a left operand.
template <typename T = __nv_bfloat16>
__device__ void Round(const float (&left)[4], const float (&right)[4], uint32_t (&x)[4]) {
  x[0] = Pair<T>::Round(left[0], left[1]);
  x[1] = Pair<T>::Round(left[2], left[3]);
  x[2] = Pair<T>::Round(right[0], right[1]);
  x[3] = Pair<T>::Round(right[2], right[3]);
}

// Two floats as terms.
template <typename T = __nv_bfloat16, int kTerms>
__device__ void Round(float low, float high, uint32_t (&x)[kTerms]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    x[term] = Pair<T>::Round(low, high);
    low -= Pair<T>::Low(x[term]), high -= Pair<T>::High(x[term]);
  }
}

// Two fragments as terms.
template <typename T = __nv_bfloat16, int kTerms>
__device__ void Round(const float (&left)[4], const float (&right)[4], Left (&x)[kTerms]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const pair = (i < 2 ? left : right) + i % 2 * 2;
    uint32_t terms[kTerms];
    Round<T>(pair[0], pair[1], terms);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) x[term][i] = terms[term];
  }
}

// Rounds 64 columns of sums to left operands, or to terms of them.
template <typename Operand>
__device__ void RoundPanel(const Accumulator<8>& sum, Operand (&rounded)[4]) {
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) Round(sum[2 * tile], sum[2 * tile + 1], rounded[tile]);
}

__device__ inline int Lane() { return threadIdx.x % 32; }

// The warp of this thread in its block. It comes from a shuffle, so that the compiler knows that it
// is the same in all lanes.
__device__ inline int Warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// A panel in shared memory has rows of 64 elements, 128 bytes. A row is eight pieces of 16 bytes,
// and piece p lies in place p ^ (row % 8). So eight rows of one piece, or eight pieces of one row,
// lie in different banks. Panels start at multiples of 1024 bytes.
constexpr int kPanelCols = 64;
constexpr int kRowBytes = 2 * kPanelCols;
constexpr int kPanelAlignment = 1024;

__device__ inline uint32_t PieceAddress(uint32_t panel, int row, int piece) {
  return panel + row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// Floats lie where their terms will lie: of 16 columns of a row the first eight in the panel of the first
// terms, the other eight in that of the second terms, which is `low` bytes behind it.
__device__ inline uint32_t FloatAddress(uint32_t panel, int low, int row, int col) {
  return panel + col % 16 / 8 * low + PieceAddress(0, row, col / 16 * 2 + col % 8 / 4) +
         col % 4 * 4;
}

// Where this lane points for the four 8 x 8 matrices of the tile at `row` (a multiple of 16) and
// columns 16 * col. TileAddress gives them in the order of a Left: upper left, lower left, upper
// right, lower right; TileAddressByRows gives upper left, upper right, lower left, lower right. A
// tile has pieces 2 * col and 2 * col + 1 of each row, so the swizzle changes no bit of `col`, and
// a constant `col` stays a constant in the address.
__device__ inline uint32_t TileAddress(uint32_t panel, int row, int col) {
  const int lane = Lane();
  return panel + row * kRowBytes + (PieceAddress(0, lane % 16, lane / 16) ^ (col << 5));
}

__device__ inline uint32_t TileAddressByRows(uint32_t panel, int row, int col) {
  const int lane = Lane();
  return panel + row * kRowBytes +
         (PieceAddress(0, lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ (col << 5));
}

// A small operand is packed instead: a column of tiles of 512 bytes, each of which is four 8 x 8
// matrices of 128 bytes in the order upper left, upper right, lower left, lower right.
constexpr int kTileBytes = 512;

__device__ inline uint32_t PackedTileAddress(uint32_t tile) {
  const int lane = Lane();
  return tile + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16;
}

__device__ inline uint32_t PackedTileAddressByRows(uint32_t tile) { return tile + Lane() * 16; }

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

// Loads the tile at `row` and columns 16 * col of a panel as a left operand.
__device__ inline void LoadLeft(uint32_t panel, int row, int col, Left& a) {
  LoadMatrices(TileAddress(panel, row, col), a);
}

// Loads the transpose of that tile.
__device__ inline void LoadLeftTransposed(uint32_t panel, int row, int col, Left& a) {
  LoadTransposed(TileAddressByRows(panel, row, col), a);
}

// Operands in shared memory. An operand has 16 values of k, the index that a product sums over, and
// either 8 * kFragments columns as a right operand or, for the four warps of a warpgroup, 64 rows
// as a left operand.
//
// Load gives the registers of a right operand for columns 16 * pair to 16 * pair + 15: of the first
// eight columns the upper and the lower half of k, then of the other eight. LoadLeft gives the
// registers of a left operand for the rows of a warp. Behind gives the operand so many bytes behind this one.

// k runs along the rows of a panel, from column 16 * tile on.
struct KAlongRows {
  uint32_t panel;
  int tile = 0;

  static constexpr bool kDown = false;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadMatrices(TileAddressByRows(panel, 16 * pair, tile), b);
  }
  __device__ void LoadLeft(int warp, Left& a) const { cuda::LoadLeft(panel, 16 * warp, tile, a); }
  __device__ KAlongRows Behind(int bytes) const { return {panel + bytes, tile}; }
  __device__ uint64_t Descriptor() const;
};

// k runs down the rows of a panel, from row 16 * tile on; the operand starts at column 16 * column.
struct KDownRows {
  uint32_t panel;
  int tile = 0, column = 0;

  static constexpr bool kDown = true;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadTransposed(TileAddress(panel, 16 * tile, column + pair), b);
  }
  __device__ void LoadLeft(int warp, Left& a) const {
    LoadLeftTransposed(panel, 16 * tile, column + warp, a);
  }
  __device__ KDownRows Behind(int bytes) const { return {panel + bytes, tile, column}; }
  __device__ uint64_t Descriptor() const;
};

// k runs along the rows of packed tiles.
struct PackedTiles {
  uint32_t tiles;

  static constexpr bool kDown = false;
  __device__ void Load(int pair, uint32_t (&b)[4]) const {
    LoadMatrices(PackedTileAddressByRows(tiles + pair * kTileBytes), b);
  }
  __device__ PackedTiles Behind(int bytes) const { return {tiles + bytes}; }
  __device__ uint64_t Descriptor() const;
};

// Describes a matrix in shared memory to wgmma: the address of its array and its offset there, the
// bytes from one 8 x 8 matrix to the next along k and across it (of packed tiles) or from eight
// rows to the next eight (of a panel), and whether its rows are swizzled.
__device__ inline uint64_t MatrixDescriptor(uint32_t array, int offset, int leading_bytes,
                                            int stride_bytes, bool swizzled) {
  const uint32_t low = (array >> 4) + (offset >> 4) + (leading_bytes >> 4 << 16);
  const uint32_t high = (stride_bytes >> 4) + (swizzled ? 1u << 30 : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ inline uint64_t KAlongRows::Descriptor() const {
  return MatrixDescriptor(panel, 32 * tile, 16, 8 * kRowBytes, true);
}

__device__ inline uint64_t KDownRows::Descriptor() const {
  return MatrixDescriptor(panel, 16 * kRowBytes * tile + 32 * column, 8 * kRowBytes, 8 * kRowBytes,
                          true);
}

__device__ inline uint64_t PackedTiles::Descriptor() const {
  return MatrixDescriptor(tiles, 0, 128, 256, false);
}

// Makes what this thread has stored to shared memory visible to the products after the next
// barrier.
__device__ inline void PublishOperands() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Products are issued between BeginProducts and CommitProducts, which makes them a group.
// WaitForProducts<n> returns when at most n groups still run. Until their group is done, neither
// the operands nor the sums of products may be touched. After that each sum is to be passed to
// Settle, which keeps the compiler from reading it earlier.
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

template <int kFragments>
__device__ void Settle(Accumulator<kFragments>& sum) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
    asm volatile("" : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])::"memory");
#endif
}

// Waits for all products, whose sums these are.
template <typename... Sums>
__device__ void Finish(Sums&... sums) {
  WaitForProducts<0>();
  (Settle(sums), ...);
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
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3), RWKV_JAX_SUM(4),
        RWKV_JAX_SUM(5), RWKV_JAX_SUM(6), RWKV_JAX_SUM(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}), "n"(int{kRightDown}));
}

template <bool kAdd, bool kLeftDown, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<4>& c, uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, %19, %20;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3)
      : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kLeftDown}), "n"(int{kRightDown}));
}

template <bool kAdd, bool kLeftDown, bool kRightDown>
__device__ void WarpgroupMultiply(Accumulator<8>& c, uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, %35, %36;}"
      : RWKV_JAX_SUM(0), RWKV_JAX_SUM(1), RWKV_JAX_SUM(2), RWKV_JAX_SUM(3), RWKV_JAX_SUM(4),
        RWKV_JAX_SUM(5), RWKV_JAX_SUM(6), RWKV_JAX_SUM(7)
      : "l"(a), "l"(b), "n"(int{kAdd}), "n"(int{kLeftDown}), "n"(int{kRightDown}));
}

#undef RWKV_JAX_SUM

#endif  // RWKV_JAX_WARPGROUP_PRODUCTS

// Issues sum = a b, or sum += a b if kAdd, with a in registers.
template <bool kAdd, int kFragments, typename Right>
__device__ void Multiply(Accumulator<kFragments>& sum, const Left& a, const Right& b) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  WarpgroupMultiply<kAdd, Right::kDown>(sum, a, b.Descriptor());
#else
#pragma unroll
  for (int pair = 0; pair < kFragments / 2; ++pair) {
    uint32_t x[4];
    b.Load(pair, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&fragment)[4] = sum[2 * pair + i];
      if constexpr (!kAdd) fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0.0f;
      WarpMultiply(fragment, a, x[2 * i], x[2 * i + 1]);
    }
  }
#endif
}

// The same product with a in shared memory; `warp` is this warp in its warpgroup, and says which
// rows it has.
template <bool kAdd, int kFragments, typename LeftOperand, typename Right>
__device__ void Multiply(Accumulator<kFragments>& sum, int warp, const LeftOperand& a,
                         const Right& b) {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  WarpgroupMultiply<kAdd, LeftOperand::kDown, Right::kDown>(sum, a.Descriptor(), b.Descriptor());
#else
  Left rows;
  a.LoadLeft(warp, rows);
  Multiply<kAdd>(sum, rows, b);
#endif
}

// As Multiply<add>, for an `add` that is a constant once loops are unrolled.
template <typename... Arguments>
__device__ void MultiplyOrAdd(bool add, Arguments&&... arguments) {
  if (add)
    Multiply<true>(arguments...);
  else
    Multiply<false>(arguments...);
}

// The product of operands in terms. Those of b lie `low` bytes apart.
template <bool kAdd, int kTerms, int kFragments, typename Right>
__device__ void Multiply(Accumulator<kFragments>& sum, const Left (&a)[kTerms], const Right& b,
                         int low) {
  ForProducts<kTerms>(
      [&](int i, int j) { MultiplyOrAdd(kAdd || i + j > 0, sum, a[i], b.Behind(j * low)); });
}

}  // namespace rwkv_jax::cuda
