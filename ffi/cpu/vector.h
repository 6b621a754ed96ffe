// Vectors of float as wide as the registers of the instruction set that a file is compiled for.
//
// Everything here has internal linkage. The kernels are compiled once per instruction set, and of a
// function that those builds share the linker would keep one copy, maybe for a CPU that is not this
// one.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <utility>

#include "rwkv_jax/types.h"

namespace rwkv_jax::cpu {
namespace {

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(4 * kLanes)));
using Bits = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using UnalignedVec = float __attribute__((vector_size(4 * kLanes), aligned(4)));
using UnalignedHalves = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

inline Vec Load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void Store(float* to, Vec x) { *reinterpret_cast<UnalignedVec*>(to) = x; }
inline Vec Broadcast(float x) { return x - Vec{}; }

// a b + c, of which the product is not rounded where the instruction set has that. For `a * b + c` a compiler
// decides whether it is each time that it compiles it, so that two copies of a function may differ.
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The conversions use integers for subnormal numbers, which XLA has the CPU flush to zero. The instructions of
// LoadF16 and StoreF16 do not flush.

inline Vec FromBF16(Bits x) { return reinterpret_cast<Vec>(x << 16); }

inline Bits ToBF16(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

#if !defined(__AVX2__)
inline Vec FromF16(Bits x) {
  const Bits magnitude = (x & 0x7fff) << 13, exponent = x & 0x7c00;
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<Ints>(x & 0x3ff), Vec) * 0x1p-24f;
  const Bits finite = exponent == 0 ? reinterpret_cast<Bits>(subnormal) : magnitude + (112u << 23);
  return reinterpret_cast<Vec>((exponent == 0x7c00 ? magnitude + (224u << 23) : finite) |
                               (x & 0x8000) << 16);
}

inline Bits ToF16(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x), magnitude = bits & 0x7fffffff;
  const Bits normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // The unit of 0.5 is that of the subnormals of float16, so this addition rounds to it.
  const Bits subnormal = reinterpret_cast<Bits>(reinterpret_cast<Vec>(magnitude) + 0.5f) & 0xffff;
  const Bits finite = magnitude < 0x38800000 ? subnormal : normal;
  const Bits infinity = Bits{} + 0x7c00, nan = Bits{} + 0x7e00;
  const Bits special = magnitude > 0x7f800000 ? nan : infinity;
  return (magnitude < 0x47800000 ? finite : special) | (bits >> 16 & 0x8000);
}
#endif

// By vectors of the compiler, GCC takes several instructions for a conversion, and with other intrinsics than
// those with a mask it warns of a variable of its own.
inline Bits LoadHalves(const void* from, int64_t index) {
  const auto* halves = static_cast<const uint16_t*>(from) + index;
#if defined(__AVX512F__)
  const auto loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
  return reinterpret_cast<Bits>(_mm512_maskz_cvtepu16_epi32(0xffff, loaded));
#elif defined(__AVX2__)
  const auto loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
  return reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(loaded));
#else
  return __builtin_convertvector(Halves(*reinterpret_cast<const UnalignedHalves*>(halves)), Bits);
#endif
}

inline Ints LoadBytes(const int8_t* from) {
#if defined(__AVX512F__)
  const auto loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepi8_epi32(0xffff, loaded));
#elif defined(__AVX2__)
  const auto loaded = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(loaded));
#else
  return Ints{from[0], from[1], from[2], from[3]};
#endif
}

inline void StoreHalves(void* to, int64_t index, Bits x) {
  auto* halves = static_cast<uint16_t*>(to) + index;
  *reinterpret_cast<UnalignedHalves*>(halves) = __builtin_convertvector(x, Halves);
}

inline Vec LoadF16(const void* from, int64_t index) {
  const auto* halves = static_cast<const uint16_t*>(from) + index;
#if defined(__AVX512F__)
  const auto loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
  return _mm512_maskz_cvtph_ps(0xffff, loaded);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#else
  return FromF16(LoadHalves(halves, 0));
#endif
}

inline void StoreF16(void* to, int64_t index, Vec x) {
  auto* halves = static_cast<uint16_t*>(to) + index;
#if defined(__AVX2__)
  // All instruction sets give the same NaN, of which the instructions would keep more bits.
  const Bits nan = (reinterpret_cast<Bits>(x) & 0x80000000) | 0x7fc00000;
  x = x == x ? x : reinterpret_cast<Vec>(nan);
#endif
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves),
                      _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  StoreHalves(halves, 0, ToF16(x));
#endif
}

