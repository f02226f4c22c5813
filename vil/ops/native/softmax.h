// Softmax of rows of scores, and its derivative, in float.
//
// The memory of a row is a multiple of the vector size. Values beyond the last score are undefined.
// A row is read three times, but stays in the level-1 cache.
#pragma once

#include <cmath>
#include <limits>

#include "gemm.h"

namespace vil {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LEAST_EXPONENT = -87.3f;  // below it, exp would be subnormal, and is set to 0

#if defined(__AVX512F__)
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float largest(Vector x) { return _mm512_reduce_max_ps(x); }
inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }
inline Vector select(Lanes lanes, Vector a, Vector b) { return _mm512_mask_blend_ps(lanes, b, a); }
// Return y * 2^n where x is not too small, else 0. NaN stays.
inline Vector scale_power(Vector y, Vector n, Vector x) {
  const Lanes normal = _mm512_cmp_ps_mask(x, fill(LEAST_EXPONENT), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, y, n);
}
#else
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector select(Lanes lanes, Vector a, Vector b) {
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(lanes));
}
inline float largest(Vector x) {
  float values[LANES], best = -INFINITE;
  store(values, x);
  for (float value : values) best = value > best || value != value ? value : best;
  return best;
}
inline float sum(Vector x) {
  float values[LANES], total = 0.0f;
  store(values, x);
  for (float value : values) total += value;
  return total;
}
inline Vector scale_power(Vector y, Vector n, Vector x) {
  const __m256i bias = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const Vector power = _mm256_castsi256_ps(_mm256_slli_epi32(bias, 23));
  const Vector normal = _mm256_cmp_ps(x, fill(LEAST_EXPONENT), _CMP_NLT_UQ);
  return _mm256_and_ps(normal, _mm256_mul_ps(y, power));
}
#endif

// Return exp(x) for x <= 0, within 2.2 ulps, and 0 for -infinity: 2^n times a polynomial of the
// rest of x, which was fitted with a relative error of 1.1e-7.
inline Vector exponential(Vector x) {
  const Vector to_integer = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = multiply_add(x, fill(1.44269504f), to_integer) - to_integer;
  Vector r = multiply_add(n, fill(-0.693359375f), x);  // ln 2 in two parts
  r = multiply_add(n, fill(2.12194440e-4f), r);
  Vector y = fill(0.008312521f);
  for (float term : {0.041890156f, 0.16667114f, 0.4999923f, 1.0f, 1.0f})
    y = multiply_add(y, r, fill(term));
  return scale_power(y, n, x);
}

inline void store_as(float* out, Vector x) { store(out, x); }
inline void store_as(uint16_t* out, Vector x);
inline void convert(const float* row, uint16_t* out, int64_t count);
inline void convert_pair(const float* first, const float* second, float* out, int64_t count);

#if defined(__AVX512BF16__)
inline __m256i to_bfloat16(Vector x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store_as(uint16_t* out, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), to_bfloat16(x));
}

// Convert a row to bfloat16. `out` may be the start of the row itself.
inline void convert(const float* row, uint16_t* out, int64_t count) {
  for (int64_t j = 0; j < count; j += LANES) store_as(out + j, load(row + j));
}

// Convert two rows to a row of bfloat16 pairs. `out` may be the first row. A null `second` is zero.
inline void convert_pair(const float* first, const float* second, float* out, int64_t count) {
  for (int64_t j = 0; j < count; j += LANES) {
    const Vector other = second ? load(second + j) : fill(0.0f);
    const __m512i low = _mm512_cvtepu16_epi32(to_bfloat16(load(first + j)));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bfloat16(other)), 16);
    _mm512_storeu_si512(out + j, _mm512_or_si512(low, high));
  }
}
#endif

struct Statistics {
  float top, total, dot;  // the largest score, the sum of exponentials, their product with `grads`
  float lse() const { return total > 0 || total != total ? top + std::log(total) : -INFINITE; }
  float inverse() const { return total > 0 || total != total ? 1.0f / total : 0.0f; }
};

// Replace scores by exp(scale * score + added - largest), as `Element`: bfloat16 fills the first
// half of the row. `added` may be null. If `grads` is not null, `dot` is the sum of the
// exponentials times `grads`.
template <class Element>
Statistics exponentials(
    float* scores, const float* added, const float* grads, int64_t count, float scale) {
  const Lanes last = first_lanes((count - 1) % LANES + 1);
  Vector top = fill(-INFINITE);
  for (int64_t j = 0; j < count; j += LANES) {
    Vector x = load(scores + j);
    x = added ? multiply_add(x, fill(scale), load(added + j)) : x * fill(scale);
    if (j + LANES > count) x = select(last, x, fill(-INFINITE));
    store(scores + j, x);
    top = larger(top, x);
  }
  Statistics row{largest(top), 0.0f, 0.0f};
  const Vector shift = fill(row.top == -INFINITE ? 0.0f : row.top);
  Vector total = fill(0.0f), dot = fill(0.0f);
  for (int64_t j = 0; j < count; j += LANES) {
    const Vector x = exponential(load(scores + j) - shift);
    store_as(reinterpret_cast<Element*>(scores) + j, x);
    total = total + x;
    if (!grads) continue;
    dot = multiply_add(x, j + LANES > count ? load(grads + j, last) : load(grads + j), dot);
  }
  row.total = sum(total);
  row.dot = sum(dot);
  return row;
}

// Replace exponentials by weights, and the gradients of the weights by the gradients of the scores.
// If `sums` is not null, add the gradients of the scores to it.
inline void differentiate(
    float* scores, float* grads, float* sums, int64_t count, const Statistics& row) {
  const Vector inverse = fill(row.inverse()), mean = fill(row.dot * row.inverse());
  for (int64_t j = 0; j < count; j += LANES) {
    const Vector weight = load(scores + j) * inverse;
    const Vector grad = weight * (load(grads + j) - mean);
    store(scores + j, weight);
    store(grads + j, grad);
    if (sums) store(sums + j, load(sums + j) + grad);
  }
}

}  // namespace vil
