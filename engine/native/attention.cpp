// One layer's attention: writes keys and values, then attends.
#include "attention.h"

namespace {

template <typename T>
void run(const Step& step, const Layer& layer) {
  const std::vector<Item> items = items_of(step);
#pragma omp parallel num_threads(step.num_threads)
  {
    write_tokens<T>(step, layer);
    attend_items<T>(step, layer, items);
  }
}

}  // namespace

extern "C" {

void baton_attend_float32(const Step* step, const Layer* layer) { run<float>(*step, *layer); }

void baton_attend_bfloat16(const Step* step, const Layer* layer) { run<bfloat16>(*step, *layer); }

int64_t baton_max_head_dim() { return kMaxHeadDim; }

int64_t baton_max_num_groups() { return kQueryRows; }
}
