// Products with matrices in codes (engine/quantization/weight.py). A tile of codes turns into the
// element type in the first cache, exactly, and is multiplied like a tile of linear.cpp; scales
// meet the sums of their group in float. So memory is read in codes, and nothing is rounded that
// an unquantized matrix would not round.
//
// Codes lie in panels of 64 outputs, [outputs / 64, inputs / per word, 64, per word], scales and
// zeros in [outputs / 64, groups, 64].
#include <algorithm>

#include "multiply.h"
#include "quantized.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPanel = 64;
constexpr int64_t kRowTile = 64;    // rows for which a tile of codes turns once
constexpr int64_t kInnerTile = 64;  // words
constexpr int64_t kRun = 2 * kLanes;

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

struct Run {
  f32x16 first, second;
};

// GCC 12 takes the vectors of these two conversions apart where no intrinsic names them.
inline i32x16 widen(i8x16 integers) {
#ifdef __AVX512F__
  return (i32x16)_mm512_cvtepi8_epi32((__m128i)integers);
#else
  return __builtin_convertvector(integers, i32x16);
#endif
}

inline u32x16 widen(u8x16 bytes) {
#ifdef __AVX512F__
  return (u32x16)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, u32x16);
#endif
}

inline f32x16 as_floats(i32x16 integers) { return __builtin_convertvector(integers, f32x16); }

inline void store_run(float* target, Run run) {
  store(target, run.first);
  store(target + kLanes, run.second);
}

inline void store_run(bfloat16* target, Run run) {
#ifdef __AVX512BF16__
  store_as(target, _mm512_cvtne2ps_pbh((__m512)run.second, (__m512)run.first));
#else
  store(target, run.first);
  store(target + kLanes, run.second);
#endif
}

// 32 codes, from the index-th on; `index` is a multiple of 32.
struct Int8 {
  static Run read(const uint8_t* codes, int64_t index) {
    return {as_floats(widen(load_as<i8x16>(codes + index))),
            as_floats(widen(load_as<i8x16>(codes + index + kLanes)))};
  }
};

// float8_e4m3fn without its NaN: 4 bits of exponent with bias 7, 3 of mantissa.
struct Fp8 {
  static f32x16 widen_float(u8x16 bytes) {
    u32x16 bits = widen(bytes);
    u32x16 magnitude = bits & 0x7F;
    f32x16 normal = (f32x16)((magnitude << 20) + (120u << 23));
    f32x16 subnormal = as_floats((i32x16)magnitude) * (1.0f / 512);
    f32x16 value = select((i32x16)(magnitude < 8), subnormal, normal);
    return (f32x16)((u32x16)value | (bits & 0x80) << 24);
  }
  static Run read(const uint8_t* codes, int64_t index) {
    return {widen_float(load_as<u8x16>(codes + index)),
            widen_float(load_as<u8x16>(codes + index + kLanes))};
  }
};

// The first 16 of a run in the low halves of 16 bytes, the others in the high ones.
struct Int4 {
  static Run read(const uint8_t* codes, int64_t index) {
    u8x16 bytes = load_as<u8x16>(codes + index / 2);
    return {as_floats(widen((i8x16)(bytes & 15))), as_floats(widen((i8x16)(bytes >> 4)))};
  }
};

// One row of words of a panel is kRow<T> codes.
template <typename T>
constexpr int64_t kRow = kPanel * kPerWord<T>;

// `count` rows of words, from the first-th code on, less the `zeros` of each column if any.
template <typename T, typename Code>
inline void turn(const uint8_t* codes, int64_t first, int64_t count, const float* zeros, T* tile) {
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t n = 0; n < kRow<T>; n += kRun) {
      Run run = Code::read(codes, first + k * kRow<T> + n);
      if (zeros != nullptr) {
        run.first -= load(zeros + n);
        run.second -= load(zeros + n + kLanes);
      }
      store_run(tile + k * kRow<T> + n, run);
    }
  }
}

template <typename T>
inline const float* zeros_of(const QuantizedProduct& p, int64_t group, float* expanded) {
  if (p.zeros == nullptr) return nullptr;
  for (int64_t n = 0; n < kRow<T>; ++n)
    expanded[n] = p.zeros[group * kPanel + n / kPerWord<T>];
  return expanded;
}

template <typename T, typename Code>
void multiply_tile(const QuantizedProduct& p, int64_t panel, int64_t first, int64_t count) {
  alignas(64) float totals[kRowTile * kPanel], sums[kRowTile * kPanel], expanded[kRow<T>];
  alignas(64) T tile[kInnerTile * kRow<T>];
  std::fill(totals, totals + count * kPanel, 0.0f);
  const int64_t inner = p.inputs / kPerWord<T>, step = p.group_size / kPerWord<T>;
  const int64_t groups = (inner + step - 1) / step;
  const Word* rows = static_cast<const Word*>(p.rows) + first * inner;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t end = std::min(inner, (g + 1) * step);
    const float* zeros = zeros_of<T>(p, panel * groups + g, expanded);
    std::fill(sums, sums + count * kPanel, 0.0f);
    for (int64_t k = g * step; k < end; k += kInnerTile) {
      const int64_t size = std::min(kInnerTile, end - k);
      turn<T, Code>(p.codes, (panel * inner + k) * kRow<T>, size, zeros, tile);
      multiply<kInPairs<T>>({rows + k, inner, 1}, count, reinterpret_cast<const Word*>(tile),
                            kPanel, size, sums, kPanel, kPanel);
    }
    const float* scales = p.scales + (panel * groups + g) * kPanel;
    for (int64_t r = 0; r < count; ++r)
      for (int64_t n = 0; n < kPanel; n += kLanes) {
        float* total = totals + r * kPanel + n;
        store(total, load(total) + load(scales + n) * load(sums + r * kPanel + n));
      }
  }
  write_panel<T>(p, totals, panel, first, count);
}

template <typename T, typename Code>
void run(const QuantizedProduct& p, int64_t num_threads) {
  const int64_t row_tiles = (p.num_rows + kRowTile - 1) / kRowTile;
  const int64_t panels = (p.outputs + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(num_threads) schedule(static) collapse(2)
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t tile = 0; tile < row_tiles; ++tile)
      multiply_tile<T, Code>(p, panel, tile * kRowTile,
                             std::min(kRowTile, p.num_rows - tile * kRowTile));
}

}  // namespace

#define BATON_QUANTIZED(T, suffix, Code, code)                                               \
  void baton_quantized_##code##_##suffix(const QuantizedProduct* p, int64_t num_threads) {   \
    if constexpr (kInPairs<T> || sizeof(T) == sizeof(float)) run<T, Code>(*p, num_threads);  \
  }

extern "C" {
BATON_QUANTIZED(float, float32, Int8, int8)
BATON_QUANTIZED(float, float32, Fp8, fp8)
BATON_QUANTIZED(float, float32, Int4, int4)
BATON_QUANTIZED(bfloat16, bfloat16, Int8, int8)
BATON_QUANTIZED(bfloat16, bfloat16, Fp8, fp8)
BATON_QUANTIZED(bfloat16, bfloat16, Int4, int4)
}
