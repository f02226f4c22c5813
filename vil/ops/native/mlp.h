// A layer norm, a linear layer, GELU and a linear layer, for rows of tokens.
//
// A block of rows goes through all layers, so that its hidden activations stay in the cache. The
// backward pass computes the hidden activations again, unless the forward pass has saved them.
// Weights are packed once per call, before or while they are read.
#pragma once

#include <vector>

#include "gelu.h"
#include "linear.h"

namespace vil {

struct MlpCall {  // as in vil/ops/mlp.py; x, dy, y and dx are contiguous
  const void *x, *dy;                                             // (rows, dim)
  void *y, *dx;                                                   // (rows, dim)
  const float *gain, *shift, *weight1, *bias1, *weight2, *bias2;  // weights: (outputs, inputs)
  float *dgain, *dshift, *dweight1, *dbias1, *dweight2, *dbias2;
  float* saved;  // (rows, hidden), outputs of the first linear layer without its bias, or null
  // residual: whether x is added to y; packed: whether the weights are packed
  int64_t rows, dim, hidden, residual, threads, packed;
  int64_t compute_bfloat16, tokens_bfloat16;  // dtype of the operands of matmuls; of x, dy, y, dx
  double eps;
};

constexpr int64_t HIDDEN_UNITS = 49152;  // hidden activations of a block

// The weights of a call as right-hand operands. `first` and `second` are transposed. `first_rows`
// and `second_rows`, for the backward pass, are not.
template <class Type>
struct MlpWeights {
  Panels<Type> first, second, first_rows, second_rows;

  // For the forward pass. once: whether each part of the weights is read once.
  MlpWeights(const MlpCall& call, bool once) {
    if (call.packed) {
      first.use(const_cast<float*>(call.weight1), call.dim, call.hidden);
      second.use(const_cast<float*>(call.weight2), call.hidden, call.dim);
    } else if (once) {
      first.use_transposed(call.weight1, call.hidden, call.dim);
      second.use_transposed(call.weight2, call.dim, call.hidden);
    } else {
      first.pack_transposed(call.weight1, call.hidden, call.dim, call.threads);
      second.pack_transposed(call.weight2, call.dim, call.hidden, call.threads);
    }
  }

  // For the backward pass.
  explicit MlpWeights(const MlpCall& call) {
    if (!call.saved) first.pack_transposed(call.weight1, call.hidden, call.dim, call.threads);
    first_rows.pack_rows(call.weight1, call.hidden, call.dim, call.threads);
    second_rows.pack_rows(call.weight2, call.dim, call.hidden, call.threads);
  }
};

struct MlpScratch {  // memory of a thread
  Buffer normed, x, dy, hidden, dhidden, rounded, joined, normed_t, dy_t, out;
  std::vector<Moments> moments;

  bool is_large() const { return hidden.capacity() + dhidden.capacity() > KEPT_UNITS; }
};

// The gradients of the weights in one task. dweight1 is transposed.
struct MlpSums : SumsMemory {
  float *dweight1, *dweight2, *dbias1, *dbias2, *dgain, *dshift;
  explicit MlpSums(const MlpCall& call) {
    const int64_t dim = call.dim, hidden = call.hidden, weight = dim * hidden;
    allocate({&dweight1, &dweight2, &dbias1, &dbias2, &dgain, &dshift},
           {weight, weight, hidden, dim, dim, dim});
  }
};

// Runs a pass for a range of rows, block by block.
template <class Type, class Element>
class MlpTask {
 public:
  MlpTask(const MlpCall& call, const MlpWeights<Type>& weights, MlpScratch& scratch, int64_t rows)
      : call(call), weights(weights), scratch(scratch), dim(call.dim), hidden(call.hidden),
        units(call.dim / Type::PAIR), rows(rows) {
    scratch.moments.resize(rows);
  }

