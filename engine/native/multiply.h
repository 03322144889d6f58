// The product of tiles on which prefill attention rests, and the words in which operands lie.
#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int kStripe = 4;  // rows of A that one pass of `multiply` takes

// How operands are stored: AVX512-BF16 multiplies pairs along the inner dimension, anything
// else single floats.
#ifdef __AVX512BF16__
template <typename T>
constexpr bool kInPairs = sizeof(T) == sizeof(bfloat16);
#else
template <typename T>
constexpr bool kInPairs = false;
#endif

// Four bytes: one float, or a pair of bfloat16.
using Word = uint32_t;

template <typename T>
constexpr int kPerWord = kInPairs<T> ? 2 : 1;

template <bool kPairs>
inline f32x16 multiply_words(const Word* a, f32x16 b, f32x16 total) {
#ifdef __AVX512BF16__
  if constexpr (kPairs) {
    return (f32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32((int)*a),
                                    (__m512bh)b);
  }
#endif
  return total + b * load_as<float>(a);
}

struct Operand {
  const Word* words;
  int64_t row_stride, inner_stride;
};

// C[kRows, kVectors * 16] += A[kRows, inner] * B[inner, kVectors * 16], `inner` in words.
template <bool kPairs, int kRows, int kVectors>
inline void multiply_stripe(Operand a, const Word* b, int64_t b_stride, int64_t inner, float* c,
                            int64_t c_stride) {
  f32x16 totals[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) totals[r][v] = load(c + r * c_stride + v * kLanes);
  for (int64_t k = 0; k < inner; ++k) {
    f32x16 column[kVectors];
    for (int v = 0; v < kVectors; ++v) column[v] = load_as<f32x16>(b + k * b_stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Word* left = a.words + r * a.row_stride + k * a.inner_stride;
      for (int v = 0; v < kVectors; ++v)
        totals[r][v] = multiply_words<kPairs>(left, column[v], totals[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kLanes, totals[r][v]);
}

template <bool kPairs, int kRows>
inline void multiply_columns(Operand a, const Word* b, int64_t b_stride, int64_t inner, float* c,
                             int64_t c_stride, int64_t columns) {
  int64_t n = 0;
  for (; n + 4 * kLanes <= columns; n += 4 * kLanes)
    multiply_stripe<kPairs, kRows, 4>(a, b + n, b_stride, inner, c + n, c_stride);
  for (; n + 2 * kLanes <= columns; n += 2 * kLanes)
    multiply_stripe<kPairs, kRows, 2>(a, b + n, b_stride, inner, c + n, c_stride);
  for (; n < columns; n += kLanes)
    multiply_stripe<kPairs, kRows, 1>(a, b + n, b_stride, inner, c + n, c_stride);
}

// C[rows, columns] += A * B. `columns` is a multiple of 16.
template <bool kPairs>
void multiply(Operand a, int64_t rows, const Word* b, int64_t b_stride, int64_t inner, float* c,
              int64_t c_stride, int64_t columns) {
  for (int64_t r = 0; r < rows; r += kStripe) {
    const Operand from{a.words + r * a.row_stride, a.row_stride, a.inner_stride};
    float* to = c + r * c_stride;
    switch (std::min<int64_t>(kStripe, rows - r)) {
      case 1: multiply_columns<kPairs, 1>(from, b, b_stride, inner, to, c_stride, columns); break;
      case 2: multiply_columns<kPairs, 2>(from, b, b_stride, inner, to, c_stride, columns); break;
      case 3: multiply_columns<kPairs, 3>(from, b, b_stride, inner, to, c_stride, columns); break;
      default: multiply_columns<kPairs, 4>(from, b, b_stride, inner, to, c_stride, columns);
    }
  }
}
