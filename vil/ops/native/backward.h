// The backward pass: recomputes the weights of a block, and adds to the gradients of its keys.
//
// The weights come from a new softmax: exp(score - lse) would scale a row by the rounding error of
// lse. The gradients of keys and values are summed transposed, so that the weights and the
// gradients of the scores of a block are right-hand operands without a transpose.
#pragma once

#include "task.h"

namespace vil {

// The partial gradient of a row of keys, to which several tasks or visits add.
struct Partial {
  int64_t row, count;
  Buffer dkeys_t, dvalues_t;
};

// Write the sums (channels, keys) as gradients of tokens.
template <class Type>
void write_keys(
    const Call& call, const Sizes& sizes, Scratch& scratch, Band band, int64_t key_row,
    int64_t rows, const std::vector<Line>& columns, int64_t count, float* sums, Tokens out,
    float scale) {
  Matrix tokens{scratch.tokens.take(sizes.key_stride * call.dim), call.dim};
  transpose({sums, sizes.key_stride}, call.dim, count, tokens);
  each_key(call, key_row, rows, columns, sizes.unit, [&](int64_t token, int64_t i) {
    write_token(tokens.from(i, 0).data, call.dim, scale,
                row_of<Type>(out, band.image, band.head, token));
  });
}

template <class Type>
class Backward : public Task<Type, Backward<Type>> {
 public:
  using Base = Task<Type, Backward<Type>>;
  using Base::call, Base::sizes, Base::scratch, Base::band, Base::bias;

  Backward(const Call& call, const Bias& bias, const Sizes& sizes, Scratch& scratch, Band band,
           std::vector<Partial>& partial, float* dtable, float* dglobal)
      : Base(call, bias, sizes, scratch, band),
        partial(partial), dtable(dtable), dglobal(dglobal) {}

  void pack(KeyRow& row) {
    const int64_t units = sizes.units, stride = sizes.key_stride;
    const float* keys = this->copy_keys(call.k, row);
    transpose({const_cast<float*>(keys), units}, row.count, units,
              {row.keys_t.take(units * stride), stride});
    join_rows<Type>(keys, row.count, call.dim, row.keys.take(stride * call.dim));
    transpose({this->copy_keys(call.v, row), units}, row.count, units,
              {row.values_t.take(units * stride), stride});
    for (Buffer* sums : {&row.dkeys_t, &row.dvalues_t})
      for (int64_t d = 0; d < call.dim; ++d)
        std::memset(sums->take(call.dim * stride) + d * stride, 0, row.count * sizeof(float));
  }

  void start(int64_t slot, int64_t count) {
    if (has_bias())
      std::memset(scratch.dtiles[slot].take(sizes.block * sizes.score_stride), 0,
                  count * sizes.score_stride * sizeof(float));
  }

  // Add the gradient of the tile in use to the gradients of the biases.
  void flush(int64_t slot) {
    const Tile& tile = this->held[slot];
    if (!tile.keys || !has_bias()) return;
    bias.add_gradient({scratch.dtiles[slot].get(), sizes.score_stride}, *tile.keys, tile.first,
                      tile.count, tile.cols, dtable, dglobal);
  }

  void close(KeyRow& row) {
    if (row.visits == row.all_visits) {
      const int64_t rows = this->real_rows(row.row);
      write_keys<Type>(call, sizes, scratch, band, row.row, rows, this->columns, row.count,
                       row.dkeys_t.get(), call.dk, call.scale);
      write_keys<Type>(call, sizes, scratch, band, row.row, rows, this->columns, row.count,
                       row.dvalues_t.get(), call.dv, 1.0f);
    } else {
      partial.push_back({row.row, row.count, std::move(row.dkeys_t), std::move(row.dvalues_t)});
    }
    row.row = -2;
  }

