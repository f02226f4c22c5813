// Weights as right-hand operands of multiplications, packed by several threads.
#pragma once

#include "pack.h"
#include "threads.h"

namespace vil {

constexpr int64_t PANEL_WIDTH = 64, PANEL_DEPTH = 128;  // columns, units: 32 KiB

inline Vector load_as(const float* x) { return load(x); }

// Copy a row of floats, or convert it from or to bfloat16.
inline void read_row(const float* row, int64_t count, float* out) {
  std::memcpy(out, row, count * sizeof(float));
}

inline void write_row(const float* row, int64_t count, float* out) {
  std::memcpy(out, row, count * sizeof(float));
}

#if defined(__AVX512BF16__)
inline Vector load_as(const uint16_t* x) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

inline void read_row(const uint16_t* row, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += LANES) store(out + j, load_as(row + j));
}

inline void write_row(const float* row, int64_t count, uint16_t* out) { convert(row, out, count); }
#endif

// Write the sum of a row, a bias and a residual. The bias and the residual may be null.
template <class Element>
void write_sum(
    const float* row, const float* bias, const Element* residual, int64_t count, Element* out) {
  for (int64_t j = 0; j < count; j += LANES) {
    Vector y = load(row + j);
    if (bias) y = y + load(bias + j);
    if (residual) y = y + load_as(residual + j);
    store_as(out + j, y);
  }
}

struct PackScratch {  // memory of a thread
  Buffer rounded, tile;
  bool is_large() const { return rounded.capacity() > KEPT_UNITS; }
};

struct Range {
  int64_t first, last;  // last: not included
  int64_t size() const { return last - first; }
};

// Return part `i` of `count` parts of columns. Each but the last has complete panels.
inline Range part_of(int64_t columns, int64_t i, int64_t count) {
  const int64_t panels = divide_up(columns, PANEL_WIDTH);
  return {i * panels / count * PANEL_WIDTH,
          std::min(columns, (i + 1) * panels / count * PANEL_WIDTH)};
}

// A right-hand operand B (depth, columns) of 32-bit units. It is stored as consecutive panels of
// columns, so that a part of a panel fits in the level-1 cache.
template <class Type>
class Panels {
 public:
  // Use memory that has, or will have, the packed transpose of a weight (outputs, inputs).
  void use(float* memory, int64_t inputs, int64_t outputs) {
    data = memory;
    resize(inputs / Type::PAIR, outputs);
  }

  // Use the transpose of a weight (outputs, inputs). Each multiplication packs what it reads, which
  // is faster than to pack all first if each panel is used once.
  void use_transposed(const float* weight, int64_t outputs, int64_t inputs) {
    source = weight;
    stride = inputs;
    depth = inputs / Type::PAIR;
    columns = outputs;
  }

  // Pack the transpose of a weight (outputs, inputs).
  void pack_transposed(const float* weight, int64_t outputs, int64_t inputs, int64_t threads) {
    resize(inputs / Type::PAIR, outputs);
    pack(threads, [&](int64_t first, int64_t width, float* panel, Buffer& rounded) {
      float* in = round(weight + first * inputs, inputs, width, inputs, rounded);
      transpose({in, depth}, width, depth, {panel, width});
    });
  }

  // Pack a weight (outputs, inputs) as it is.
  void pack_rows(const float* weight, int64_t outputs, int64_t inputs, int64_t threads) {
    resize(outputs / Type::PAIR, inputs);
    pack(threads, [&](int64_t first, int64_t width, float* panel, Buffer& rounded) {
      float* in = round(weight + first, inputs, outputs, width, rounded);
      join_rows<Type>(in, outputs, width, panel);
    });
  }

  // Compute C = A B for rows of A.
  void multiply(int64_t rows, Matrix a, Matrix c) const {
    multiply(rows, a, c, {0, columns}, {0, depth});
  }

  // Compute the columns of C in `some`, from the rows of B in `used`. C and A begin with them.
  void multiply(int64_t rows, Matrix a, Matrix c, Range some, Range used) const {
    for (int64_t first = some.first; first < some.last; first += PANEL_WIDTH) {
      const int64_t width = std::min(PANEL_WIDTH, columns - first);
      for (int64_t k = used.first; k < used.last; k += PANEL_DEPTH) {
        const int64_t count = std::min(PANEL_DEPTH, used.last - k);
        float* part = source ? pack_part(first, width, k, count) : data + first * depth + k * width;
        vil::multiply<Type>(rows, width, count, a.from(0, k - used.first), {part, width},
                            c.from(0, first - some.first), k > used.first);
      }
    }
  }

 private:
  const float* source = nullptr;  // the weight of `use_transposed`
  int64_t stride = 0;
  BorrowedBuffer own;
  float* data = nullptr;  // the memory of `own`, or the memory passed to `use`
  int64_t depth = 0, columns = 0;

  void resize(int64_t new_depth, int64_t new_columns) {
    depth = new_depth;
    columns = new_columns;
    if (!data) data = own.take(depth * columns);
  }

  // Pack `count` units of `width` columns in the memory of the thread.
  float* pack_part(int64_t first, int64_t width, int64_t unit, int64_t count) const {
    PackScratch& scratch = own_scratch<PackScratch>();
    float* out = scratch.tile.take(PANEL_DEPTH * PANEL_WIDTH);
    Matrix in{const_cast<float*>(source) + first * stride + unit * Type::PAIR, stride};
    if constexpr (Type::PAIR == 2)
      in = {round(in.data, stride, width, count * Type::PAIR, scratch.rounded), count};
    transpose(in, width, count, {out, width});
    return out;
  }

  template <class Pack>
  void pack(int64_t threads, Pack pack_panel) {
    const int64_t count = divide_up(columns, PANEL_WIDTH);
    parallel<PackScratch>(count, threads, [&](int64_t i, PackScratch& scratch) {
      const int64_t first = i * PANEL_WIDTH, width = std::min(PANEL_WIDTH, columns - first);
      pack_panel(first, width, data + first * depth, scratch.rounded);
    });
  }

  // Convert `count` rows of `width` elements to the type. Return the rows without gaps.
  static float* round(
      const float* weight, int64_t stride, int64_t count, int64_t width, Buffer& rounded) {
    const int64_t units = width / Type::PAIR;
    float* out = rounded.take(count * units + LANES);
    for (int64_t i = 0; i < count; ++i)
      write_row(weight + i * stride, width,
                reinterpret_cast<typename Type::Element*>(out + i * units));
    return out;
  }
};

}  // namespace vil
