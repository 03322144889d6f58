// One step's attention as Python describes it; `library.py` mirrors these structures.
#pragma once

#include <cstdint>

// The cache: blocks of [num_layers, 2, num_kv_heads, block_size, head_dim] elements.
struct CacheShape {
  int64_t num_layers, num_kv_heads, block_size, head_dim;

  // Elements from a layer's first key to its first value.
  int64_t plane() const { return num_kv_heads * block_size * head_dim; }

  // First element of a block's keys (values: plane() further) of one layer and head.
  int64_t row(int64_t block, int64_t layer, int64_t head) const {
    return ((block * num_layers + layer) * 2 * num_kv_heads + head) * block_size * head_dim;
  }
};

// Consecutive tokens of one sequence.
struct Chunk {
  int64_t start;        // position of its first token
  int64_t num_tokens;
  int64_t first_row;    // of the step's tokens
  int64_t first_block;  // where its block table begins in `Step::block_tables`
};

struct Step {
  void* cache;
  CacheShape shape;
  int64_t num_groups;  // query heads of a KV head
  int64_t num_rows;    // tokens in the step
  int64_t num_chunks;
  const Chunk* chunks;
  const int64_t* block_tables;
  const int64_t* slots;  // of each token; -1 writes nothing
  int64_t num_threads;
};

// One layer's part of it. Strides count elements from one token to the next.
struct Layer {
  int64_t index;
  const void* query;  // [num_rows, num_kv_heads * num_groups, head_dim]
  int64_t query_stride;
  const void* key_value;  // [num_rows, 2, num_kv_heads, head_dim]
  int64_t key_value_stride;
  void* output;    // [num_rows, num_kv_heads * num_groups * head_dim], contiguous
  int64_t window;  // tokens that a query sees at most, itself included
};
