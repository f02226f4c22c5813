// The call, and the keys that each chunk of queries attends to, in a window or a layout.
//
// The grid has chunks of w x w tokens. Only tokens inside the grid, and keys that are not padding,
// are computed. Along an axis, chunks with the same numbers of queries and keys are of one kind. In
// a window, chunks of the same kinds along both axes have the same tile, a matrix that is added to
// their scores.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "gemm.h"

namespace vil {

constexpr int64_t GLOBAL = -1;  // stands for the global tokens in place of a row of chunks

struct Tokens {  // (images, heads, tokens, channels), with adjacent channels
  void* data;
  int64_t image, head, token;  // distances, in elements
};

struct Call {  // as `AttentionCall` in vil/ops/backends/native.py
  Tokens q, k, v, out, dout, dq, dk, dv;
  const float* table;      // (heads, (2 reach[0] + 1) (2 reach[1] + 1)) or null
  const float* to_global;  // (heads, G) or null
  float *lse, *dtable, *dto_global;
  const int64_t* valid_hw;  // (images, 2) or null
  int64_t images, heads, grid[2], num_global, dim, size, exact, cyclic, num_offsets, offsets[18];
  int64_t bfloat16, threads, reach[2], span[2];  // span: the largest displacement of a key
  double scale;
  // The layout of a pattern. Its heads may differ. The key chunks of query chunk c of head h are
  // the elements from first[h * chunks + c] to first[h * chunks + c + 1] - 1 of `keys`.
  const int64_t *first, *keys, *key_masks;  // key_masks: index in `masks`, -1 for all visible
  const uint8_t* masks;  // (masks, w*w queries, mask_bytes), a bit for each of w*w keys
  int64_t layout_heads, mask_bytes;  // layout_heads: 0 for a window
  // The global tokens, which attend to all tokens. If q_global is null, they are not computed.
  Tokens q_global, out_global, dout_global, dq_global;
  const float* from_globals;  // (heads, G, G + 1) or null: toward global tokens, then local ones
  float* dfrom_globals;

  int64_t chunks(int axis) const { return divide_up(grid[axis], size); }
};

// A chunk along one axis of the grid. queries: its number of rows (or columns). key, count: the
// index of the key chunk at the steps -1, 0 and 1, and the number of rows (or columns) of its keys.
struct Line {
  int64_t queries, key[3], count[3], kind;
};

inline std::vector<Line> lines_of(const Call& call, int axis, int64_t image) {
  const int64_t chunks = call.chunks(axis), w = call.size;
  int64_t real = call.grid[axis], kinds = 0;
  if (call.valid_hw) real = std::min(real, call.valid_hw[2 * image + axis]);
  std::vector<Line> lines;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    Line line{std::min(w, call.grid[axis] - chunk * w), {}, {}, -1};
    for (int step = 0; step < 3; ++step) {
      int64_t key = chunk + step - 1;
      if (call.cyclic) key = (key + chunks) % chunks;
      line.key[step] = key;
      line.count[step] = key < 0 || key >= chunks ? 0 : std::min(w, real - key * w);
      line.count[step] = std::max<int64_t>(line.count[step], 0);
    }
    for (const Line& other : lines)
      if (line.queries == other.queries && !std::memcmp(line.count, other.count, sizeof line.count))
        line.kind = other.kind;
    if (line.kind < 0) line.kind = kinds++;
    lines.push_back(line);
  }
  return lines;
}

inline int64_t pad(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }

// A row stride that spreads a column over all sets of the cache.
inline int64_t odd_stride(int64_t count) { return divide_up(count, 16) / 2 * 32 + 16; }

struct Segment {  // the keys of one chunk, which begin at `column` of the scores
  int64_t down, across, rows, cols, count, column;  // down, across: the offset in tokens
  const uint8_t* mask;  // null: all visible
};

struct Run {  // adjacent keys in a packed row of chunks
  int64_t key_row, start, count, column;
};

// The keys that a chunk attends to, in the order of the columns of the scores.
struct Keys {
  std::vector<Segment> segments;
  std::vector<Run> runs;
  int64_t total = 0;
  bool masked = false;  // whether some columns are masked or padding

  // The keys of a chunk of a window. row, col: the chunk along both axes. The number of keys in
  // each chunk is padded to a multiple of `unit`.
  Keys(const Call& call, const Line& row, const Line& col, int64_t unit) : call(&call), unit(unit) {
    if (call.num_global) add_run(GLOBAL, 0, call.num_global);
    for (int64_t i = 0; i < call.num_offsets; ++i) {
      const int64_t down = call.offsets[2 * i], across = call.offsets[2 * i + 1];
      add_chunk(down, across, row.key[down + 1], col.key[across + 1], row.count[down + 1],
                col.count[across + 1], nullptr);
    }
  }

  // The keys of the chunk in row r and column c of a layout.
  Keys(const Call& call, const std::vector<Line>& lines, const std::vector<Line>& columns,
       int64_t head, int64_t r, int64_t c, int64_t unit)
      : call(&call), unit(unit) {
    if (call.num_global) add_run(GLOBAL, 0, call.num_global);
    const int64_t width = columns.size(), chunk = r * width + c;
    const int64_t of_head = call.layout_heads > 1 ? head * lines.size() * width : 0;
    for (int64_t i = call.first[of_head + chunk]; i < call.first[of_head + chunk + 1]; ++i) {
      const int64_t row = call.keys[i] / width, col = call.keys[i] % width;
      const int64_t mask_size = call.size * call.size * call.mask_bytes;
      add_chunk(row - r, col - c, row, col, lines[row].count[1], columns[col].count[1],
                call.key_masks[i] < 0 ? nullptr : call.masks + call.key_masks[i] * mask_size);
    }
  }

 private:
  const Call* call;
  int64_t unit;

  void add_chunk(
      int64_t down, int64_t across, int64_t key_row, int64_t key_col, int64_t rows, int64_t cols,
      const uint8_t* mask) {
    if (!rows || !cols) return;
    const int64_t column = total;
    add_run(key_row, key_col * pad(rows * call->size, unit), rows * cols);
    segments.push_back(
        {down * call->size, across * call->size, rows, cols, total - column, column, mask});
    masked |= mask != nullptr;
  }

  void add_run(int64_t key_row, int64_t start, int64_t keys) {
    const int64_t count = pad(keys, unit);
    masked |= count > keys;
    Run* last = runs.empty() ? nullptr : &runs.back();
    const bool adjacent = last && last->key_row == key_row && last->start + last->count == start;
    if (adjacent) last->count += count;
    else runs.push_back({key_row, start, count, total});
    total += count;
  }
};

}  // namespace vil