  void compute(
      int64_t r, int64_t c, const Keys& keys, int64_t first, int64_t count, Buffer* added,
      int64_t slot) {
    const int64_t dim = call.dim, units = sizes.units;
    Matrix queries{scratch.queries.take(sizes.block * units), units}, queries_t;
    Matrix grads{scratch.grads.take(sizes.block * units), units}, grads_t;
    Matrix scores{scratch.scores.take(sizes.block * sizes.score_stride), sizes.score_stride};
    Matrix dscores{scratch.dscores.take(sizes.block * sizes.score_stride), sizes.score_stride};
    queries_t = load(call.q, r, c, first, count, queries.data, scratch.queries_t);
    grads_t = load(call.dout, r, c, first, count, grads.data, scratch.grads_t);
    for (const Run& run : keys.runs) {
      const KeyRow& row = this->packed(run.key_row);
      multiply<Type>(count, run.count, units, queries,
                     Matrix{row.keys_t.get(), sizes.key_stride}.from(0, run.start),
                     scores.from(0, run.column), false);
      multiply<Type>(count, run.count, units, grads,
                     Matrix{row.values_t.get(), sizes.key_stride}.from(0, run.start),
                     dscores.from(0, run.column), false);
    }
    float* sums = has_bias() ? scratch.dtiles[slot].get() : nullptr;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * sizes.score_stride;
      const Statistics row =
          exponentials<float>(scores.data + at, added ? added->get() + at : nullptr,
                              dscores.data + at, keys.total, call.scale);
      differentiate(scores.data + at, dscores.data + at, sums ? sums + at : nullptr, keys.total,
                    row);
    }
    const auto [weights, right, left] = operands(scores, dscores, count, keys.total);
    Matrix dqueries{scratch.out.take(sizes.block * dim), dim};
    if (keys.runs.empty()) std::memset(dqueries.data, 0, count * dim * sizeof(float));
    const int64_t depth = divide_up(count, Type::PAIR);
    for (const Run& run : keys.runs) {
      const KeyRow& row = this->packed(run.key_row);
      const auto sums_of = [&](const Buffer& x) {
        return Matrix{x.get(), sizes.key_stride}.from(0, run.start);
      };
      multiply<Type>(count, dim, run.count / Type::PAIR, left.from(0, run.column / Type::PAIR),
                     Matrix{row.keys.get(), dim}.from(run.start / Type::PAIR, 0), dqueries,
                     &run != &keys.runs[0]);
      multiply<Type>(dim, run.count, depth, queries_t, right.from(0, run.column),
                     sums_of(row.dkeys_t), true);
      multiply<Type>(dim, run.count, depth, grads_t, weights.from(0, run.column),
                     sums_of(row.dvalues_t), true);
    }
    for (int64_t i = 0; i < count; ++i)
      this->write_queries(call.dq, r, c, first, i, dqueries.from(i, 0).data, call.scale);
  }

 private:
  std::vector<Partial>& partial;
  float *dtable, *dglobal;

  struct Operands {
    Matrix weights, right, left;  // the gradient of the scores as right and as left operand
  };

  bool has_bias() const { return call.dtable || call.dto_global; }

  // Copy a block of queries to `rows`, and return its transpose (channels, queries).
  Matrix load(
      Tokens x, int64_t r, int64_t c, int64_t first, int64_t count, float* rows, Buffer& buffer) {
    this->copy_queries(x, r, c, first, count, rows);
    const int64_t pairs = divide_up(count, Type::PAIR);
    float* joined = rows;
    if constexpr (Type::PAIR == 2) {
      joined = scratch.tokens.take(std::max(pairs, sizes.key_stride) * call.dim);
      join_rows<Type>(rows, 2 * pairs, call.dim, joined);
    }
    Matrix result{buffer.take(call.dim * sizes.query_stride), sizes.query_stride};
    transpose({joined, call.dim}, pairs, call.dim, result);
    return result;
  }

  // Convert the weights and the gradient of the scores to operands. In bfloat16, the even rows of
  // their buffers then have pairs of rows.
  Operands operands(Matrix scores, Matrix dscores, int64_t count, int64_t total) {
    if constexpr (Type::PAIR == 1) {
      return {scores, dscores, dscores};
    } else {
      const int64_t stride = sizes.score_stride;
      Matrix left{scratch.rounded.take(sizes.block * stride / 2), stride / 2};
      for (int64_t i = 0; i < count; ++i)
        convert(dscores.from(i, 0).data, reinterpret_cast<uint16_t*>(left.from(i, 0).data), total);
      for (Matrix x : {scores, dscores})
        for (int64_t i = 0; i < count; i += 2)
          convert_pair(x.from(i, 0).data, i + 1 < count ? x.from(i + 1, 0).data : nullptr,
                       x.from(i, 0).data, total);
      return {{scores.data, 2 * stride}, {dscores.data, 2 * stride}, left};
    }
  }
};

}  // namespace vil
