// The product of a step's rows with a packed matrix. Called by every thread of a team.
//
// A matrix lies in panels of 32 outputs, [outputs / 32, inputs / per word, 32] words, and is read
// from front to back: only an unbroken stream is fetched as fast as memory goes. Rows are cut
// into stripes of up to 8, whose totals fill the registers, so that each word of a panel meets
// up to 8 rows when it arrives; a stripe lies as [inputs / per word, rows]. (Rows a power of two
// of bytes apart would drive each other out of the first cache.)
#pragma once

#include <algorithm>

#include "multiply.h"
#include "vectors.h"

constexpr int64_t kPanel = 32;
constexpr int64_t kMaxStripeRows = 8;
constexpr int64_t kTileStripes = 8;  // stripes that a panel meets in one go
constexpr int64_t kInnerTile = 128;  // words: a part of a panel that stays in the first cache

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t num_panels(int64_t outputs) { return ceil_div(outputs, kPanel); }

// Rows cut into the fewest stripes, none much lower than the others. There may be no rows.
struct Stripes {
  int64_t num_rows, size;

  explicit Stripes(int64_t num_rows)
      : num_rows(num_rows),
        size(num_rows ? ceil_div(num_rows, ceil_div(num_rows, kMaxStripeRows)) : 1) {}

  int64_t count() const { return ceil_div(num_rows, size); }
  int64_t first(int64_t stripe) const { return stripe * size; }
  int64_t rows(int64_t stripe) const { return std::min(size, num_rows - first(stripe)); }
};

struct Matrix {
  const Word* panels;
  const void* bias;  // [outputs], or null
  int64_t inputs, outputs;
};

// Puts rows [num_rows, inner] words in stripes.
inline void stripe_rows(const Word* rows, Word* striped, const Stripes& stripes, int64_t inner) {
  const int64_t parts = ceil_div(inner, kInnerTile);
#pragma omp for schedule(static) collapse(2)
  for (int64_t stripe = 0; stripe < stripes.count(); ++stripe)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = stripes.first(stripe), count = stripes.rows(stripe);
      const int64_t begin = part * kInnerTile, end = std::min(inner, begin + kInnerTile);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t k = begin; k < end; ++k)
          striped[first * inner + k * count + r] = rows[(first + r) * inner + k];
    }
}

// totals[kRows, 32] += a[inner, kRows]^T * panel[inner, 32].
template <bool kPairs, int kRows>
inline void multiply_stripe(const Word* a, const Word* panel, int64_t inner, float* totals) {
  constexpr int kVectors = kPanel / kLanes;
  f32x16 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(totals + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < inner; ++k) {
    f32x16 columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = load_as<f32x16>(panel + k * kPanel + v * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = multiply_words<kPairs>(a + k * kRows + r, columns[v], sums[r][v]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(totals + r * kPanel + v * kLanes, sums[r][v]);
}

template <bool kPairs>
inline void multiply_stripe(int64_t rows, const Word* a, const Word* panel, int64_t inner,
                            float* totals) {
  switch (rows) {
    case 1: return multiply_stripe<kPairs, 1>(a, panel, inner, totals);
    case 2: return multiply_stripe<kPairs, 2>(a, panel, inner, totals);
    case 3: return multiply_stripe<kPairs, 3>(a, panel, inner, totals);
    case 4: return multiply_stripe<kPairs, 4>(a, panel, inner, totals);
    case 5: return multiply_stripe<kPairs, 5>(a, panel, inner, totals);
    case 6: return multiply_stripe<kPairs, 6>(a, panel, inner, totals);
    case 7: return multiply_stripe<kPairs, 7>(a, panel, inner, totals);
    default: return multiply_stripe<kPairs, 8>(a, panel, inner, totals);
  }
}

// One panel times the stripes [begin, end).
template <typename T>
void multiply_panel(const Matrix& matrix, const Word* striped, const Stripes& stripes,
                    int64_t number, int64_t begin, int64_t end, T* output) {
  alignas(64) float totals[kTileStripes * kMaxStripeRows * kPanel];
  const int64_t inner = matrix.inputs / kPerWord<T>, first_row = stripes.first(begin);
  const int64_t num_rows = stripes.first(end - 1) + stripes.rows(end - 1) - first_row;
  std::fill(totals, totals + num_rows * kPanel, 0.0f);
  const Word* panel = matrix.panels + number * inner * kPanel;
  const int64_t step = end - begin == 1 ? inner : kInnerTile;
  for (int64_t k = 0; k < inner; k += step)
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = stripes.first(s), rows = stripes.rows(s);
      multiply_stripe<kInPairs<T>>(rows, striped + first * inner + k * rows, panel + k * kPanel,
                                   std::min(step, inner - k),
                                   totals + (first - first_row) * kPanel);
    }
  const int64_t column = number * kPanel, size = std::min(kPanel, matrix.outputs - column);
  const T* bias = static_cast<const T*>(matrix.bias);
  for (int64_t r = 0; r < num_rows; ++r) {
    T* target = output + (first_row + r) * matrix.outputs + column;
    for (int64_t n = 0; n < size; n += kLanes) {
      f32x16 values = load(totals + r * kPanel + n);
      if (bias != nullptr) values += load_some(bias + column + n, size - n);
      store_some(target + n, values, size - n);
    }
  }
}

// output[num_rows, outputs] of rows in stripes. Each thread takes panels that follow each other.
template <typename T>
void multiply_matrix(const Matrix& matrix, const Word* striped, const Stripes& stripes,
                     T* output) {
  const int64_t panels = num_panels(matrix.outputs);
  const int64_t tiles = ceil_div(stripes.count(), kTileStripes);
#pragma omp for schedule(static) collapse(2)
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = tile * kTileStripes;
      const int64_t end = std::min(stripes.count(), begin + kTileStripes);
      multiply_panel<T>(matrix, striped, stripes, panel, begin, end, output);
    }
}
