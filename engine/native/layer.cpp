// A whole decoder layer in one call: one team of threads from the first norm to the last matrix.
#include <algorithm>

#include "attention.h"
#include "elementwise.h"
#include "product.h"

namespace {

struct LayerWeights {
  const void *input_norm, *post_attention_norm;
  const void *query_norm, *key_norm;  // null where the model has none
  Matrix qkv, output, gate_up, down;
};

// A step's rows on their way through the layers, each [num_rows, size of its last dimension].
struct Rows {
  void* hidden;
  void* update;   // what the layer before adds to `hidden`; then what this one adds
  void* narrow;   // what a matrix reads: hidden size, all query heads, or intermediate size
  void* striped;  // the same in stripes
  void* wide;     // what a matrix writes: all heads, or gate and up
  const float *cos, *sin;  // [num_rows, head_dim / 2]
  float eps;
};

template <typename T>
class LayerRun {
 public:
  LayerRun(const Step& step, const LayerWeights& weights, const Rows& rows)
      : step_(step), weights_(weights), rows_(rows), stripes_(step.num_rows),
        hidden_(static_cast<T*>(rows.hidden)), update_(static_cast<T*>(rows.update)),
        narrow_(static_cast<T*>(rows.narrow)), wide_(static_cast<T*>(rows.wide)) {}

  // `index` and `window` are the layer's own.
  void run(int64_t index, int64_t window) {
    const CacheShape& shape = step_.shape;
    const int64_t query_size = shape.num_kv_heads * step_.num_groups * shape.head_dim;
    const int64_t row_size = weights_.qkv.outputs;
    const Layer layer{index, wide_, row_size, wide_ + query_size, row_size, narrow_, window};
    const std::vector<Item> items = items_of(step_);
    const T* update = index > 0 ? update_ : nullptr;
#pragma omp parallel num_threads(step_.num_threads)
    {
      norm(update, weights_.input_norm);
      multiply(weights_.qkv, wide_);
      rotate();
      write_tokens<T>(step_, layer);
      attend_items<T>(step_, layer, items);
      multiply(weights_.output, update_);
      norm(update_, weights_.post_attention_norm);
      multiply(weights_.gate_up, wide_);
      gate(wide_, narrow_, step_.num_rows, weights_.down.inputs);
      multiply(weights_.down, update_);
    }
  }

 private:
  void norm(const T* update, const void* weight) {
    add_norm(hidden_, update, static_cast<const T*>(weight), narrow_, step_.num_rows,
             weights_.qkv.inputs, rows_.eps);
  }

  void rotate() {
    const CacheShape& shape = step_.shape;
    ::rotate(wide_, step_.num_rows, weights_.qkv.outputs, shape.num_kv_heads * step_.num_groups,
             shape.num_kv_heads, shape.head_dim, rows_.cos, rows_.sin,
             static_cast<const T*>(weights_.query_norm), static_cast<const T*>(weights_.key_norm),
             rows_.eps);
  }

  // Of what stands in `narrow`.
  void multiply(const Matrix& matrix, T* output) {
    Word* striped = static_cast<Word*>(rows_.striped);
    stripe_rows(reinterpret_cast<const Word*>(narrow_), striped, stripes_,
                matrix.inputs / kPerWord<T>);
    multiply_matrix(matrix, striped, stripes_, output);
  }

  const Step& step_;
  const LayerWeights& weights_;
  const Rows& rows_;
  const Stripes stripes_;
  T *const hidden_, *const update_, *const narrow_, *const wide_;
};

}  // namespace

#define BATON_LAYER(T, suffix)                                                                 \
  void baton_layer_##suffix(const Step* step, const LayerWeights* weights, const Rows* rows,   \
                            int64_t index, int64_t window) {                                   \
    LayerRun<T>(*step, *weights, *rows).run(index, window);                                    \
  }

extern "C" {
BATON_LAYER(float, float32)
BATON_LAYER(bfloat16, bfloat16)
}
