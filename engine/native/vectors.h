// Vectors of 16 floats, and the two element types of the cache, float and bfloat16.
//
// GCC's vector extension compiles to whatever the CPU has; intrinsics appear only where
// AVX512-BF16 multiplies bfloat16 pairs directly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

struct bfloat16 {
  uint16_t bits;
};

constexpr int kLanes = 16;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <typename Vector>
inline Vector load_as(const void* source) {
  Vector vector;
  std::memcpy(&vector, source, sizeof(Vector));
  return vector;
}

template <typename Vector>
inline void store_as(void* target, Vector vector) {
  std::memcpy(target, &vector, sizeof(Vector));
}

inline f32x16 splat(float value) { return f32x16{} + value; }

inline f32x16 load(const float* source) { return load_as<f32x16>(source); }

inline f32x16 load(const bfloat16* source) {
  u32x16 wide = __builtin_convertvector(load_as<u16x16>(source), u32x16);
  return (f32x16)(wide << 16);
}

inline void store(float* target, f32x16 values) { store_as(target, values); }

// Rounds to nearest even; a NaN stays one.
inline void store(bfloat16* target, f32x16 values) {
#ifdef __AVX512BF16__
  store_as(target, _mm512_cvtneps_pbh((__m512)values));
#else
  u32x16 bits = (u32x16)values;
  u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  u32x16 is_nan = (u32x16)(values != values);
  store_as(target, __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), u16x16));
#endif
}

// The first `count` elements, at most 16; zeros behind them.
template <typename T>
inline f32x16 load_some(const T* source, int64_t count) {
  if (count >= kLanes) return load(source);
  T padded[kLanes] = {};
  std::memcpy(padded, source, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_some(T* target, f32x16 values, int64_t count) {
  if (count >= kLanes) return store(target, values);
  T padded[kLanes];
  store(padded, values);
  std::memcpy(target, padded, count * sizeof(T));
}

inline f32x16 select(i32x16 condition, f32x16 yes, f32x16 no) {
  return (f32x16)(((i32x16)yes & condition) | ((i32x16)no & ~condition));
}

// NaN in `b` stays; NaN in `a` gives `b`.
inline f32x16 maximum(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// The upper half of the lanes below the lower one, and so on down to neighbours.
#define BATON_FOLD(v, combine)                                                                   \
  v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5,   \
                                         6, 7));                                                 \
  v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, \
                                         11));                                                   \
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, \
                                         13));                                                   \
  v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, \
                                         14))

inline f32x16 add(f32x16 a, f32x16 b) { return a + b; }

// Sum of the lanes.
inline float sum(f32x16 v) {
  BATON_FOLD(v, add);
  return v[0];
}

inline float largest(f32x16 v) {
  BATON_FOLD(v, maximum);
  return v[0];
}

// e^x to about 2 units in the last place: e^x = 2^n e^r with |r| <= ln(2) / 2, and the Taylor
// series of e^r. 0 below -87 (and for -infinity), NaN for NaN.
inline f32x16 exponential(f32x16 x) {
  f32x16 clamped = select(x > 88.0f, splat(88.0f), x);
  f32x16 shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 n = (clamped * 1.44269504f + shifter) - shifter;
  f32x16 r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  f32x16 p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return select(x < -87.0f, f32x16{}, p * (f32x16)exponent);
}

// Sums of 16 vectors, as one vector: a tree of adds between transposed halves.
inline f32x16 sums_of(f32x16 v[16]) {
  for (int i = 0; i < 8; ++i) {
    f32x16 a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
         + __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    f32x16 a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
         + __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    f32x16 a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
         + __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  f32x16 a = v[0], b = v[1];
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
       + __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
