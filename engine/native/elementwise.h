// What stands between a layer's matrices: norms, rotation, the gated activation. Called by every
// thread of a team, which shares the rows.
#pragma once

#include <cmath>

#include "vectors.h"

template <typename T>
float inverse_rms(const T* row, int64_t size, float eps) {
  f32x16 squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 x = load_some(row + i, size - i);
    squares += x * x;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

template <typename T>
void scale_row(const T* row, float factor, const T* weight, T* target, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 x = load_some(row + i, size - i) * factor;
    store_some(target + i, x * load_some(weight + i, size - i), size - i);
  }
}

template <typename T>
void add_norm(T* hidden, const T* update, const T* weight, T* output, int64_t rows, int64_t size,
              float eps) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    T* row = hidden + r * size;
    if (update != nullptr) {
      const T* added = update + r * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store_some(row + i, load_some(row + i, size - i) + load_some(added + i, size - i), size - i);
    }
    scale_row(row, inverse_rms(row, size, eps), weight, output + r * size, size);
  }
}

// x1, x2 -> x1 cos - x2 sin, x2 cos + x1 sin, for the halves of one head.
template <typename T>
void rotate_head(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const f32x16 x1 = load_some(head + i, half - i), x2 = load_some(head + half + i, half - i);
    const f32x16 c = load_some(cos + i, half - i), s = load_some(sin + i, half - i);
    store_some(head + i, x1 * c - x2 * s, half - i);
    store_some(head + half + i, x2 * c + x1 * s, half - i);
  }
}

template <typename T>
void rotate(T* heads, int64_t rows, int64_t row_stride, int64_t num_query_heads,
            int64_t num_key_heads, int64_t head_dim, const float* cos, const float* sin,
            const T* query_norm, const T* key_norm, float eps) {
  const int64_t half = head_dim / 2, num_heads = num_query_heads + num_key_heads;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < num_heads; ++h) {
      T* head = heads + r * row_stride + h * head_dim;
      const T* norm = h < num_query_heads ? query_norm : key_norm;
      if (norm != nullptr) scale_row(head, inverse_rms(head, head_dim, eps), norm, head, head_dim);
      rotate_head(head, cos + r * half, sin + r * half, half);
    }
  }
}

// silu(gate) * up, of rows [gate, up].
template <typename T>
void gate(const T* gate_up, T* output, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gates = gate_up + r * 2 * size;
    const T* ups = gates + size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32x16 x = load_some(gates + i, size - i);
      const f32x16 activated = x / (1.0f + exponential(-x));
      store_some(output + r * size + i, activated * load_some(ups + i, size - i), size - i);
    }
  }
}
