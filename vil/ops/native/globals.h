// The attention of the global tokens, which attend to all tokens.
//
// A task is a head of an image. The few queries are multiplied in float, with keys that are not
// packed.
#pragma once

#include "task.h"

namespace vil {

constexpr int64_t SUMMED_KEYS = 256;  // keys of a partial sum, so that rounding errors stay small

inline float dot(const float* a, const float* b, int64_t count) {
  Vector total = fill(0.0f);
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) total = multiply_add(load(a + d), load(b + d), total);
  if (d < count) {
    const Lanes lanes = first_lanes(count - d);
    total = multiply_add(load(a + d, lanes), load(b + d, lanes), total);
  }
  return sum(total);
}

// Add factor * row to `out`.
inline void add_scaled(float factor, const float* row, int64_t count, float* out) {
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES)
    store(out + d, multiply_add(fill(factor), load(row + d), load(out + d)));
  if (d < count) {
    const Lanes lanes = first_lanes(count - d);
    const Vector more = multiply_add(fill(factor), load(row + d, lanes), load(out + d, lanes));
    store(out + d, more, lanes);
  }
}

inline const float* as_floats(const float* token, int64_t, float*) { return token; }

inline const float* as_floats(const uint16_t* token, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t bits = uint32_t{token[d]} << 16;
    std::memcpy(out + d, &bits, sizeof bits);
  }
  return out;
}

template <class Type>
class GlobalQueries {
 public:
  GlobalQueries(const Call& call, Scratch& scratch, int64_t image, int64_t head)
      : call(call), scratch(scratch), image(image), head(head), count(call.num_global),
        dim(call.dim), keys(count + call.grid[0] * call.grid[1]), stride(pad(keys, LANES)) {
    scratch.tokens.take(std::max(stride, 2 * dim));
  }

  static bool wanted(const Call& call) { return call.q_global.data; }

  void forward() {
    const Matrix queries = copy(call.q_global, scratch.queries);
    const Matrix scores = multiply_keys(call.k, queries, scratch.scores);
    scratch.statistics.resize(count);
    for (int64_t g = 0; g < count; ++g)
      scratch.statistics[g] =
          exponentials<float>(scores.from(g, 0).data, added(g), nullptr, keys, call.scale);
    const Matrix out = sum_rows(call.v, scores);
    for (int64_t g = 0; g < count; ++g)
      write_token(out.from(g, 0).data, dim, scratch.statistics[g].inverse(), row(call.out_global, g));
  }

  // Write the gradient of the queries, and add to the gradients of the keys and values of all
  // tokens. If the call has a bias, also add to its gradient dbias (queries, queries + 1).
  void backward(float* dbias) {
    const Matrix queries = copy(call.q_global, scratch.queries);
    const Matrix grads = copy(call.dout_global, scratch.grads);
    const Matrix scores = multiply_keys(call.k, queries, scratch.scores);
    const Matrix dscores = multiply_keys(call.v, grads, scratch.dscores);
    for (int64_t g = 0; g < count; ++g) {
      float *weights = scores.from(g, 0).data, *dweights = dscores.from(g, 0).data;
      const Statistics row = exponentials<float>(weights, added(g), dweights, keys, call.scale);
      differentiate(weights, dweights, nullptr, keys, row);
      if (!call.dfrom_globals) continue;
      for (int64_t j = 0; j < keys; ++j)
        dbias[g * (count + 1) + std::min(j, count)] += dweights[j];
    }
    const Matrix dqueries = sum_rows(call.k, dscores);
    for (int64_t g = 0; g < count; ++g)
      write_token(dqueries.from(g, 0).data, dim, call.scale, row(call.dq_global, g));
    add_products(call.dk, dscores, queries, call.scale);
    add_products(call.dv, scores, grads, 1.0f);
  }

 private:
  const Call& call;
  Scratch& scratch;
  const int64_t image, head, count, dim, keys, stride;

  typename Type::Element* row(Tokens x, int64_t token) const {
    return row_of<Type>(x, image, head, token);
  }

  Matrix copy(Tokens x, Buffer& buffer) const {
    const Matrix out{buffer.take(count * dim), dim};
    for (int64_t g = 0; g < count; ++g) {
      float* to = out.from(g, 0).data;
      const float* from = as_floats(row(x, g), dim, to);
      if (from != to) std::memcpy(to, from, dim * sizeof(float));
    }
    return out;
  }

  // Return the products (queries, keys) of queries and the rows of all tokens.
  Matrix multiply_keys(Tokens x, Matrix queries, Buffer& buffer) const {
    const Matrix out{buffer.take(count * stride), stride};
    for (int64_t j = 0; j < keys; ++j) {
      const float* token = as_floats(row(x, j), dim, scratch.tokens.get());
      for (int64_t g = 0; g < count; ++g)
        out.from(g, j).data[0] = dot(token, queries.from(g, 0).data, dim);
    }
    return out;
  }

  // Return the bias of the scores of query g; null without a bias.
  const float* added(int64_t g) const {
    if (!call.from_globals) return nullptr;
    const float* bias = call.from_globals + (head * count + g) * (count + 1);
    float* out = scratch.tokens.get();
    std::copy(bias, bias + count, out);
    std::fill(out + count, out + keys, bias[count]);
    return out;
  }

  // Return the sums (queries, channels) of the rows of all tokens, with weights (queries, keys).
  Matrix sum_rows(Tokens x, Matrix weights) const {
    const Matrix out{scratch.out.take(2 * count * dim), dim}, part = out.from(count, 0);
    std::fill(out.data, out.data + 2 * count * dim, 0.0f);
    for (int64_t first = 0; first < keys; first += SUMMED_KEYS) {
      for (int64_t j = first; j < std::min(first + SUMMED_KEYS, keys); ++j) {
        const float* token = as_floats(row(x, j), dim, scratch.tokens.get());
        for (int64_t g = 0; g < count; ++g)
          add_scaled(weights.from(g, j).data[0], token, dim, part.from(g, 0).data);
      }
      for (int64_t i = 0; i < count * dim; ++i) out.data[i] += std::exchange(part.data[i], 0.0f);
    }
    return out;
  }

  // Add weights^T rows, multiplied by `scale`, to all tokens: weights (queries, keys), rows
  // (queries, channels).
  void add_products(Tokens x, Matrix weights, Matrix rows, float scale) const {
    for (int64_t j = 0; j < keys; ++j) {
      float* sums = scratch.tokens.get();
      std::fill(sums, sums + dim, 0.0f);
      for (int64_t g = 0; g < count; ++g)
        add_scaled(scale * weights.from(g, j).data[0], rows.from(g, 0).data, dim, sums);
      auto* token = row(x, j);
      add_scaled(1.0f, as_floats(token, dim, sums + dim), dim, sums);
      write_token(sums, dim, 1.0f, token);
    }
  }
};

}  // namespace vil
