// Attention of a single token: all query heads of one KV head read each key and value once.
#pragma once

#include <algorithm>
#include <vector>

#include "step.h"
#include "vectors.h"

constexpr int kDecodeTile = 128;  // keys between two rescalings of the running softmax
constexpr int kAhead = 2;         // blocks between the keys in use and those asked for
constexpr int kCacheLine = 64;

template <typename T>
inline f32x16 multiply_add(const T* a, const T* b, f32x16 total) {
  return load(a) * load(b) + total;
}

#ifdef __AVX512BF16__
// Takes 32 products at once, summed in pairs.
inline f32x16 multiply_add_pairs(const bfloat16* a, const bfloat16* b, f32x16 total) {
  return (f32x16)_mm512_dpbf16_ps((__m512)total, load_as<__m512bh>(a), load_as<__m512bh>(b));
}
#endif

template <typename T>
inline f32x16 products(const T* a, const T* b, int64_t size) {
  f32x16 total{};
  int64_t i = 0;
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(bfloat16)) {
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) total = multiply_add_pairs(a + i, b + i, total);
  }
#endif
  for (; i < size; i += kLanes) total = multiply_add(a + i, b + i, total);
  return total;
}

// Scores of one query against `count` keys that lie one after the other.
template <typename T, int kHeadDim>
void score(const T* query, const T* keys, int64_t count, int64_t head_dim, float* scores) {
  const int64_t size = kHeadDim ? kHeadDim : head_dim;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    f32x16 totals[kLanes];
    for (int j = 0; j < kLanes; ++j) totals[j] = products(query, keys + (i + j) * size, size);
    store(scores + i, sums_of(totals));
  }
  for (; i < count; ++i) scores[i] = sum(products(query, keys + i * size, size));
}

// Adds `count` weighted values to kGroups outputs, kVectors * 16 dimensions of them.
template <typename T, int kGroups, int kVectors>
void add_values(const float* weights, const T* values, int64_t count, int64_t head_dim,
                float* outputs) {
  f32x16 totals[kGroups][kVectors];
  for (int g = 0; g < kGroups; ++g)
    for (int v = 0; v < kVectors; ++v) totals[g][v] = load(outputs + g * head_dim + v * kLanes);
  for (int64_t t = 0; t < count; ++t) {
    f32x16 value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = load(values + t * head_dim + v * kLanes);
    for (int g = 0; g < kGroups; ++g)
      for (int v = 0; v < kVectors; ++v) totals[g][v] += value[v] * weights[g * kDecodeTile + t];
  }
  for (int g = 0; g < kGroups; ++g)
    for (int v = 0; v < kVectors; ++v) store(outputs + g * head_dim + v * kLanes, totals[g][v]);
}

template <typename T, int kGroups>
void add_values(const float* weights, const T* values, int64_t count, int64_t head_dim,
                float* outputs) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    add_values<T, kGroups, 4>(weights, values + d, count, head_dim, outputs + d);
  for (; d < head_dim; d += kLanes)
    add_values<T, kGroups, 1>(weights, values + d, count, head_dim, outputs + d);
}

template <typename T>
void add_values(int64_t num_groups, const float* weights, const T* values, int64_t count,
                int64_t head_dim, float* outputs) {
  for (int64_t g = 0; g < num_groups;) {
    const float* w = weights + g * kDecodeTile;
    float* out = outputs + g * head_dim;
    const int64_t left = num_groups - g;
    if (left >= 4) {
      add_values<T, 4>(w, values, count, head_dim, out);
      g += 4;
    } else if (left == 3) {
      add_values<T, 3>(w, values, count, head_dim, out);
      g += 3;
    } else if (left == 2) {
      add_values<T, 2>(w, values, count, head_dim, out);
      g += 2;
    } else {
      add_values<T, 1>(w, values, count, head_dim, out);
      g += 1;
    }
  }
}

inline void prefetch(const void* first, int64_t num_bytes) {
  const char* line = static_cast<const char*>(first);
  for (int64_t i = 0; i < num_bytes; i += kCacheLine) __builtin_prefetch(line + i);
}

// The running softmax of `num_groups` queries (Milakov and Gimelshein, arXiv 1805.02867).
struct Softmax {
  float* largest;  // of the scores so far
  float* total;    // of the weights, relative to `largest`

