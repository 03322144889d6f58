// Attention of several tokens of one sequence, in tiles that stay in the cache.
//
// FlashAttention (Dao et al., arXiv 2205.14135), transposed: a tile's scores are
// [keys, query rows], so that keys are used as they lie and the softmax runs over rows of
// vectors. A query row is one (token, query head); the heads of a KV head lie side by side.
#pragma once

#include <algorithm>
#include <cmath>

#include "multiply.h"
#include "step.h"
#include "vectors.h"

constexpr int kQueryRows = 64;
constexpr int kKeys = 64;
constexpr int kMaxHeadDim = 256;
// What one thread needs; sized for the largest head.
struct alignas(64) PrefillScratch {
  Word queries[kMaxHeadDim * kQueryRows];  // [head_dim / per word, kQueryRows]
  Word keys[kKeys * kMaxHeadDim];          // [kKeys, head_dim / per word]
  Word values[kKeys * kMaxHeadDim];        // [kKeys / per word, head_dim]
  Word weights[kKeys * kQueryRows];        // [kKeys / per word, kQueryRows]
  float scores[kKeys * kQueryRows];
  float outputs[kQueryRows * kMaxHeadDim];
  float largest[kQueryRows], total[kQueryRows], kept[kQueryRows];
};

// One query tile: `num_tokens` tokens of a chunk from `first` on, for one KV head.
template <typename T>
class PrefillTile {
 public:
  PrefillTile(const Step& step, const Layer& layer, const Chunk& chunk, int64_t head,
              int64_t first, int64_t num_tokens, PrefillScratch& scratch)
      : step_(step), layer_(layer), chunk_(chunk), s_(scratch), head_(head), first_(first),
        num_rows_(num_tokens * step.num_groups), size_(step.shape.head_dim),
        padded_rows_((num_rows_ + kLanes - 1) / kLanes * kLanes) {}

  void run() {
    load_queries();
    std::fill(s_.outputs, s_.outputs + padded_rows_ * size_, 0.0f);
    std::fill(s_.largest, s_.largest + padded_rows_, kNegativeInfinity);
    std::fill(s_.total, s_.total + padded_rows_, 0.0f);
    const int64_t last = position_of(num_rows_ - 1);
    const int64_t begin = std::max<int64_t>(0, position_of(0) - layer_.window + 1);
    for (int64_t t = begin; t <= last; t += kKeys) add_keys(t, std::min(last + 1, t + kKeys));
    write_outputs();
  }

 private:
  static constexpr bool kPairs = kInPairs<T>;
  static constexpr int64_t kPer = kPerWord<T>;

  int64_t position_of(int64_t row) const { return chunk_.start + first_ + row / step_.num_groups; }

  // Stores element (inner, column) of an operand whose inner dimension is packed in words.
  static void put(Word* words, int64_t stride, int64_t inner, int64_t column, T value) {
    if constexpr (kPairs) {
      std::memcpy(reinterpret_cast<T*>(words + inner / 2 * stride + column) + inner % 2, &value,
                  sizeof(T));
    } else {
      store_as(words + inner * stride + column, to_float(value));
    }
  }

  static float to_float(float value) { return value; }
  static float to_float(bfloat16 value) {
    const Word wide = Word{value.bits} << 16;
    return load_as<float>(&wide);
  }

