// Products of bfloat16 rows with matrices of int8 or int4, in integers (AVX512-VNNI): codes need
// not turn into numbers first, so that they cost no more than their bytes.
//
// Of each group of inputs a row becomes integers of 15 bits with one scale, far finer than
// bfloat16, in two planes of signed bytes: x = 128 * high + low. A code becomes an unsigned byte,
// code + offset, and the offset leaves the sums again, since it only meets the sum of the row.
// Codes lie in panels of 64 outputs, [outputs / 64, inputs / 4, 64, 4] bytes.
#include <algorithm>

#include "quantized.h"
#include "vectors.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>

namespace {

constexpr int64_t kPanel = 64;
constexpr int64_t kVectors = kPanel / kLanes;
constexpr int64_t kRowTile = 32;
constexpr int64_t kStripe = 2;       // rows that one pass over a tile of codes takes
constexpr int64_t kMaxGroup = 128;   // inputs of one sum of integers: no more overflows
constexpr int64_t kPerWord = 4;      // inputs that one instruction adds up
constexpr float kLargest = 16383.0f;

// Where the integers of a row lie in `integers`: planes, then scales and sums of the groups.
struct Rows {
  int8_t* memory;
  int64_t inputs, group, groups;

  int64_t stride() const { return 2 * inputs + 8 * groups; }
  int8_t* high(int64_t r) const { return memory + r * stride(); }
  int8_t* low(int64_t r) const { return high(r) + inputs; }
  float* scales(int64_t r) const { return reinterpret_cast<float*>(low(r) + inputs); }
  int32_t* sums(int64_t r) const { return reinterpret_cast<int32_t*>(scales(r) + groups); }
};

// What is not finite makes the scale of its group, and all that it multiplies, no number.
void turn_group(const bfloat16* x, int64_t count, int8_t* high, int8_t* low, float* scale,
                int32_t* total) {
  f32x16 most{}, nothing{};
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 values = load_some(x + i, count - i);
    most = maximum(most, (f32x16)((u32x16)values & 0x7FFFFFFF));
    nothing += values * 0.0f;
  }
  const float top = largest(most), inverse = top > 0 ? kLargest / top : 0.0f;
  *scale = top / kLargest + sum(nothing);
  i32x16 added{};
  for (int64_t i = 0; i < count; i += kLanes) {
    i32x16 integers = (i32x16)_mm512_cvtps_epi32((__m512)(load_some(x + i, count - i) * inverse));
    added += integers;
    const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(kLanes, count - i)) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(high + i, mask, (__m512i)(integers >> 7));
    _mm512_mask_cvtepi32_storeu_epi8(low + i, mask, (__m512i)(integers & 127));
  }
  *total = _mm512_reduce_add_epi32((__m512i)added);
}

void turn_row(const bfloat16* x, const Rows& rows, int64_t r) {
  for (int64_t g = 0; g < rows.groups; ++g) {
    const int64_t first = g * rows.group, count = std::min(rows.group, rows.inputs - first);
    turn_group(x + r * rows.inputs + first, count, rows.high(r) + first, rows.low(r) + first,
               rows.scales(r) + g, rows.sums(r) + g);
  }
}

inline i32x16 add_products(i32x16 total, i32x16 codes, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, sizeof(word));
  return (i32x16)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(word));
}

// What a group of a panel adds to the totals of its rows.
struct Tile {
  const uint8_t* codes;  // [count / 4, 64, 4]
  int64_t first, count;  // inputs
  const float* scales;   // [64]
  i32x16 offsets[kVectors];
  int64_t group;
};

template <int kRows>
void multiply_rows(const Tile& tile, const Rows& rows, int64_t r, float* totals) {
  i32x16 high[kRows][kVectors] = {}, low[kRows][kVectors] = {};
  for (int64_t k = 0; k < tile.count; k += kPerWord) {
    i32x16 codes[kVectors];
    for (int v = 0; v < kVectors; ++v)
      codes[v] = load_as<i32x16>(tile.codes + k * kPanel + v * sizeof(i32x16));
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) {
        high[i][v] = add_products(high[i][v], codes[v], rows.high(r + i) + tile.first + k);
        low[i][v] = add_products(low[i][v], codes[v], rows.low(r + i) + tile.first + k);
      }
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) {
      i32x16 sums = (high[i][v] << 7) + low[i][v] - tile.offsets[v] * rows.sums(r + i)[tile.group];
      f32x16 scales = load(tile.scales + v * kLanes) * rows.scales(r + i)[tile.group];
      float* total = totals + i * kPanel + v * kLanes;
      store(total, load(total) + __builtin_convertvector(sums, f32x16) * scales);
    }
}