  // Turns products, whose scores are `scale` times that, into weights; returns what earlier weights must be multiplied with.
  float add(int64_t group, float* scores, int64_t count, float scale) {
    for (int64_t i = count; i % kLanes; ++i) scores[i] = kNegativeInfinity;
    f32x16 top = splat(kNegativeInfinity);
    for (int64_t i = 0; i < count; i += kLanes) top = maximum(top, load(scores + i));
    const float now = std::max(largest[group], scale * ::largest(top));
    f32x16 sums{};
    for (int64_t i = 0; i < count; i += kLanes) {
      f32x16 weights = exponential(load(scores + i) * scale - now);
      store(scores + i, weights);
      sums += weights;
    }
    const float kept = std::exp(largest[group] - now);
    total[group] = total[group] * kept + sum(sums);
    largest[group] = now;
    return kept;
  }
};

// Calls `use(block, offset in it, index of the first key, keys)` for each block's part of keys
// [begin, begin + count).
template <typename Use>
void for_each_piece(const Step& step, const Chunk& chunk, int64_t begin, int64_t count, Use use) {
  const int64_t* table = step.block_tables + chunk.first_block;
  const int64_t block_size = step.shape.block_size;
  for (int64_t i = 0; i < count;) {
    const int64_t offset = (begin + i) % block_size;
    const int64_t num_keys = std::min(block_size - offset, count - i);
    use(table[(begin + i) / block_size], offset, i, num_keys);
    i += num_keys;
  }
}

template <typename T, int kHeadDim>
void decode(const Step& step, const Layer& layer, const Chunk& chunk, int64_t head) {
  const CacheShape& shape = step.shape;
  const int64_t size = shape.head_dim, groups = step.num_groups;
  const int64_t first_head = head * groups;
  const T* cache = static_cast<const T*>(step.cache);
  const int64_t* table = step.block_tables + chunk.first_block;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));

  thread_local std::vector<float> scratch;
  scratch.assign(groups * (size + kDecodeTile + 2), 0.0f);
  float* outputs = scratch.data();
  float* scores = outputs + groups * size;
  Softmax softmax{scores + groups * kDecodeTile, scores + groups * kDecodeTile + groups};
  std::fill(softmax.largest, softmax.largest + groups, kNegativeInfinity);

  const T* query =
      static_cast<const T*>(layer.query) + chunk.first_row * layer.query_stride + first_head * size;
  const int64_t end = chunk.start + 1;
  for (int64_t t = std::max<int64_t>(0, end - layer.window); t < end;) {
    const int64_t count = std::min(end - t, int64_t{kDecodeTile});
    for_each_piece(step, chunk, t, count, [&](int64_t block, int64_t offset, int64_t first,
                                              int64_t num_keys) {
      const T* keys = cache + shape.row(block, layer.index, head);
      prefetch(keys + shape.plane() + offset * size, num_keys * size * sizeof(T));
      const int64_t ahead = t + first + kAhead * shape.block_size;
      if (ahead < end)
        prefetch(cache + shape.row(table[ahead / shape.block_size], layer.index, head),
                 shape.block_size * size * sizeof(T));
      for (int64_t g = 0; g < groups; ++g)
        score<T, kHeadDim>(query + g * size, keys + offset * size, num_keys, size,
                           scores + g * kDecodeTile + first);
    });
    for (int64_t g = 0; g < groups; ++g) {
      const float kept = softmax.add(g, scores + g * kDecodeTile, count, scale);
      for (int64_t d = 0; d < size; d += kLanes)
        store(outputs + g * size + d, load(outputs + g * size + d) * kept);
    }
    t += count;
    for_each_piece(step, chunk, t - count, count, [&](int64_t block, int64_t offset, int64_t first,
                                                      int64_t num_keys) {
      const T* values = cache + shape.row(block, layer.index, head) + shape.plane();
      add_values(groups, scores + first, values + offset * size, num_keys, size, outputs);
    });
  }

  T* target = static_cast<T*>(layer.output) +
              (chunk.first_row * shape.num_kv_heads * groups + first_head) * size;
  for (int64_t g = 0; g < groups; ++g) {
    const float factor = 1.0f / softmax.total[g];
    for (int64_t d = 0; d < size; d += kLanes)
      store(target + g * size + d, load(outputs + g * size + d) * factor);
  }
}
