// The largest number of each row of logits, and where it first stands.
#include <algorithm>

#include "vectors.h"

namespace {

// Numbers of a row that are compared before the place of a new largest one is looked for.
constexpr int64_t kStretch = 1024;

// NaN if there is one. Four running ones, so that none is waited for.
template <typename T>
float largest_of(const T* numbers, int64_t size) {
  constexpr int64_t kRunning = 4;
  f32x16 top[kRunning];
  std::fill(top, top + kRunning, splat(kNegativeInfinity));
  i32x16 is_nan{};
  int64_t i = 0;
  for (; i + kRunning * kLanes <= size; i += kRunning * kLanes)
    for (int64_t j = 0; j < kRunning; ++j) {
      const f32x16 x = load(numbers + i + j * kLanes);
      is_nan |= x != x;
      top[j] = maximum(top[j], x);
    }
  for (; i < size; ++i) {
    const f32x16 x = splat(load_some(numbers + i, 1)[0]);
    is_nan |= x != x;
    top[0] = maximum(top[0], x);
  }
  for (int j = 0; j < kLanes; ++j)
    if (is_nan[j]) return std::numeric_limits<float>::quiet_NaN();
  return largest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
}

template <typename T>
void largest_of_row(const T* row, int64_t size, float* value, int64_t* index) {
  float top = kNegativeInfinity;
  int64_t stretch = 0;
  for (int64_t begin = 0; begin < size; begin += kStretch) {
    const float here = largest_of(row + begin, std::min(kStretch, size - begin));
    if (here <= top) continue;
    top = here;
    stretch = begin;
    if (here != here) break;
  }
  *value = top;
  *index = stretch;
  while (*index < size - 1 && load_some(row + *index, 1)[0] != top) ++*index;
}

template <typename T>
void run(const T* rows, int64_t num_rows, int64_t size, float* values, int64_t* indices,
         int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t r = 0; r < num_rows; ++r)
    largest_of_row(rows + r * size, size, values + r, indices + r);
}

}  // namespace

#define BATON_LARGEST(T, suffix)                                                               \
  void baton_largest_##suffix(const T* rows, int64_t num_rows, int64_t size, float* values,    \
                              int64_t* indices, int64_t num_threads) {                         \
    run(rows, num_rows, size, values, indices, num_threads);                                   \
  }

extern "C" {
BATON_LARGEST(float, float32)
BATON_LARGEST(bfloat16, bfloat16)
}