// 64 codes in the low halves of 64 bytes, the next 64 in the high ones.
void widen_int4(const uint8_t* packed, int64_t num_codes, uint8_t* codes) {
  for (int64_t i = 0; i < num_codes; i += 128) {
    u32x16 bytes = load_as<u32x16>(packed + i / 2);
    store_as(codes + i, bytes & 0x0F0F0F0F);
    store_as(codes + i + 64, (bytes >> 4) & 0x0F0F0F0F);
  }
}

template <bool kIsInt4>
void multiply_tile(const QuantizedProduct& p, const Rows& rows, int64_t panel, int64_t first,
                   int64_t count) {
  alignas(64) float totals[kRowTile * kPanel] = {};
  alignas(64) uint8_t widened[kMaxGroup * kPanel];
  const int64_t num_scales = (p.inputs + p.group_size - 1) / p.group_size;
  for (int64_t g = 0; g < rows.groups; ++g) {
    const int64_t begin = g * rows.group, size = std::min(rows.group, p.inputs - begin);
    const int64_t code = (panel * p.inputs + begin) * kPanel;
    const int64_t scale = (panel * num_scales + begin / p.group_size) * kPanel;
    Tile tile{p.codes + code, begin, size, p.scales + scale, {}, g};
    if (kIsInt4) {
      widen_int4(p.codes + code / 2, size * kPanel, widened);
      tile.codes = widened;
    }
    for (int v = 0; v < kVectors; ++v) {
      tile.offsets[v] += kIsInt4 ? 0 : 128;
      for (int n = 0; n < kLanes && p.zeros != nullptr; ++n)
        tile.offsets[v][n] += p.zeros[scale + v * kLanes + n];
    }
    int64_t r = 0;
    for (; r + kStripe <= count; r += kStripe)
      multiply_rows<kStripe>(tile, rows, first + r, totals + r * kPanel);
    if (r < count) multiply_rows<1>(tile, rows, first + r, totals + r * kPanel);
  }
  write_panel<bfloat16>(p, totals, panel, first, count);
}

template <bool kIsInt4>
void run(const QuantizedProduct& p, int8_t* integers, int64_t num_threads) {
  const int64_t group = std::min(p.group_size, kMaxGroup);
  const Rows rows{integers, p.inputs, group, (p.inputs + group - 1) / group};
  const int64_t tiles = (p.num_rows + kRowTile - 1) / kRowTile;
  const int64_t panels = (p.outputs + kPanel - 1) / kPanel;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < p.num_rows; ++r)
      turn_row(static_cast<const bfloat16*>(p.rows), rows, r);
#pragma omp for schedule(static) collapse(2)
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int64_t tile = 0; tile < tiles; ++tile)
        multiply_tile<kIsInt4>(p, rows, panel, tile * kRowTile,
                               std::min(kRowTile, p.num_rows - tile * kRowTile));
  }
}

}  // namespace
#endif

extern "C" {
// 0 where this CPU has no such instructions; else how many inputs one sum may have.
int64_t baton_integers_max_group() {
#ifdef __AVX512VNNI__
  return kMaxGroup;
#else
  return 0;
#endif
}

// `integers` has room for num_rows * (2 * inputs + 8 * groups) bytes, groups being those of at
// most baton_integers_max_group() inputs.
void baton_integers_int8(const QuantizedProduct* p, int8_t* integers, int64_t num_threads) {
#ifdef __AVX512VNNI__
  run<false>(*p, integers, num_threads);
#endif
}

void baton_integers_int4(const QuantizedProduct* p, int8_t* integers, int64_t num_threads) {
#ifdef __AVX512VNNI__
  run<true>(*p, integers, num_threads);
#endif
}
}
