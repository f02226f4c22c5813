// GELU, x Phi(x), where Phi is the distribution function of the normal distribution, and its
// derivative.
#pragma once

#include "softmax.h"

namespace vil {

#if defined(__AVX512F__)

// A function of x that is 0 below -LIMIT and 1 above LIMIT: a polynomial in each of 30 intervals,
// whose coefficients are permuted from registers. It interpolates the exact function in the
// Chebyshev nodes of the interval.
class Pieces {
 public:
  static constexpr int TERMS = 6, COUNT = 2 * LANES;  // the first and the last piece are constant
  static constexpr double LIMIT = 5.5, PER_UNIT = (COUNT - 2) / (2 * LIMIT);

  template <class Exact>
  explicit Pieces(Exact exact) {
    for (int piece = 1; piece < COUNT - 1; ++piece) {
      double nodes[TERMS], terms[TERMS], sums[TERMS] = {};  // Newton's divided differences
      for (int i = 0; i < TERMS; ++i) {
        nodes[i] = 0.5 * std::cos(M_PI * (2 * i + 1) / (2 * TERMS));
        terms[i] = exact((piece - (COUNT - 1) / 2.0 + nodes[i]) / PER_UNIT);
      }
      for (int order = 1; order < TERMS; ++order)
        for (int i = TERMS - 1; i >= order; --i)
          terms[i] = (terms[i] - terms[i - 1]) / (nodes[i] - nodes[i - order]);
      for (int i = TERMS - 1; i >= 0; --i) {
        for (int j = TERMS - 1; j > 0; --j) sums[j] = sums[j - 1] - nodes[i] * sums[j];
        sums[0] = terms[i] - nodes[i] * sums[0];
      }
      for (int i = 0; i < TERMS; ++i) coefficients[i][piece] = sums[i];
    }
    coefficients[0][COUNT - 1] = 1.0f;
  }

  // Return the function's values, from the first USED terms. rest: positions in the pieces.
  template <int USED>
  Vector at(__m512i piece, Vector rest) const {
    const auto term = [&](int i) {
      const float* row = coefficients[i];
      return _mm512_permutex2var_ps(load(row), piece, load(row + LANES));
    };
    Vector y = term(USED - 1);
#pragma GCC unroll 6
    for (int i = USED - 2; i >= 0; --i) y = multiply_add(y, rest, term(i));
    return y;
  }

 private:
  alignas(64) float coefficients[TERMS][COUNT] = {};
};

inline double normal_below(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }

inline double gelu_slope(double x) {
  return normal_below(x) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

inline const Pieces below_pieces(normal_below), slope_pieces(gelu_slope);

// GELU at x. The errors of the value and of the slope are below 6e-7. For bfloat16, they are below
// 2e-4, which is less than the rounding error of the result.
template <class Type>
class Gelu {
 public:
  explicit Gelu(Vector x) : x(x) {
    const Vector middle = fill((Pieces::COUNT - 1) / 2.0f), to_integer = fill(12582912.0f);
    const Vector place = x * fill(Pieces::PER_UNIT);
    const Vector inside = _mm512_min_ps(larger(place, fill(0.0f) - middle), middle) + middle;
    const Vector rounded = inside + to_integer;  // 1.5 * 2^23: the last bits are the piece
    piece = (__m512i)rounded;
    rest = inside - (rounded - to_integer);
  }

  Vector value() const { return x * below_pieces.at<USED>(piece, rest); }
  Vector slope() const { return slope_pieces.at<USED>(piece, rest); }

 private:
  static constexpr int USED = Type::PAIR == 1 ? Pieces::TERMS : 4;
  Vector x, rest;
  __m512i piece;
};

#else

// GELU at x. The density is exp(-x^2 / 2) / sqrt(2 pi), and the tail of the normal distribution
// beyond |x| is the density times a polynomial of 1 / (1 + |x| / sqrt(8)), which was fitted to the
// scaled complementary error function with a relative error of 5e-8.
template <class Type>
class Gelu {
 public:
  explicit Gelu(Vector x) : x(x) {
    const Vector size = larger(x, fill(0.0f) - x), half = fill(-0.5f) * x;
    const Vector power = exponential(half * x);
    const Vector t = fill(1.0f) / multiply_add(size, fill(0.35355339f), fill(1.0f));
    Vector y = fill(-0.0588478662f);
    for (float term : {0.283491264f, -0.484944214f, 0.275471099f, -0.0248249561f, 0.201918886f,
                       0.243299669f, 0.282348086f, 0.28208799f})
      y = multiply_add(y, t, fill(term));
    const Vector tail = power * (y * t) * fill(0.5f);
    const Vector negative = _mm256_cmp_ps(x, fill(0.0f), _CMP_LT_OQ);
    below = _mm256_blendv_ps(fill(1.0f) - tail, tail, negative);
    density = power * fill(0.39894228f);
  }

  Vector value() const { return x * below; }
  Vector slope() const { return multiply_add(x, density, below); }

 private:
  Vector x, below, density;
};

#endif

}  // namespace vil
