// A linear layer for rows of tokens, optionally after a layer norm and before a residual
// connection: y = norm(x) W^T + b + residual.
//
// The weight is packed once per call, before or while it is read. A block of rows goes through all
// steps while it is in the cache. Each task sums the gradients of the weight and the bias over its
// rows.
#pragma once

#include <initializer_list>
#include <type_traits>
#include <vector>

#include "norm.h"
#include "panels.h"

namespace vil {

struct LinearCall {  // as in vil/ops/linear.py; all arrays are contiguous
  const void *x, *dy, *residual;  // (rows, inputs), (rows, outputs), null or (rows, outputs)
  void *y, *dx;                   // (rows, outputs), (rows, inputs); dx is null if not needed
  const float *gain, *shift;      // (inputs,) of the norm, or null
  const float *weight, *bias;     // (outputs, inputs) or packed, (outputs,); the bias may be null
  float *dgain, *dshift, *dweight, *dbias;  // null if not needed; those of the norm need dx
  int64_t rows, inputs, outputs, threads, packed;  // packed: whether the weight is packed
  // dtype of the operands of the matmul; of x and dx; of y, dy and residual
  int64_t compute_bfloat16, x_bfloat16, y_bfloat16;
  double eps;
};

constexpr int64_t LINEAR_UNITS = 32768;  // inputs or outputs of a block, whichever are more
constexpr int64_t MOST_TASKS = 64, FEWEST_TASKS = 4;  // if there are enough rows
constexpr int64_t MIN_ROWS = 128;  // limit of a block, because each block reads all weights
constexpr int64_t FEW_ROWS = 32;   // of a task, if the weights stay in the level-2 cache
constexpr int64_t LARGE_UNITS = 1 << 19;  // weights above this size do not stay there
constexpr int64_t MIN_BACKWARD_ROWS = 192;  // each block also writes the gradients of the weights
constexpr int64_t ROWS_PER_SUM = 768;  // of a backward task, whose sums are written and added
constexpr int64_t SUM_UNITS = 1 << 23;  // of all tasks

// Add `part` of all tasks. Write the `count` floats that begin at `first` to the same place of
// `out`.
template <class Sums>
void sum_tasks(
    const std::vector<Sums>& tasks, float* Sums::*part, int64_t first, int64_t count, float* out) {
  for (int64_t j = first; j < first + count; j += LANES) {
    Vector total = load(tasks[0].*part + j);
    for (size_t i = 1; i < tasks.size(); ++i) total = total + load(tasks[i].*part + j);
    store(out + j, total);
  }
}

// The memory of several sums.
class SumsMemory {
 public:
  void clear() { std::fill_n(memory, units, 0.0f); }

 protected:
  // Set each pointer to an array of its own, with as many floats as `sizes` says.
  void allocate(std::initializer_list<float**> parts, std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) units += size;
    float* next = memory = borrowed.take(units);
    const int64_t* size = sizes.begin();
    for (float** part : parts) *part = next, next += *size++;
  }

 private:
  BorrowedBuffer borrowed;
  float* memory = nullptr;
  int64_t units = 0;
};

// The tasks of a forward pass: ranges of rows, and parts of the features for each of them.
struct Division {
  int64_t tasks, parts;  // of the rows, of the features
  int64_t size;          // rows that go through all steps at a time

  // Return whether all rows go through at a time, so that each part of the weights is read once.
  bool is_one_block(int64_t rows) const { return tasks == 1 && rows <= size; }
};

// Divide `rows` rows about evenly. If they are few, or if the weights do not fit into the level-2
// cache, the features are divided too: a task then reads only a part of the weights. size: the
// largest number of rows of a block. units: of all weights.
inline Division divide(int64_t rows, int64_t features, int64_t units, int64_t size) {
  const int64_t least = units > LARGE_UNITS ? MIN_ROWS : FEW_ROWS;
  const int64_t few = std::clamp<int64_t>(rows / least, 1, FEWEST_TASKS);
  const int64_t tasks = std::clamp<int64_t>(rows / size, few, MOST_TASKS);
  const int64_t parts = std::min(divide_up(FEWEST_TASKS, tasks), divide_up(features, PANEL_WIDTH));
  const int64_t blocks = tasks * std::max<int64_t>(divide_up(rows, tasks * size), 1);
  return {tasks, parts, 2 * std::max<int64_t>(divide_up(rows, 2 * blocks), 1)};
}

