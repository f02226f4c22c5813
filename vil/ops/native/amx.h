// Multiplication of bfloat16 matrices by AMX, the matrix unit of recent Intel CPUs.
//
// A tile register has up to 16 rows of 16 units. The formats of gemm.h are those of AMX: a unit is
// a pair of neighbors along K. Blocks of 2 x 2 tiles of C stay in registers. All tiles of a matrix
// have the same size, because configuring another size takes as long as a block. The two tiles of a
// block may overlap; nothing beyond the operands is read or written.
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

struct TileSizes {  // of all tiles of C; depth: units of a tile of A or B
  int rows, columns, depth;

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
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile < 6 ? sizes.rows : sizes.depth;
    config.row_bytes[tile] = 4 * (tile == 4 || tile == 5 ? sizes.depth : sizes.columns);
  }
  _tile_loadconfig(&config);
}

// Blocks of one or two tiles that cover an axis of C.
struct Cover {
  int64_t size, blocks, tile;

  explicit Cover(int64_t size)
      : size(size), blocks(divide(size, 2 * TILE)),
        tile(complete() ? TILE : divide(divide(size, blocks), size > TILE ? 2 : 1)) {}
  bool complete() const { return size % TILE == 0; }
  int64_t start(int64_t block) const {
    return complete() ? std::min(2 * TILE * block, size) : block * size / blocks;
  }
  // Return the distance of the second tile of a block from its first one; 0 if it has one tile.
  int64_t step(int64_t block) const { return start(block + 1) - start(block) - tile; }
  static int64_t divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
};

// Compute a block of C = A B, or C += A B if `add`, where `parts` tiles cover the depth. down,
// right: the distances of the second tiles.
template <bool TWO_ROWS, bool TWO_COLUMNS>
void multiply_tiles(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
    int64_t down, int64_t right, int64_t depth, int64_t parts, bool add) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  float* below = c + down * c_stride;
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (TWO_COLUMNS) _tile_loadd(1, c + right, c_bytes);
    if constexpr (TWO_ROWS) _tile_loadd(2, below, c_bytes);
    if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_loadd(3, below + right, c_bytes);
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
      _tile_loadd(7, b + right, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (TWO_ROWS) {
      _tile_loadd(5, a + down * a_stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (TWO_COLUMNS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (TWO_COLUMNS) _tile_stored(1, c + right, c_bytes);
  if constexpr (TWO_ROWS) _tile_stored(2, below, c_bytes);
  if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_stored(3, below + right, c_bytes);
}

// Compute C = A B, or C += A B if `add`: A (rows, depth), B (depth, columns), C (rows, columns), in
// units of 32 bits. Tiles that overlap are in the same block, so each reads C before any is stored.
inline void multiply_amx(
    int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_stride, const float* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add) {
  const Cover down(rows), right(columns);
  // the depth is divided into `full` tiles of `each` units, and a tile of the rest
  const int64_t each = Cover::divide(depth, Cover::divide(depth, TILE)), full = depth / each;
  for (int64_t done = 0; done < depth; done += done ? depth : full * each) {
    const int64_t size = done ? depth - done : each, parts = done ? 1 : full;
    configure({static_cast<int>(down.tile), static_cast<int>(right.tile), static_cast<int>(size)});
    for (int64_t j = 0; j < right.blocks; ++j)
      for (int64_t i = 0; i < down.blocks; ++i) {
        const int64_t top = down.start(i), left = right.start(j);
        const int64_t below = down.step(i), beside = right.step(j);
        const auto run = below ? (beside ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                               : (beside ? multiply_tiles<false, true>
                                         : multiply_tiles<false, false>);
        run(a + top * a_stride + done, a_stride, b + done * b_stride + left, b_stride,
            c + top * c_stride + left, c_stride, below, beside, size, parts, add || done);
      }
  }
}

}  // namespace vil

#else

namespace vil {

inline void release_tiles() {}

}  // namespace vil

#endif
