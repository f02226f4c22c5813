// Multiplication of bfloat16 matrices by AMX, the matrix unit of recent Intel CPUs.
//
// A tile register has up to 16 rows of 16 units. The formats of gemm.h are those of AMX: a unit is
// a pair of neighbors along K. Blocks of 2 x 2 tiles of C stay in registers. Each part of a matrix
// is computed with tiles of its size, so nothing beyond the operands is read or written.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace vil {

constexpr int TILE = 16;

// Return whether the system lets this process use the tiles. The system is asked only once.
inline bool has_amx() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool granted = !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
  return granted;
}

// The sizes of two tiles along each axis; the second may be 0.
struct TileSizes {
  int rows[2], columns[2], depth;

  bool operator==(const TileSizes& other) const {
    return !std::memcmp(this, &other, sizeof *this);
  }
};

// The sizes that this thread's tiles have now. Other libraries may use the tiles between two tasks.
inline TileSizes& current_sizes() {
  static thread_local TileSizes sizes{};
  return sizes;
}

inline void release_tiles() {
  if (!current_sizes().depth) return;
  _tile_release();
  current_sizes() = {};
}

// Tiles 0 to 3 are a block of C in row-major order, 4 and 5 its rows of A, 6 and 7 columns of B.
inline void configure(const TileSizes& sizes) {
  if (sizes == current_sizes()) return;
  current_sizes() = sizes;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const auto set = [&](int tile, int rows, int columns) {
    if (!rows || !columns) return;
    config.rows[tile] = rows;
    config.row_bytes[tile] = 4 * columns;
  };
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) set(2 * i + j, sizes.rows[i], sizes.columns[j]);
    set(4 + i, sizes.rows[i], sizes.depth);
    set(6 + i, sizes.depth, sizes.columns[i]);
  }
  _tile_loadconfig(&config);
}

// Compute C = A B, or C += A B if `add`, where `parts` tiles cover the depth.
template <bool TWO_ROWS, bool TWO_COLUMNS>
void multiply_tiles(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
    int64_t depth, int64_t parts, bool add) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  float* below = c + TILE * c_stride;
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (TWO_COLUMNS) _tile_loadd(1, c + TILE, c_bytes);
    if constexpr (TWO_ROWS) _tile_loadd(2, below, c_bytes);
    if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_loadd(3, below + TILE, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (TWO_COLUMNS) _tile_zero(1);
    if constexpr (TWO_ROWS) _tile_zero(2);
    if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_zero(3);
  }
  for (int64_t part = 0; part < parts; ++part, a += depth, b += depth * b_stride) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (TWO_COLUMNS) {
      _tile_loadd(7, b + TILE, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (TWO_ROWS) {
      _tile_loadd(5, a + TILE * a_stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (TWO_COLUMNS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (TWO_COLUMNS) _tile_stored(1, c + TILE, c_bytes);
  if constexpr (TWO_ROWS) _tile_stored(2, below, c_bytes);
  if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_stored(3, below + TILE, c_bytes);
}

// Return the size of the second of two tiles that cover `size`. If one tile is enough, it is not
// used, and the size is the one that most blocks have.
inline int second(int size) { return size == TILE ? TILE : std::max(size - TILE, 0); }

// Compute C = A B, or C += A B if `add`: A (rows, depth), B (depth, columns), C (rows, columns), in
// units of 32 bits. Blocks of the same size are computed one after another, because configuring
// another size of the tiles takes as long as a block.
inline void multiply_amx(
    int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_stride, const float* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add) {
  constexpr int64_t SIDE = 2 * TILE;  // of a block
  const int64_t tiles = (depth + TILE - 1) / TILE, size = (depth + tiles - 1) / tiles;
  // the depth is divided into `full` tiles of `size` units, and a tile of the rest
  const int64_t full = depth / size, rest = depth - full * size;
  const int64_t even_rows = rows / SIDE * SIDE, even_columns = columns / SIDE * SIDE;
  for (int64_t step = 0; step < 1 + (rest > 0); ++step) {
    const int64_t each = step ? rest : size, parts = step ? 1 : full, done = step * full * size;
    for (const bool edge_rows : {false, true})
      for (const bool edge_columns : {false, true}) {
        const int64_t top = edge_rows ? even_rows : 0, bottom = edge_rows ? rows : even_rows;
        const int64_t left = edge_columns ? even_columns : 0;
        const int64_t right = edge_columns ? columns : even_columns;
        if (top == bottom || left == right) continue;
        const int height = std::min(SIDE, bottom - top), width = std::min(SIDE, right - left);
        const bool two_rows = height > TILE, two_columns = width > TILE;
        configure({{std::min(TILE, height), second(height)},
                   {std::min(TILE, width), second(width)}, static_cast<int>(each)});
        const auto run = two_rows ? (two_columns ? multiply_tiles<true, true>
                                                 : multiply_tiles<true, false>)
                                  : (two_columns ? multiply_tiles<false, true>
                                                 : multiply_tiles<false, false>);
        for (int64_t j = left; j < right; j += SIDE)
          for (int64_t i = top; i < bottom; i += SIDE)
            run(a + i * a_stride + done, a_stride, b + done * b_stride + j, b_stride,
                c + i * c_stride + j, c_stride, each, parts, add || step);
      }
  }
}

}  // namespace vil

#else

namespace vil {

inline void release_tiles() {}

}  // namespace vil

#endif