// Call run(rows, part, task) for each part of each range of rows.
template <class Task, class Scratch, class Call, class Weights, class Run>
void run_forward(const Call& call, const Weights& weights, const Division& division, Run run) {
  const int64_t blocks = divide_up(call.rows, division.size), parts = division.parts;
  const int64_t tasks = std::min(blocks, division.tasks);
  parallel<Scratch>(tasks * parts, call.threads, [&](int64_t i, Scratch& scratch) {
    const int64_t first = i / parts * blocks / tasks * division.size;
    const int64_t last = (i / parts + 1) * blocks / tasks * division.size;
    Task task(call, weights, scratch, division.size);
    run(task, Range{first, std::min(call.rows, last)}, i % parts);
  });
}

// Run a backward pass over all rows, in tasks of complete blocks of `size` rows. Return the sums of
// each task. units: of the sums of a task.
template <class Task, class Scratch, class Sums, class Call, class Weights>
std::vector<Sums> run_backward(
    const Call& call, const Weights& weights, int64_t size, int64_t units) {
  const int64_t blocks = divide_up(call.rows, size);
  const int64_t most = std::max(std::min(MOST_TASKS, SUM_UNITS / units), FEWEST_TASKS);
  const int64_t wanted = std::clamp(call.rows / ROWS_PER_SUM, FEWEST_TASKS, most);
  const int64_t tasks = std::min(blocks, wanted);
  std::vector<Sums> sums;
  sums.reserve(tasks);
  for (int64_t i = 0; i < tasks; ++i) sums.emplace_back(call);
  parallel<Scratch>(tasks, call.threads, [&](int64_t i, Scratch& scratch) {
    const int64_t first = i * blocks / tasks * size;
    const int64_t last = std::min(call.rows, (i + 1) * blocks / tasks * size);
    sums[i].clear();
    Task(call, weights, scratch, size).backward(first, last, sums[i]);
  });
  return sums;
}

inline void add_row(float* to, const float* row, int64_t width) {
  for (int64_t j = 0; j < width; j += LANES) store(to + j, load(to + j) + load(row + j));
}

struct LinearScratch {  // memory of a thread
  Buffer x, dy, row, normed, product, operand, joined, turned, sums;
  std::vector<Moments> moments;

  bool is_large() const { return product.capacity() + joined.capacity() > KEPT_UNITS; }
};

// The gradients of the parameters in one task. Those that are not computed have no memory.
struct LinearSums : SumsMemory {
  float *dgain, *dshift, *dweight, *dbias;
  explicit LinearSums(const LinearCall& call) {
    const int64_t norm = call.dgain ? call.inputs : 0, bias = call.dbias ? call.outputs : 0;
    const int64_t weight = call.dweight ? call.outputs * call.inputs : 0;
    allocate({&dgain, &dshift, &dweight, &dbias}, {norm, norm, weight, bias});
  }
};

// Runs a pass for a range of rows, block by block. In: element type of x and dx. Out: of y and dy.
template <class Type, class In, class Out>
class LinearTask {
 public:
  LinearTask(
      const LinearCall& call, const Panels<Type>& weight, LinearScratch& scratch, int64_t rows)
      : call(call), weight(weight), scratch(scratch), rows(rows), inputs(call.inputs),
        outputs(call.outputs), widest(std::max(inputs, outputs)) {
    scratch.moments.resize(rows);
  }