  // Compute a range of rows with the hidden channels in `some`. If these are not all, write a part
  // of the sum of the second layer to `partial` (rows of the call, dim) instead of the output.
  void forward(Range range, Range some, float* partial) {
    const Range used{some.first / Type::PAIR, some.last / Type::PAIR};
    for (int64_t top = range.first; top < range.last; top += rows) {
      const int64_t count = std::min(rows, range.last - top);
      const Matrix normed = normed_rows(top, count, false);
      const Matrix inner{scratch.hidden.take(rows * wide + LANES), wide / Type::PAIR};
      for (int64_t left = some.first; left < some.last; left += PANEL_WIDTH) {
        const Range panel{left, std::min(left + PANEL_WIDTH, some.last)};
        activate(top, count, normed, panel, inner.from(0, (left - some.first) / Type::PAIR));
      }
      float* out = partial ? partial + top * dim : scratch.out.take(rows * dim);
      weights.second.multiply(count, inner, {out, dim}, {0, dim}, used);
      for (int64_t i = 0; !partial && i < count; ++i) write_output(top + i, out + i * dim);
    }
  }

  // Write a row of the output. sum: the product with the weight of the second layer.
  void write_output(int64_t row, const float* sum) {
    const Element* x = static_cast<const Element*>(call.x) + row * dim;
    write_sum(sum, call.bias2, call.residual ? x : nullptr, dim,
              static_cast<Element*>(call.y) + row * dim);
  }

  void backward(int64_t first, int64_t last, MlpSums& sums) {
    for (int64_t top = first; top < last; top += rows) {
      const int64_t count = std::min(rows, last - top), pairs = divide_up(count, Type::PAIR);
      Matrix inner = hidden_rows(top, count);
      Matrix grads{scratch.dhidden.take(rows * wide + LANES), wide};
      Matrix dy{copy_gradients(top, count), units};
      weights.second_rows.multiply(count, dy, grads);
      differentiate_gelu(top, inner, grads, count, sums);
      Matrix left = grads, dnormed{scratch.out.take(rows * dim), dim};
      if constexpr (Type::PAIR == 2) {
        left = {scratch.rounded.take(rows * hidden / 2 + LANES), hidden / 2};
        for (int64_t i = 0; i < count; ++i)
          convert(grads.from(i, 0).data, reinterpret_cast<uint16_t*>(left.from(i, 0).data), hidden);
        for (Matrix* x : {&inner, &grads}) {
          for (int64_t i = 0; i < count; i += 2)
            convert_pair(x->from(i, 0).data, i + 1 < count ? x->from(i + 1, 0).data : nullptr,
                         x->from(i, 0).data, hidden);
          x->stride = 2 * wide;
        }
      }
      weights.first_rows.multiply(count, left, dnormed);
      Matrix normed_t = turned(scratch.normed.get(), pairs, scratch.normed_t);
      multiply<Type>(dim, hidden, pairs, normed_t, grads, {sums.dweight1, hidden}, true);
      Matrix dy_t = turned(dy.data, pairs, scratch.dy_t);
      multiply<Type>(dim, hidden, pairs, dy_t, inner, {sums.dweight2, hidden}, true);
      differentiate_norm(top, count, dnormed, sums);
    }
  }

 private:
  const MlpCall& call;
  const MlpWeights<Type>& weights;
  MlpScratch& scratch;
  const int64_t dim, hidden, units, rows;
  const int64_t wide = hidden + LANES;  // row stride, so that rows do not share cache sets

  float* saved_row(int64_t row) const { return call.saved + row * hidden; }

  // Return normalized rows as an operand. If `keep`, scratch.x then has the rows.
  Matrix normed_rows(int64_t top, int64_t count, bool keep) {
    float* normed = scratch.normed.take((rows + 1) * units + LANES);
    float* x = scratch.x.take(rows * dim);
    for (int64_t i = 0; i < count; ++i) {
      float* row = keep ? x + i * dim : x;
      read_row(static_cast<const Element*>(call.x) + (top + i) * dim, dim, row);
      normalize(i, row, reinterpret_cast<typename Type::Element*>(normed + i * units));
    }
    if (count % Type::PAIR) std::memset(normed + count * units, 0, units * sizeof(float));
    return {normed, units};
  }