  void load_queries() {
    std::fill(s_.queries, s_.queries + size_ / kPer * kQueryRows, 0);
    const T* query = static_cast<const T*>(layer_.query) + head_ * step_.num_groups * size_;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t token = chunk_.first_row + first_ + row / step_.num_groups;
      const T* source = query + token * layer_.query_stride + row % step_.num_groups * size_;
      for (int64_t d = 0; d < size_; ++d) put(s_.queries, kQueryRows, d, row, source[d]);
    }
  }

  // Copies keys and values of positions [begin, end) and zeroes the rest of the tile.
  void load_keys(int64_t begin, int64_t end) {
    const CacheShape& shape = step_.shape;
    const T* cache = static_cast<const T*>(step_.cache);
    const int64_t* table = step_.block_tables + chunk_.first_block;
    for (int64_t t = begin; t < end; ++t) {
      const T* key = cache + shape.row(table[t / shape.block_size], layer_.index, head_) +
                     t % shape.block_size * size_;
      load_row(t - begin, key, key + shape.plane());
    }
    for (int64_t i = end - begin; i < kKeys; ++i) {
      if (i % kPer == 0) std::fill_n(s_.values + i / kPer * size_, size_, 0);
      else for (int64_t d = 0; d < size_; ++d) put(s_.values, size_, i, d, T{});
      std::fill_n(s_.keys + i * (size_ / kPer), size_ / kPer, 0);
    }
  }

  void load_row(int64_t i, const T* key, const T* value) {
    if constexpr (kPairs) {
      std::memcpy(s_.keys + i * (size_ / 2), key, size_ * sizeof(T));
      Word* words = s_.values + i / 2 * size_;
      for (int64_t d = 0; d < size_; d += kLanes) {
        u32x16 wide = __builtin_convertvector(load_as<u16x16>(value + d), u32x16);
        if (i % 2) wide = load_as<u32x16>(words + d) | (wide << 16);
        store_as(words + d, wide);
      }
    } else {
      for (int64_t d = 0; d < size_; d += kLanes) {
        store_as(s_.keys + i * size_ + d, load(key + d));
        store_as(s_.values + i * size_ + d, load(value + d));
      }
    }
  }

  void add_keys(int64_t begin, int64_t end) {
    load_keys(begin, end);
    std::fill(s_.scores, s_.scores + kKeys * kQueryRows, 0.0f);
    const int64_t words = size_ / kPer;
    multiply<kPairs>({s_.keys, words, 1}, kKeys, s_.queries, kQueryRows, words, s_.scores,
                     kQueryRows, padded_rows_);
    const bool is_masked = end - 1 > position_of(0) || end - begin < kKeys ||
                           begin <= position_of(num_rows_ - 1) - layer_.window;
    for (int64_t row = 0; row < padded_rows_; row += kLanes) weigh(row, begin, is_masked);
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float kept = s_.kept[row];
      if (kept == 1.0f) continue;
      float* output = s_.outputs + row * size_;
      for (int64_t d = 0; d < size_; d += kLanes) store(output + d, load(output + d) * kept);
    }
    multiply<kPairs>({s_.weights, 1, kQueryRows}, padded_rows_, s_.values, size_, kKeys / kPer,
                     s_.outputs, size_, size_);
  }

  // The running softmax of 16 query rows over the tile's keys.
  void weigh(int64_t row, int64_t begin, bool is_masked) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(size_));
    i32x16 newest;
    for (int i = 0; i < kLanes; ++i)
      newest[i] = static_cast<int32_t>(position_of(std::min(row + i, num_rows_ - 1)));
    const int32_t window = static_cast<int32_t>(std::min<int64_t>(layer_.window, 1 << 30));
    const f32x16 before = load(s_.largest + row);
    f32x16 now = before;
    for (int64_t i = 0; i < kKeys; ++i) {
      float* scores = s_.scores + i * kQueryRows + row;
      f32x16 scaled = load(scores) * scale;
      if (is_masked) {
        const i32x16 position = i32x16{} + static_cast<int32_t>(begin + i);
        const i32x16 is_seen = (position <= newest) & (position > newest - window);
        scaled = select(is_seen, scaled, splat(kNegativeInfinity));
      }
      store(scores, scaled);
      now = maximum(now, scaled);
    }
    // A row that sees no key of this tile yet has nothing to subtract.
    const f32x16 base = select(now == splat(kNegativeInfinity), f32x16{}, now);
    f32x16 sums{};
    for (int64_t i = 0; i < kKeys; i += kPer) {
      f32x16 first = exponential(load(s_.scores + i * kQueryRows + row) - base);
      Word* target = s_.weights + i / kPer * kQueryRows + row;
      if constexpr (kPairs) {
        f32x16 second = exponential(load(s_.scores + (i + 1) * kQueryRows + row) - base);
        sums += first + second;
        store_as(target, pair(first, second));
      } else {
        sums += first;
        store_as(target, first);
      }
    }
    const f32x16 kept = exponential(before - base);
    store(s_.kept + row, kept);
    store(s_.total + row, load(s_.total + row) * kept + sums);
    store(s_.largest + row, now);
  }

  static u32x16 pair(f32x16 first, f32x16 second) {
    bfloat16 low[kLanes], high[kLanes];
    store(low, first);
    store(high, second);
    return __builtin_convertvector(load_as<u16x16>(low), u32x16) |
           (__builtin_convertvector(load_as<u16x16>(high), u32x16) << 16);
  }

  void write_outputs() {
    const int64_t heads = step_.shape.num_kv_heads * step_.num_groups;
    T* target = static_cast<T*>(layer_.output) + head_ * step_.num_groups * size_;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t token = chunk_.first_row + first_ + row / step_.num_groups;
      T* output = target + (token * heads + row % step_.num_groups) * size_;
      const float factor = 1.0f / s_.total[row];
      for (int64_t d = 0; d < size_; d += kLanes)
        store(output + d, load(s_.outputs + row * size_ + d) * factor);
    }
  }

  const Step& step_;
  const Layer& layer_;
  const Chunk& chunk_;
  PrefillScratch& s_;
  const int64_t head_, first_, num_rows_, size_, padded_rows_;
};
