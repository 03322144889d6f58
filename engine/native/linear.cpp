// Matrices of a model: packed once into panels (product.h), or as they were loaded.
#include <algorithm>
#include <vector>

#include "decode.h"
#include "product.h"

namespace {

template <typename T>
void pack(const T* weight, Word* packed, int64_t outputs, int64_t inputs, int64_t num_threads) {
  const int64_t inner = inputs / kPerWord<T>;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t p = 0; p < num_panels(outputs); ++p) {
    Word* panel = packed + p * inner * kPanel;
    const int64_t count = std::min(kPanel, outputs - p * kPanel);
    if (count < kPanel) std::fill(panel, panel + inner * kPanel, 0);
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t n = 0; n < count; ++n)
        std::memcpy(panel + k * kPanel + n, weight + (p * kPanel + n) * inputs + k * kPerWord<T>,
                    sizeof(T) * kPerWord<T>);
  }
}

template <typename T>
void run(const Matrix& matrix, const T* rows, T* output, int64_t num_rows, int64_t num_threads) {
  thread_local std::vector<Word> striped;
  const Stripes stripes(num_rows);
  const int64_t inner = matrix.inputs / kPerWord<T>;
  striped.resize(std::max<size_t>(striped.size(), num_rows * inner));
  Word* target = striped.data();
#pragma omp parallel num_threads(num_threads)
  {
    stripe_rows(reinterpret_cast<const Word*>(rows), target, stripes, inner);
    multiply_matrix(matrix, target, stripes, output);
  }
}

constexpr int64_t kOutputs = 64;  // of a plain product that one thread takes at once

// The product with a weight that lies as it was loaded, [outputs, inputs]: for few rows.
template <typename T>
void run_plain(const T* weight, const T* rows, T* output, int64_t num_rows, int64_t inputs,
               int64_t outputs, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t begin = 0; begin < outputs; begin += kOutputs) {
    const int64_t size = std::min(kOutputs, outputs - begin);
    for (int64_t r = 0; r < num_rows; ++r) {
      alignas(64) float totals[kOutputs];
      score<T, 0>(rows + r * inputs, weight + begin * inputs, size, inputs, totals);
      T* target = output + r * outputs + begin;
      for (int64_t n = 0; n < size; n += kLanes)
        store_some(target + n, load_some(totals + n, size - n), size - n);
    }
  }
}

}  // namespace

#define BATON_LINEAR(T, suffix)                                                                   \
  int64_t baton_packs_##suffix() { return kInPairs<T> || sizeof(T) == sizeof(float); }            \
  void baton_pack_##suffix(const T* weight, Word* packed, int64_t outputs, int64_t inputs,        \
                           int64_t num_threads) {                                                 \
    pack(weight, packed, outputs, inputs, num_threads);                                           \
  }                                                                                               \
  void baton_linear_##suffix(const T* rows, const Word* packed, const T* bias, T* output,         \
                             int64_t num_rows, int64_t inputs, int64_t outputs,                   \
                             int64_t num_threads) {                                               \
    run<T>({packed, bias, inputs, outputs}, rows, output, num_rows, num_threads);                 \
  }                                                                                               \
  void baton_plain_linear_##suffix(const T* rows, const T* weight, T* output, int64_t num_rows,   \
                                   int64_t inputs, int64_t outputs, int64_t num_threads) {        \
    run_plain<T>(weight, rows, output, num_rows, inputs, outputs, num_threads);                   \
  }

extern "C" {
BATON_LINEAR(float, float32)
BATON_LINEAR(bfloat16, bfloat16)

// Whether oneDNN has matrix units here that these kernels do not use.
int64_t baton_has_matrix_unit() {
#ifdef __AMX_BF16__
  return 1;
#else
  return 0;
#endif
}
}