  // Write the hidden activations of a panel to `out`, as an operand. The outputs of the first layer
  // stay in the level-1 cache.
  void activate(int64_t top, int64_t count, Matrix normed, Range panel, Matrix out) {
    const int64_t width = panel.size();
    const Matrix product{scratch.dhidden.take(rows * PANEL_WIDTH), PANEL_WIDTH};
    weights.first.multiply(count, normed, product, panel, {0, units});
    for (int64_t i = 0; i < count; ++i) {
      const float* row = product.from(i, 0).data;
      if (call.saved)
        std::memcpy(saved_row(top + i) + panel.first, row, width * sizeof(float));
      auto* to = reinterpret_cast<typename Type::Element*>(out.from(i, 0).data);
      for (int64_t j = 0; j < width; j += LANES)
        store_as(to + j, Gelu<Type>(load(row + j) + load(call.bias1 + panel.first + j)).value());
    }
  }

  // Return the outputs of the first linear layer without its bias or, if the forward pass has saved
  // them, uninitialized memory for them.
  Matrix hidden_rows(int64_t top, int64_t count) {
    const Matrix normed = normed_rows(top, count, true);
    const Matrix out{scratch.hidden.take(rows * wide + LANES), wide};
    if (!call.saved) weights.first.multiply(count, normed, out);
    return out;
  }

  void normalize(int64_t i, const float* row, typename Type::Element* out) {
    float* normed = scratch.joined.take(rows * dim + 2 * dim);
    scratch.moments[i] = vil::normalize(row, dim, call.eps, call.gain, call.shift, normed);
    write_row(normed, dim, out);
  }

  // Copy rows of the gradient of the output, as an operand.
  float* copy_gradients(int64_t top, int64_t count) {
    float* out = scratch.dy.take((rows + 1) * units + LANES);
    float* row = scratch.joined.take(rows * dim + 2 * dim);
    for (int64_t i = 0; i < count; ++i) {
      read_row(static_cast<const Element*>(call.dy) + (top + i) * dim, dim, row);
      write_row(row, dim, reinterpret_cast<typename Type::Element*>(out + i * units));
    }
    if (count % Type::PAIR) std::memset(out + count * units, 0, units * sizeof(float));
    return out;
  }

  // Replace hidden activations by their GELU, and the gradients of the GELU by those of its inputs.
  void differentiate_gelu(
      int64_t top, Matrix inner, Matrix grads, int64_t count, MlpSums& sums) {
    for (int64_t i = 0; i < count; ++i) {
      float *row = inner.from(i, 0).data, *grad = grads.from(i, 0).data;
      const float* before = call.saved ? saved_row(top + i) : row;
      for (int64_t j = 0; j < hidden; j += LANES) {
        const Vector x = load(before + j) + load(call.bias1 + j);
        const Gelu<Type> gelu(x);
        const Vector dx = load(grad + j) * gelu.slope();
        store(row + j, gelu.value());
        store(grad + j, dx);
        float* total = sums.dbias1 + j;
        store(total, load(total) + dx);
      }
    }
  }

  // Return the transpose (dim, pairs) of rows that are joined in pairs.
  Matrix turned(float* x, int64_t pairs, Buffer& buffer) {
    float* joined = x;
    if constexpr (Type::PAIR == 2) {
      joined = scratch.joined.take(rows * dim + 2 * dim);
      join_rows<Type>(x, 2 * pairs, dim, joined);
    }
    Matrix out{buffer.take(dim * rows), rows};
    transpose({joined, dim}, pairs, dim, out);
    return out;
  }