  // Compute the outputs in `some` of a range of rows.
  void forward(Range range, Range some) {
    for (int64_t top = range.first; top < range.last; top += rows) {
      const int64_t count = std::min(rows, range.last - top);
      const Matrix x = inputs_from(top, count, false);
      for (int64_t left = some.first; left < some.last; left += PANEL_WIDTH)
        multiply_panel(top, count, x, {left, std::min(left + PANEL_WIDTH, some.last)});
    }
  }

  void backward(int64_t first, int64_t last, LinearSums& sums) {
    for (int64_t top = first; top < last; top += rows) {
      const int64_t count = std::min(rows, last - top), pairs = divide_up(count, Type::PAIR);
      const Out* grads = static_cast<const Out*>(call.dy) + top * outputs;
      // first the sums of a block, because the rounding error grows with the number of terms
      float* dbias = scratch.sums.take(outputs + 2 * inputs);
      float *dgain = dbias + outputs, *dshift = dgain + inputs;
      std::fill_n(dbias, outputs + 2 * inputs, 0.0f);
      for (int64_t i = 0; call.dbias && i < count; ++i)
        add_row(dbias, as_floats(grads + i * outputs, outputs), outputs);
      if (call.dbias) add_row(sums.dbias, dbias, outputs);
      const Matrix dy = operand(grads, count, outputs, scratch.dy);
      const Matrix x = inputs_from(top, count, true);
      if (call.dweight) {
        const Matrix left{scratch.turned.take(outputs * (rows + LANES)), rows + LANES};
        transpose({join(dy, outputs, pairs), outputs}, pairs, outputs, left);
        const Matrix right{join(x, inputs, pairs), inputs};
        multiply<Type>(outputs, inputs, pairs, left, right, {sums.dweight, inputs}, true);
      }
      if (!call.dx) continue;
      float* product = scratch.product.take(rows * widest);
      weight.multiply(count, dy, {product, inputs});
      for (int64_t i = 0; i < count; ++i, product += inputs) {
        if (call.gain)
          differentiate_norm(scratch.x.get() + i * inputs, product, inputs, scratch.moments[i],
                             call.gain, dgain, dshift);
        write_row(product, inputs, static_cast<In*>(call.dx) + (top + i) * inputs);
      }
      if (!call.gain) continue;
      add_row(sums.dgain, dgain, inputs);
      add_row(sums.dshift, dshift, inputs);
    }
  }

 private:
  const LinearCall& call;
  const Panels<Type>& weight;
  LinearScratch& scratch;
  const int64_t rows, inputs, outputs, widest;

  // Compute a panel of columns of the output.
  void multiply_panel(int64_t top, int64_t count, Matrix x, Range panel) {
    const int64_t width = panel.size(), at = top * outputs + panel.first;
    Out* y = static_cast<Out*>(call.y) + at;
    Matrix product;
    if constexpr (std::is_same_v<Out, float>) product = {y, outputs};
    else product = {scratch.product.take(rows * PANEL_WIDTH), width};
    weight.multiply(count, x, product, panel, {0, inputs / Type::PAIR});
    const float* bias = call.bias ? call.bias + panel.first : nullptr;
    const Out* residual = call.residual ? static_cast<const Out*>(call.residual) + at : nullptr;
    for (int64_t i = 0; i < count; ++i)
      write_sum(product.from(i, 0).data, bias, residual ? residual + i * outputs : nullptr, width,
                y + i * outputs);
  }

  // Return rows of x as an operand, normalized if the call has a norm. If `keep`, scratch.x then
  // has the rows.
  Matrix inputs_from(int64_t top, int64_t count, bool keep) {
    const In* in = static_cast<const In*>(call.x) + top * inputs;
    if (!call.gain) return operand(in, count, inputs, scratch.operand);
    float *x = scratch.x.take(rows * inputs), *normed = scratch.normed.take(inputs);
    return write_operand(count, inputs, scratch.operand, [&](int64_t i) {
      float* row = keep ? x + i * inputs : x;
      read_row(in + i * inputs, inputs, row);
      scratch.moments[i] = normalize(row, inputs, call.eps, call.gain, call.shift, normed);
      return normed;
    });
  }

