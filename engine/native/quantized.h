// What products with matrices in codes share (quantized.cpp, integers.cpp).
#pragma once

#include <algorithm>

#include "vectors.h"

struct QuantizedProduct {
  const void* rows;  // [num_rows, inputs]
  const uint8_t* codes;
  const float* scales;  // [outputs / 64, groups, 64]
  const int8_t* zeros;  // the same; null: all 0. With int4, of codes from 0 to 15
  const void* bias;     // [outputs], or null
  void* output;         // [num_rows, outputs]
  int64_t num_rows, inputs, outputs, group_size;
};

// Writes the totals [count, 64] of a panel, with the bias.
template <typename T>
void write_panel(const QuantizedProduct& p, const float* totals, int64_t panel, int64_t first,
                 int64_t count) {
  constexpr int64_t kWidth = 64;
  const int64_t begin = panel * kWidth, size = std::min(kWidth, p.outputs - begin);
  const T* bias = static_cast<const T*>(p.bias);
  for (int64_t r = 0; r < count; ++r) {
    T* target = static_cast<T*>(p.output) + (first + r) * p.outputs + begin;
    for (int64_t n = 0; n < size; n += kLanes) {
      f32x16 values = load(totals + r * kWidth + n);
      if (bias != nullptr) values += load_some(bias + begin + n, size - n);
      store_some(target + n, values, size - n);
    }
  }
}