// Asks for element `index` of an array of `dtype` ahead of its use. (Not inlined, it would have no
// effect that GCC knows of, and GCC would drop it.)
[[gnu::always_inline]] inline void Prefetch(Dtype dtype, const void* array, int64_t index) {
  __builtin_prefetch(static_cast<const char*>(array) + index * (dtype == Dtype::kF32 ? 4 : 2));
}

inline int64_t Bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// A vector from an array of `dtype`, and to one, rounding to nearest even.
inline Vec LoadAs(Dtype dtype, const void* from, int64_t index) {
  if (dtype == Dtype::kF32) return Load(static_cast<const float*>(from) + index);
  return dtype == Dtype::kBF16 ? FromBF16(LoadHalves(from, index)) : LoadF16(from, index);
}

inline void StoreAs(Dtype dtype, void* to, int64_t index, Vec x) {
  if (dtype == Dtype::kF32)
    Store(static_cast<float*>(to) + index, x);
  else if (dtype == Dtype::kBF16)
    StoreHalves(to, index, ToBF16(x));
  else
    StoreF16(to, index, x);
}

// The same for `count` elements, a multiple of kLanes.
[[gnu::noinline]] inline void LoadRow(Dtype dtype, const void* from, int64_t index, int64_t count,
                                      float* to) {
  for (int64_t i = 0; i < count; i += kLanes) Store(to + i, LoadAs(dtype, from, index + i));
}

[[gnu::noinline]] inline void StoreRow(Dtype dtype, void* to, int64_t index, int64_t count,
                                       const float* from) {
  for (int64_t i = 0; i < count; i += kLanes) StoreAs(dtype, to, index + i, Load(from + i));
}

// `x` within [low, high], by comparisons, so that a NaN stays one.
inline Vec Clamp(Vec x, float low, float high) {
  x = x > high ? Broadcast(high) : x;
  return x < low ? Broadcast(low) : x;
}

// exp(x), within 2 units in the last place, for x in [kMinExp, kMaxExp] or NaN. The ends give 0 and
// infinity.
constexpr float kMinExp = -87.3f, kMaxExp = 89.0f;

inline Vec Exp(Vec x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const Vec shifted = x * 0x1.715476p+0f + 0x1.8p23f;
  const Ints n = reinterpret_cast<Ints>(shifted) - 0x4b400000;
  const Vec whole = shifted - 0x1.8p23f;
  // ln 2 in two parts, the first of so few bits that its product with n is exact.
  const Vec z = (x - whole * 0x1.63p-1f) + whole * 0x1.bd0106p-13f, z2 = z * z;
  const Vec high = (z * (1.0f / 5040) + 1.0f / 720) * z2 + (z * (1.0f / 120) + 1.0f / 24);
  const Vec power = (high * z2 + (z * (1.0f / 6) + 0.5f)) * z2 + z + 1.0f;
  // Twice 2^(n-1), since 2^128 is infinite where the result may not be.
  return (power + power) * reinterpret_cast<Vec>(reinterpret_cast<Bits>(n + 126) << 23);
}

template <int... I>
inline Vec Shuffle(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Ints{I...});
#endif
}

template <int S, int... J>
inline Vec Swap(Vec x, std::integer_sequence<int, J...>) {
  return Shuffle<(J ^ S)...>(x, x);
}

template <int S, int... J>
inline Vec Pick(Vec a, Vec b, std::integer_sequence<int, J...>) {
  return Shuffle<((J & S) ? kLanes + J : J)...>(a, b);
}

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lane i of the result is lane i ^ S of x.
template <int S>
inline Vec Swap(Vec x) {
  return Swap<S>(x, Lanes());
}

// The lanes of `a`, but of `b` where the index of the lane has bit S.
template <int S>
inline Vec Pick(Vec a, Vec b) {
  return Pick<S>(a, b, Lanes());
}

template <int S = kLanes / 2>
inline void Transpose(Vec (&x)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Vec low = Pick<S>(x[i], Swap<S>(x[i + S]));
    x[i + S] = Pick<S>(Swap<S>(x[i]), x[i + S]);
    x[i] = low;
  }
  if constexpr (S > 1) Transpose<S / 2>(x);
}

template <int S = kLanes / 2>
inline float Sum(Vec x) {
  x += Swap<S>(x);
  if constexpr (S > 1) return Sum<S / 2>(x);
  return x[0];
}

// Lane i of the result is the sum of the lanes of x[i]; x is overwritten.
template <int S = kLanes / 2>
inline Vec SumEach(Vec (&x)[kLanes]) {
  for (int i = 0; i < S; ++i) x[i] = Pick<S>(x[i], x[i + S]) + Swap<S>(Pick<S>(x[i + S], x[i]));
  if constexpr (S > 1) return SumEach<S / 2>(x);
  return x[0];
}

}  // namespace
}  // namespace rwkv_jax::cpu
