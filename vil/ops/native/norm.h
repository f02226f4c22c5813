// The layer norm of a row of floats, and its derivative.
#pragma once

#include <cmath>

#include "softmax.h"

namespace vil {

struct Moments {
  float mean, scale;  // scale: the inverse of the standard deviation
};

// Write the layer norm of a row to `out`, which must not be the row itself.
inline Moments normalize(
    const float* row, int64_t dim, double eps, const float* gain, const float* shift, float* out) {
  Vector total = fill(0.0f), squares = fill(0.0f);
  for (int64_t j = 0; j < dim; j += LANES) total = total + load(row + j);
  const float mean = sum(total) / dim;
  for (int64_t j = 0; j < dim; j += LANES) {
    const Vector x = load(row + j) - fill(mean);
    squares = multiply_add(x, x, squares);
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / dim + static_cast<float>(eps));
  for (int64_t j = 0; j < dim; j += LANES) {
    const Vector x = (load(row + j) - fill(mean)) * fill(scale);
    store(out + j, multiply_add(x, load(gain + j), load(shift + j)));
  }
  return {mean, scale};
}

// Replace `grad`, the gradient of the norm's output, by the gradient of its input. Add the
// gradients of gain and shift to dgain and dshift. The row is overwritten.
inline void differentiate_norm(
    float* row, float* grad, int64_t dim, Moments moments, const float* gain, float* dgain,
    float* dshift) {
  const Vector scale = fill(moments.scale);
  Vector total = fill(0.0f), product = fill(0.0f);
  for (int64_t j = 0; j < dim; j += LANES) {
    const Vector normed = (load(row + j) - fill(moments.mean)) * scale;
    const Vector of_output = load(grad + j), dx = of_output * load(gain + j);
    store(dshift + j, load(dshift + j) + of_output);
    store(dgain + j, load(dgain + j) + of_output * normed);
    total = total + dx;
    product = multiply_add(dx, normed, product);
    store(row + j, normed);
    store(grad + j, dx);
  }
  const Vector mean = fill(sum(total) / dim), along = fill(sum(product) / dim);
  for (int64_t j = 0; j < dim; j += LANES)
    store(grad + j, (load(grad + j) - mean - load(row + j) * along) * scale);
}

}  // namespace vil
