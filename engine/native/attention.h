// Paged attention over a step's chunks, cut into items that threads take. Called by every thread
// of a team.
#pragma once

#include <memory>
#include <vector>

#include "decode.h"
#include "prefill.h"
#include "step.h"

// Tokens [first, first + num_tokens) of a chunk, for some KV heads.
struct Item {
  int64_t chunk, first, num_tokens, head, num_heads;
};

template <typename T>
void write_token(const Step& step, const Layer& layer, int64_t token) {
  const int64_t slot = step.slots[token];
  if (slot < 0) return;
  const CacheShape& shape = step.shape;
  const int64_t block = slot / shape.block_size, offset = slot % shape.block_size;
  const T* source = static_cast<const T*>(layer.key_value) + token * layer.key_value_stride;
  T* cache = static_cast<T*>(step.cache) + offset * shape.head_dim;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    T* key = cache + shape.row(block, layer.index, head);
    const T* own = source + head * shape.head_dim;
    std::copy_n(own, shape.head_dim, key);
    std::copy_n(own + shape.num_kv_heads * shape.head_dim, shape.head_dim, key + shape.plane());
  }
}

// KV heads that one thread takes of a single token: all where there are tokens enough to share.
inline int64_t heads_per_token(const Step& step) {
  int64_t num_tokens = 0;
  for (int64_t c = 0; c < step.num_chunks; ++c) num_tokens += step.chunks[c].num_tokens == 1;
  return num_tokens >= 4 * step.num_threads ? step.shape.num_kv_heads : 1;
}

// Longest first, so that no thread ends with a long one; of a prompt, the last tile is longest.
inline std::vector<Item> items_of(const Step& step) {
  const int64_t tokens_per_tile = std::max<int64_t>(1, kQueryRows / step.num_groups);
  const int64_t num_kv_heads = step.shape.num_kv_heads, num_together = heads_per_token(step);
  std::vector<Item> items;
  for (int64_t c = 0; c < step.num_chunks; ++c) {
    const int64_t num_tokens = step.chunks[c].num_tokens;
    const int64_t tile = num_tokens == 1 ? 1 : tokens_per_tile;
    const int64_t num_heads = num_tokens == 1 ? num_together : 1;
    for (int64_t first = (num_tokens - 1) / tile * tile; first >= 0; first -= tile)
      for (int64_t head = 0; head < num_kv_heads; head += num_heads)
        items.push_back({c, first, std::min(tile, num_tokens - first), head, num_heads});
  }
  return items;
}

template <typename T>
void attend(const Step& step, const Layer& layer, const Item& item) {
  const Chunk& chunk = step.chunks[item.chunk];
  if (chunk.num_tokens > 1) {
    thread_local auto scratch = std::make_unique<PrefillScratch>();
    PrefillTile<T>(step, layer, chunk, item.head, item.first, item.num_tokens, *scratch).run();
  } else if (step.shape.head_dim == 64) {
    decode<T, 64>(step, layer, chunk, item.head, item.num_heads);
  } else if (step.shape.head_dim == 128) {
    decode<T, 128>(step, layer, chunk, item.head, item.num_heads);
  } else {
    decode<T, 0>(step, layer, chunk, item.head, item.num_heads);
  }
}

// Writes the step's keys and values. A thread's tokens are those that a static loop gives it.
template <typename T>
void write_tokens(const Step& step, const Layer& layer) {
#pragma omp for schedule(static)
  for (int64_t token = 0; token < step.num_rows; ++token) write_token<T>(step, layer, token);
}

template <typename T>
void attend_items(const Step& step, const Layer& layer, const std::vector<Item>& items) {
  const int64_t num_items = static_cast<int64_t>(items.size());
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < num_items; ++i) attend<T>(step, layer, items[i]);
}
