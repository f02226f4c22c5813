// Copy tokens in the order and the format that the matmuls need.
//
// A row of a token consists of units of 32 bits. A unit is a float, or two bfloat16 channels. The
// last bfloat16 channel may be padding.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "bias.h"

namespace vil {

constexpr int64_t KEPT_UNITS = 1 << 22;  // most memory that a thread keeps for the next call
constexpr int64_t STOCK_UNITS = 1 << 23;  // most memory of all its borrowed buffers

// Memory that grows when needed and is reused by later calls on the same thread: the first use of
// new memory takes as long as a multiplication.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) {
    data_ = std::move(other.data_);
    capacity_ = std::exchange(other.capacity_, 0);
    return *this;
  }
  float* take(int64_t units) {
    if (units > capacity_) {
      data_.reset();
      capacity_ = 0;
      const size_t bytes = pad(units * sizeof(float), 64);
      data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (!data_) throw std::bad_alloc();
      capacity_ = units;
    }
    return data_.get();
  }
  float* get() const { return data_.get(); }
  int64_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(float* x) const { std::free(x); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

// A buffer for one call. Its memory is from the thread's earlier calls, and later calls reuse it.
class BorrowedBuffer {
 public:
  BorrowedBuffer() = default;
  BorrowedBuffer(BorrowedBuffer&&) = default;
  ~BorrowedBuffer() {
    const int64_t units = buffer.capacity();
    if (!units || units > STOCK_UNITS) return;
    try {
      Stock& stock = own_stock();
      stock.buffers.push_back(std::move(buffer));
      for (stock.units += units; stock.units > STOCK_UNITS;) stock.remove(0);  // the oldest
    } catch (const std::bad_alloc&) {  // then it is freed
    }
  }

  // Return memory for `units` floats. Call it once.
  float* take(int64_t units) {
    Stock& stock = own_stock();
    for (size_t i = stock.buffers.size(); i-- > 0;)
      if (stock.buffers[i].capacity() >= units && stock.buffers[i].capacity() <= 2 * units) {
        buffer = stock.remove(i);
        break;
      }
    return buffer.take(units);
  }

 private:
  struct Stock {
    std::vector<Buffer> buffers;  // the oldest first
    int64_t units = 0;

    Buffer remove(size_t i) {
      Buffer buffer = std::move(buffers[i]);
      buffers.erase(buffers.begin() + i);
      units -= buffer.capacity();
      return buffer;
    }
  };

  static Stock& own_stock() {
    static thread_local Stock stock;
    return stock;
  }

  Buffer buffer;
};

// Transpose 8 x 8 elements.
inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m256 x[8], y[8];
  for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(in + i * in_stride);
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      const __m256 a = y[4 * i + j], b = y[4 * i + j + 2];
      x[4 * i + 2 * j] = _mm256_shuffle_ps(a, b, 0x44);
      x[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a, b, 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
}

// Write the transpose of the first rows and columns of `in`.
inline void transpose(Matrix in, int64_t rows, int64_t columns, Matrix out) {
  const int64_t even_rows = rows / 8 * 8, even_columns = columns / 8 * 8;
  for (int64_t i = 0; i < even_rows; i += 8)
    for (int64_t j = 0; j < even_columns; j += 8)
      transpose_square(in.from(i, j).data, in.stride, out.from(j, i).data, out.stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < even_rows ? even_columns : 0; j < columns; ++j)
      std::memcpy(out.from(j, i).data, in.from(i, j).data, sizeof(float));
}

template <class Type>
int64_t units_of(int64_t dim) { return divide_up(dim, Type::PAIR); }

template <class Type>
typename Type::Element* row_of(Tokens x, int64_t image, int64_t head, int64_t token) {
  return static_cast<typename Type::Element*>(x.data) + image * x.image + head * x.head +
         token * x.token;
}

// Copy a token's channels to units of 32 bits.
template <class Type>
void copy_token(const typename Type::Element* token, int64_t dim, float* out) {
  if (dim % Type::PAIR) {
    out[dim / Type::PAIR] = 0.0f;
    std::memcpy(out, token, dim * sizeof *token);
    return;
  }
  const auto* in = reinterpret_cast<const float*>(token);  // not memcpy, because rows are short
  const int64_t units = dim / Type::PAIR;
  int64_t j = 0;
  for (; j + LANES <= units; j += LANES) store(out + j, load(in + j));
  if (j < units) store(out + j, load(in + j, first_lanes(units - j)), first_lanes(units - j));
}

// Join rows in pairs: a unit of the result has the same channel of both rows. In float, only copy
// the rows. The number of rows is a multiple of PAIR. A row of the result has `dim` units.
template <class Type>
void join_rows(const float* rows, int64_t count, int64_t dim, float* out) {
  const int64_t units = units_of<Type>(dim);
  if constexpr (Type::PAIR == 1) {
    std::memcpy(out, rows, count * units * sizeof(float));
  } else {
    for (int64_t i = 0; i < count / 2; ++i) {
      const auto* first = reinterpret_cast<const uint16_t*>(rows + 2 * i * units);
      const auto* second = first + 2 * units;
      auto* pairs = reinterpret_cast<uint32_t*>(out + i * dim);
      for (int64_t d = 0; d < dim; ++d) pairs[d] = first[d] | uint32_t{second[d]} << 16;
    }
  }
}

// Write a row of floats, multiplied by `scale`, as a token.
inline void write_token(const float* row, int64_t dim, float scale, float* token) {
  for (int64_t d = 0; d < dim; ++d) token[d] = row[d] * scale;
}

inline void write_token(const float* row, int64_t dim, float scale, uint16_t* token) {
  for (int64_t d = 0; d < dim; ++d) {
    const float value = row[d] * scale;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    token[d] = value == value ? rounded : 0x7fc0;
  }
}

// Call visit(token, number) for each key in a row of chunks, or for each global token. `number` is
// the position of the token in the packed row. Return the length of the packed row.
template <class Visit>
int64_t each_key(
    const Call& call, int64_t key_row, int64_t rows, const std::vector<Line>& columns, int64_t unit,
    Visit visit) {
  if (key_row == GLOBAL) {
    for (int64_t i = 0; i < call.num_global; ++i) visit(i, i);
    return pad(call.num_global, unit);
  }
  const int64_t w = call.size, width = pad(rows * w, unit);
  int64_t end = 0;
  for (size_t chunk = 0; chunk < columns.size(); ++chunk) {
    const int64_t cols = columns[chunk].count[1];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        const int64_t token = (key_row * w + i) * call.grid[1] + chunk * w + j;
        visit(call.num_global + token, chunk * width + i * cols + j);
      }
    if (cols) end = chunk * width + pad(rows * cols, unit);
  }
  return end;
}

}  // namespace vil