  void differentiate_norm(int64_t top, int64_t count, Matrix dnormed, MlpSums& sums) {
    float* dy = scratch.joined.take(rows * dim + 2 * dim);
    for (int64_t i = 0; i < count; ++i) {
      float *x = scratch.x.get() + i * dim, *grad = dnormed.from(i, 0).data;
      read_row(static_cast<const Element*>(call.dy) + (top + i) * dim, dim, dy);
      vil::differentiate_norm(x, grad, dim, scratch.moments[i], call.gain, sums.dgain,
                              sums.dshift);
      add_row(sums.dbias2, dy, dim);
      if (call.residual) add_row(grad, dy, dim);
      write_row(grad, dim, static_cast<Element*>(call.dx) + (top + i) * dim);
    }
  }
};

// Return how many rows go through all layers at a time. Large weights do not fit into the level-2
// cache, so a block then has more rows.
inline int64_t block_rows(const MlpCall& call, bool backward) {
  const bool large = 2 * call.dim * call.hidden > LARGE_UNITS;
  const int64_t least = backward ? MIN_BACKWARD_ROWS : large ? MIN_ROWS : MIN_ROWS / 2;
  return std::max(HIDDEN_UNITS / call.hidden / 2 * 2, least);
}

// Write the sums of all tasks as gradients.
inline void sum_gradients(const MlpCall& call, std::vector<MlpSums>& tasks) {
  parallel<PackScratch>(call.dim / LANES, call.threads, [&](int64_t band, PackScratch&) {
    const int64_t row = band * LANES, first = row * call.hidden, count = LANES * call.hidden;
    float* turned = tasks[0].dweight1;
    sum_tasks(tasks, &MlpSums::dweight1, first, count, turned);
    transpose({turned + first, call.hidden}, LANES, call.hidden, {call.dweight1 + row, call.dim});
    sum_tasks(tasks, &MlpSums::dweight2, first, count, call.dweight2);
  });
  sum_tasks(tasks, &MlpSums::dbias1, 0, call.hidden, call.dbias1);
  sum_tasks(tasks, &MlpSums::dbias2, 0, call.dim, call.dbias2);
  sum_tasks(tasks, &MlpSums::dgain, 0, call.dim, call.dgain);
  sum_tasks(tasks, &MlpSums::dshift, 0, call.dim, call.dshift);
}

template <class Type, class Element>
void mlp(const MlpCall& call, bool is_backward) {
  const int64_t size = block_rows(call, is_backward), dim = call.dim, hidden = call.hidden;
  using Task = MlpTask<Type, Element>;
  if (is_backward) {
    const MlpWeights<Type> weights(call);
    auto sums = run_backward<Task, MlpScratch, MlpSums>(call, weights, size, 2 * dim * hidden);
    if (!sums.empty()) sum_gradients(call, sums);
    return;
  }
  const Division division = divide(call.rows, hidden, 2 * dim * hidden, size);
  const MlpWeights<Type> weights(call, division.is_one_block(call.rows));
  const int64_t units = call.rows * dim, parts = division.parts;
  BorrowedBuffer borrowed;
  float* partial = parts > 1 ? borrowed.take(parts * units) : nullptr;
  run_forward<Task, MlpScratch>(call, weights, division, [&](Task& task, Range rows, int64_t part) {
    task.forward(rows, part_of(hidden, part, parts), partial ? partial + part * units : nullptr);
  });
  if (parts == 1 || !call.rows) return;
  const int64_t tasks = std::min(call.rows, FEWEST_TASKS);
  const Division whole{tasks, 1, divide_up(call.rows, tasks)};
  run_forward<Task, MlpScratch>(call, weights, whole, [&](Task& task, Range rows, int64_t) {
    for (int64_t row = rows.first; row < rows.last; ++row) {
      float* sum = partial + row * dim;
      for (int64_t part = 1; part < parts; ++part) add_row(sum, sum + part * units, dim);
      task.write_output(row, sum);
    }
  });
}

}  // namespace vil
