// The forward pass: scores, softmax and weighted sum of the values, block by block.
#pragma once

#include "task.h"

namespace vil {

template <class Type>
class Forward : public Task<Type, Forward<Type>> {
 public:
  using Base = Task<Type, Forward<Type>>;
  using Base::Base, Base::call, Base::sizes, Base::scratch, Base::band;

  void pack(KeyRow& row) {
    const int64_t units = sizes.units, rows = row.count;
    float* keys_t = row.keys_t.take(units * sizes.key_stride);
    transpose({this->copy_keys(call.k, row), units}, rows, units, {keys_t, sizes.key_stride});
    float* values = row.values.take(sizes.key_stride * call.dim);
    join_rows<Type>(this->copy_keys(call.v, row), rows, call.dim, values);
  }

  void start(int64_t, int64_t) {}
  void flush(int64_t) {}
  void close(KeyRow&) {}

  void compute(
      int64_t r, int64_t c, const Keys& keys, int64_t first, int64_t count, Buffer* added,
      int64_t) {
    const int64_t dim = call.dim;
    Matrix queries{scratch.queries.take(sizes.block * sizes.units), sizes.units};
    Matrix scores{scratch.scores.take(sizes.block * sizes.score_stride), sizes.score_stride};
    Matrix out{scratch.out.take(sizes.block * dim), dim};
    this->copy_queries(call.q, r, c, first, count, queries.data);
    for (const Run& run : keys.runs) {
      Matrix keys_t{this->packed(run.key_row).keys_t.get(), sizes.key_stride};
      multiply<Type>(count, run.count, sizes.units, queries, keys_t.from(0, run.start),
                     scores.from(0, run.column), false);
    }
    scratch.statistics.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      float* row = scores.from(i, 0).data;
      const float* more = added ? added->get() + i * sizes.score_stride : nullptr;
      scratch.statistics[i] =
          exponentials<typename Type::Element>(row, more, nullptr, keys.total, call.scale);
    }
    if (keys.runs.empty()) std::memset(out.data, 0, count * dim * sizeof(float));
    for (const Run& run : keys.runs) {
      Matrix values{this->packed(run.key_row).values.get(), dim};
      multiply<Type>(count, dim, run.count / Type::PAIR, scores.from(0, run.column / Type::PAIR),
                     values.from(run.start / Type::PAIR, 0), out, &run != &keys.runs[0]);
    }
    for (int64_t i = 0; i < count; ++i)
      this->write_queries(call.out, r, c, first, i, out.from(i, 0).data,
                          scratch.statistics[i].inverse());
    if (call.lse) write_lse(r, c, first, count);
  }

 private:
  void write_lse(int64_t r, int64_t c, int64_t first, int64_t count) const {
    const int64_t length = call.grid[0] * call.grid[1];
    float* lse = call.lse + (band.image * call.heads + band.head) * length;
    for (int64_t i = 0; i < count; ++i)
      lse[this->query_token(r, c, first + i, this->columns[c].queries, call.size)] =
          scratch.statistics[i].lse();
  }
};

}  // namespace vil
