// Attention of a single token: all query heads of a KV head read each key and value once.
#pragma once

#include <algorithm>
#include <vector>

#include "step.h"
#include "vectors.h"

constexpr int kDecodeTile = 128;  // keys between two rescalings of the running softmax
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

// Memory that is wanted soon, asked for a share at a time: all at once would fill the queue of
// loads and hold up those that are wanted now.
struct Part {
  const void* first;
  int64_t num_bytes, num_shares;

  void prefetch(int64_t share) const {
    const char* bytes = static_cast<const char*>(first);
    const int64_t end = num_bytes * (share + 1) / num_shares;
    for (int64_t i = num_bytes * share / num_shares / kCacheLine * kCacheLine; i < end;
         i += kCacheLine)
      __builtin_prefetch(bytes + i, 0, 2);
  }
};

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

// One token and `num_heads` KV heads from `first_head` on. Heads of a block lie side by side: to
// take them together is to read longer stretches of memory.
template <typename T, int kHeadDim>
void decode(const Step& step, const Layer& layer, const Chunk& chunk, int64_t first_head,
            int64_t num_heads) {
  const CacheShape& shape = step.shape;
  const int64_t size = shape.head_dim, groups = step.num_groups, rows = num_heads * groups;
  const int64_t head_size = shape.block_size * size, group_size = groups * size;
  const int64_t piece_bytes = num_heads * head_size * sizeof(T);
  const T* cache = static_cast<const T*>(step.cache);
  const int64_t* table = step.block_tables + chunk.first_block;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));

  thread_local std::vector<float> scratch;
  scratch.assign(rows * (size + kDecodeTile + 2), 0.0f);
  float* outputs = scratch.data();
  float* scores = outputs + rows * size;
  Softmax softmax{scores + rows * kDecodeTile, scores + rows * kDecodeTile + rows};
  std::fill(softmax.largest, softmax.largest + rows, kNegativeInfinity);

  const T* query = static_cast<const T*>(layer.query) + chunk.first_row * layer.query_stride +
                   first_head * group_size;
  const int64_t end = chunk.start + 1;
  for (int64_t t = std::max<int64_t>(0, end - layer.window); t < end;) {
    const int64_t count = std::min(end - t, int64_t{kDecodeTile});
    for_each_piece(step, chunk, t, count, [&](int64_t block, int64_t offset, int64_t first,
                                              int64_t num_keys) {
      const T* keys = cache + shape.row(block, layer.index, first_head);
      const Part values{keys + shape.plane(), piece_bytes, rows};
      for (int64_t row = 0; row < rows; ++row) {
        values.prefetch(row);
        score<T, kHeadDim>(query + row * size, keys + row / groups * head_size + offset * size,
                           num_keys, size, scores + row * kDecodeTile + first);
      }
    });
    for (int64_t row = 0; row < rows; ++row) {
      const float kept = softmax.add(row, scores + row * kDecodeTile, count, scale);
      for (int64_t d = 0; d < size; d += kLanes)
        store(outputs + row * size + d, load(outputs + row * size + d) * kept);
    }
    for_each_piece(step, chunk, t, count, [&](int64_t block, int64_t offset, int64_t first,
                                              int64_t num_keys) {
      const T* values = cache + shape.row(block, layer.index, first_head) + shape.plane();
      const int64_t ahead = std::min(t + first + kDecodeTile, end - 1) / shape.block_size;
      const Part next{cache + shape.row(table[ahead], layer.index, first_head), piece_bytes,
                      num_heads};
      for (int64_t head = 0; head < num_heads; ++head) {
        next.prefetch(head);
        add_values(groups, scores + head * groups * kDecodeTile + first,
                   values + head * head_size + offset * size, num_keys, size,
                   outputs + head * group_size);
      }
    });
    t += count;
  }

  T* target = static_cast<T*>(layer.output) +
              (chunk.first_row * shape.num_kv_heads + first_head) * group_size;
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = 1.0f / softmax.total[row];
    for (int64_t d = 0; d < size; d += kLanes)
      store(target + row * size + d, load(outputs + row * size + d) * factor);
  }
}
