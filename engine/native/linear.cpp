// Matrices packed once into panels of 64 outputs, [outputs / 64, inputs / per word, 64] words,
// so that a product reads them from front to back, whatever its number of rows.
#include <algorithm>

#include "decode.h"
#include "multiply.h"

namespace {

constexpr int64_t kPanel = 64;      // outputs side by side
constexpr int64_t kRowTile = 64;    // rows that a panel is multiplied with in one go
constexpr int64_t kInnerTile = 64;  // words: a part of a panel that stays in the first cache

int64_t num_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

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

struct Product {
  const void* rows;  // [num_rows, inputs]
  const Word* packed;
  const void* bias;  // [outputs], or null
  void* output;      // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
};

template <typename T>
void multiply_tile(const Product& p, int64_t panel, int64_t first, int64_t count) {
  alignas(64) float totals[kRowTile * kPanel];
  std::fill(totals, totals + count * kPanel, 0.0f);
  const int64_t inner = p.inputs / kPerWord<T>;
  const Word* rows = static_cast<const Word*>(p.rows) + first * inner;
  const Word* columns = p.packed + panel * inner * kPanel;
  for (int64_t k = 0; k < inner; k += kInnerTile)
    multiply<kInPairs<T>>({rows + k, inner, 1}, count, columns + k * kPanel, kPanel,
                          std::min(kInnerTile, inner - k), totals, kPanel, kPanel);
  const int64_t begin = panel * kPanel, size = std::min(kPanel, p.outputs - begin);
  const T* bias = static_cast<const T*>(p.bias);
  for (int64_t r = 0; r < count; ++r) {
    T* target = static_cast<T*>(p.output) + (first + r) * p.outputs + begin;
    for (int64_t n = 0; n < size; n += kLanes) {
      f32x16 values = load(totals + r * kPanel + n);
      if (bias != nullptr) values += load_some(bias + begin + n, size - n);
      store_some(target + n, values, size - n);
    }
  }
}

template <typename T>
void run(const Product& p, int64_t num_threads) {
  const int64_t row_tiles = (p.num_rows + kRowTile - 1) / kRowTile;
  const int64_t panels = num_panels(p.outputs);
#pragma omp parallel for num_threads(num_threads) schedule(static) collapse(2)
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t tile = 0; tile < row_tiles; ++tile)
      multiply_tile<T>(p, panel, tile * kRowTile, std::min(kRowTile, p.num_rows - tile * kRowTile));
}

// The same with a weight that lies as it was loaded, [outputs, inputs]: for few rows.
template <typename T>
void run_plain(const Product& p, const T* weight, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t begin = 0; begin < p.outputs; begin += kPanel) {
    const int64_t size = std::min(kPanel, p.outputs - begin);
    for (int64_t r = 0; r < p.num_rows; ++r) {
      alignas(64) float totals[kPanel];
      score<T, 0>(static_cast<const T*>(p.rows) + r * p.inputs, weight + begin * p.inputs, size,
                  p.inputs, totals);
      T* target = static_cast<T*>(p.output) + r * p.outputs + begin;
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
    run<T>({rows, packed, bias, output, num_rows, inputs, outputs}, num_threads);                 \
  }                                                                                               \
  void baton_plain_linear_##suffix(const T* rows, const T* weight, T* output, int64_t num_rows,   \
                                   int64_t inputs, int64_t outputs, int64_t num_threads) {        \
    run_plain<T>({rows, nullptr, nullptr, output, num_rows, inputs, outputs}, weight,             \
                 num_threads);                                                                    \
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