  // Return rows as an operand, converted to the type if needed.
  template <class Element>
  Matrix operand(const Element* in, int64_t count, int64_t width, Buffer& buffer) {
    if constexpr (std::is_same_v<typename Type::Element, Element>)
      if (count % Type::PAIR == 0)
        return {const_cast<float*>(reinterpret_cast<const float*>(in)), width / Type::PAIR};
    return write_operand(count, width, buffer,
                         [&](int64_t i) { return as_floats(in + i * width, width); });
  }

  // Write the rows that row_at(i) returns as an operand. In bfloat16, an odd number of rows is
  // followed by a row of zeros.
  template <class RowAt>
  Matrix write_operand(int64_t count, int64_t width, Buffer& buffer, RowAt row_at) {
    const int64_t units = width / Type::PAIR;
    float* out = buffer.take((rows + 1) * units + LANES);
    for (int64_t i = 0; i < count; ++i)
      write_row(row_at(i), width, reinterpret_cast<typename Type::Element*>(out + i * units));
    if (count % Type::PAIR) std::memset(out + count * units, 0, units * sizeof(float));
    return {out, units};
  }

  const float* as_floats(const float* row, int64_t) { return row; }

#if defined(__AVX512BF16__)
  const float* as_floats(const uint16_t* row, int64_t width) {
    float* out = scratch.row.take(widest + LANES);
    read_row(row, width, out);
    return out;
  }
#endif

  // Return rows joined in pairs.
  float* join(Matrix in, int64_t width, int64_t pairs) {
    if constexpr (Type::PAIR == 1) return in.data;
    float* out = scratch.joined.take((rows / 2 + 1) * widest);
    join_rows<Type>(in.data, 2 * pairs, width, out);
    return out;
  }
};

// Pack a weight (outputs, inputs) to y, as the right-hand operand of the forward pass.
template <class Type>
void pack_linear(const LinearCall& call) {
  Panels<Type> weight;
  weight.use(static_cast<float*>(call.y), call.inputs, call.outputs);
  weight.pack_transposed(call.weight, call.outputs, call.inputs, call.threads);
}

template <class Type, class In, class Out>
void linear(const LinearCall& call, bool is_backward) {
  Panels<Type> weight;
  const int64_t inputs = call.inputs, outputs = call.outputs;
  const int64_t fitting = LINEAR_UNITS / std::max(inputs, outputs) / 2 * 2;
  const int64_t size = std::max(fitting, is_backward ? MIN_BACKWARD_ROWS : MIN_ROWS);
  using Task = LinearTask<Type, In, Out>;
  if (!is_backward) {
    const Division division = divide(call.rows, outputs, inputs * outputs, size);
    if (call.packed) weight.use(const_cast<float*>(call.weight), inputs, outputs);
    else if (division.is_one_block(call.rows)) weight.use_transposed(call.weight, outputs, inputs);
    else weight.pack_transposed(call.weight, outputs, inputs, call.threads);
    run_forward<Task, LinearScratch>(
        call, weight, division, [&](Task& task, Range rows, int64_t part) {
          task.forward(rows, part_of(outputs, part, division.parts));
        });
    return;
  }
  if (call.dx) weight.pack_rows(call.weight, outputs, inputs, call.threads);
  const auto sums = run_backward<Task, LinearScratch, LinearSums>(
      call, weight, size, inputs * outputs);
  if (sums.empty()) return;
  if (call.dgain) {
    sum_tasks(sums, &LinearSums::dgain, 0, call.inputs, call.dgain);
    sum_tasks(sums, &LinearSums::dshift, 0, call.inputs, call.dshift);
  }
  if (call.dbias) sum_tasks(sums, &LinearSums::dbias, 0, call.outputs, call.dbias);
  if (!call.dweight) return;
  parallel<PackScratch>(call.outputs, call.threads, [&](int64_t i, PackScratch&) {
    sum_tasks(sums, &LinearSums::dweight, i * call.inputs, call.inputs, call.dweight);
  });
}

}  // namespace vil
