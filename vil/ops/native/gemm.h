// Small matrix multiplications on one thread: C = A B or C += A B, for operands in the cache.
//
// A (M, K), B (K, N) and C (M, N) are row-major and have any row stride. Their elements have 32
// bits: a float, or in bfloat16 a pair of neighbors along K, so that A has K/2 columns and B has
// K/2 rows of pairs. C is float. The kernels hold a block of C in registers, as in BLIS (Van Zee
// and van de Geijn, 2015). N, M and K need not be multiples of anything.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"

namespace vil {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_VECTORS = 4;
constexpr int MAX_ROWS[] = {14, 12, 8, 6};  // of a block that is 1, 2, .. vectors wide
using Vector = __m512;
using Lanes = __mmask16;  // which lanes are used

inline Lanes first_lanes(int count) { return static_cast<Lanes>((1u << count) - 1); }
inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
inline Vector load(const float* x, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, x); }
inline void store(float* x, Vector y) { _mm512_storeu_ps(x, y); }
inline void store(float* x, Vector y, Lanes lanes) { _mm512_mask_storeu_ps(x, lanes, y); }
inline Vector fill(float x) { return _mm512_set1_ps(x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#else
constexpr int LANES = 8, MAX_VECTORS = 2;
constexpr int MAX_ROWS[] = {12, 6};
using Vector = __m256;
using Lanes = __m256i;

inline Lanes first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
inline Vector load(const float* x, Lanes lanes) { return _mm256_maskload_ps(x, lanes); }
inline void store(float* x, Vector y) { _mm256_storeu_ps(x, y); }
inline void store(float* x, Vector y, Lanes lanes) { _mm256_maskstore_ps(x, lanes, y); }
inline Vector fill(float x) { return _mm256_set1_ps(x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#endif

struct Float32 {
  using Element = float;
  static constexpr int PAIR = 1;  // elements of a 32-bit unit
  static Vector accumulate(Vector c, Vector a, Vector b) { return multiply_add(a, b, c); }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
  using Element = uint16_t;
  static constexpr int PAIR = 2;
  static Vector accumulate(Vector c, Vector a, Vector b) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// A matrix: its first element and the distance of its rows, in 32-bit units.
struct Matrix {
  float* data;
  int64_t stride;
  Matrix from(int64_t row, int64_t column) const { return {data + row * stride + column, stride}; }
};

// Compute a block of C of ROWS rows and VECTORS vectors. Of the last vector, only `lanes` are used.
template <class Type, int ROWS, int VECTORS>
void multiply_block(int64_t depth, Matrix a, Matrix b, Matrix c, bool add, Lanes lanes) {
  Vector sums[ROWS][VECTORS];
  const auto read = [&](const float* x, int j) {
    return j == VECTORS - 1 ? load(x + j * LANES, lanes) : load(x + j * LANES);
  };
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j)
      sums[i][j] = add ? read(c.data + i * c.stride, j) : fill(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) row[j] = read(b.data + k * b.stride, j);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const Vector left = fill(a.data[i * a.stride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sums[i][j] = Type::accumulate(sums[i][j], left, row[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      float* out = c.data + i * c.stride + j * LANES;
      if (j == VECTORS - 1) store(out, sums[i][j], lanes);
      else store(out, sums[i][j]);
    }
}

using Block = void (*)(int64_t, Matrix, Matrix, Matrix, bool, Lanes);

// Return the kernel for a block of `rows` rows, 1 to ROWS.
template <class Type, int VECTORS, int ROWS = MAX_ROWS[VECTORS - 1]>
Block find_rows(int rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return find_rows<Type, VECTORS, ROWS - 1>(rows);
  return multiply_block<Type, ROWS, VECTORS>;
}

template <class Type, int VECTORS = MAX_VECTORS>
Block find_block(int rows, int vectors) {
  if constexpr (VECTORS > 1)
    if (vectors < VECTORS) return find_block<Type, VECTORS - 1>(rows, vectors);
  return find_rows<Type, VECTORS>(rows);
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Compute C = A B, or C += A B if `add`: A (rows, depth), B (depth, columns), C (rows, columns).
template <class Type>
void multiply(
    int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b, Matrix c, bool add) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Type, BFloat16>)
    if (rows >= TILE && columns >= TILE && has_amx())
      return multiply_amx(rows, columns, depth, a.data, a.stride, b.data, b.stride, c.data,
                          c.stride, add);
#endif
  const int64_t vectors = divide_up(columns, LANES), spans = divide_up(vectors, MAX_VECTORS);
  for (int64_t span = 0; span < spans; ++span) {  // of even widths
    const int64_t first = span * vectors / spans, width = (span + 1) * vectors / spans - first;
    const int64_t last = columns - (first + width - 1) * LANES;
    const Lanes lanes = first_lanes(std::min<int64_t>(last, LANES));
    const int64_t blocks = divide_up(rows, MAX_ROWS[width - 1]);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t top = block * rows / blocks, count = (block + 1) * rows / blocks - top;
      find_block<Type>(count, width)(
          depth, a.from(top, 0), b.from(0, first * LANES), c.from(top, first * LANES), add, lanes);
    }
  }
}

}  // namespace vil
