// The operations between matrices, one at a time.
#include "elementwise.h"

namespace {

constexpr int64_t kMinParallel = 1 << 14;  // elements below which threads cost more than they save

int64_t team_size(int64_t num_elements, int64_t num_threads) {
  return num_elements >= kMinParallel ? num_threads : 1;
}

}  // namespace

#define BATON_ELEMENTWISE(T, suffix)                                                              \
  void baton_add_norm_##suffix(T* hidden, const T* update, const T* weight, T* output,            \
                               int64_t rows, int64_t size, float eps, int64_t num_threads) {      \
    _Pragma("omp parallel num_threads(team_size(rows * size, num_threads))")                       \
        add_norm(hidden, update, weight, output, rows, size, eps);                                \
  }                                                                                               \
  void baton_rotate_##suffix(T* heads, int64_t rows, int64_t row_stride, int64_t num_query_heads, \
                             int64_t num_key_heads, int64_t head_dim, const float* cos,           \
                             const float* sin, const T* query_norm, const T* key_norm, float eps, \
                             int64_t num_threads) {                                               \
    _Pragma("omp parallel num_threads(team_size(rows * row_stride, num_threads))")                 \
        rotate(heads, rows, row_stride, num_query_heads, num_key_heads, head_dim, cos, sin,       \
               query_norm, key_norm, eps);                                                        \
  }                                                                                               \
  void baton_gate_##suffix(const T* gate_up, T* output, int64_t rows, int64_t size,               \
                           int64_t num_threads) {                                                 \
    _Pragma("omp parallel num_threads(team_size(rows * size, num_threads))")                       \
        gate(gate_up, output, rows, size);                                                        \
  }

extern "C" {
BATON_ELEMENTWISE(float, float32)
BATON_ELEMENTWISE(bfloat16, bfloat16)
}
