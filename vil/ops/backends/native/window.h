// The call, the keys that each chunk of queries attends to, and the bias and mask of their scores.
//
// The grid has chunks of w x w tokens. Only tokens inside the grid, and keys that are not padding,
// are computed. Along an axis, chunks with equally many queries and keys are of one kind. Chunks of
// equal kinds along both axes have the same tile: what is added to their scores.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "gemm.h"
#include "softmax.h"

namespace vil {

constexpr int64_t GLOBAL = -1;  // instead of a row of chunks, for the global tokens

struct Tokens {  // (images, heads, tokens, channels), with adjacent channels
  void* data;
  int64_t image, head, token;  // distances, in elements
};

struct Call {  // as in library.py
  Tokens q, k, v, out, dout, dq, dk, dv;
  const float* table;      // (heads, (4w-1)^2) or null
  const float* to_global;  // (heads, G) or null
  float *lse, *dtable, *dto_global;
  const int64_t* valid_hw;  // (images, 2) or null
  int64_t images, heads, grid[2], num_global, dim, size, exact, cyclic, num_offsets, offsets[18];
  int64_t bfloat16, threads;
  double scale;
  int64_t side() const { return 4 * size - 1; }  // of the bias table
  int64_t chunks(int axis) const { return divide_up(grid[axis], size); }
};

// The chunk's queries and its keys at the steps -1, 0 and 1 along an axis, in lines of the grid.
struct Line {
  int64_t queries, key[3], count[3], kind;  // key: number of the chunk
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

struct Segment {  // the keys of one chunk, from `column` of the scores on
  int64_t down, across, rows, cols, count, column;  // down, across: the offset in tokens
};

struct Run {  // adjacent keys in a packed row of chunks
  int64_t key_row, start, count, column;
};

// The keys that a chunk attends to, in the order of the scores' columns.
struct Keys {
  Segment segments[9];
  Run runs[10];
  int num_segments = 0, num_runs = 0;
  int64_t total = 0;
  bool padded = false;  // some columns are no keys

  // unit: numbers of keys are padded to multiples of it.
  Keys(const Call& call, const Line& row, const Line& col, int64_t unit) {
    if (call.num_global) add_run(GLOBAL, 0, call.num_global, unit);
    for (int64_t i = 0; i < call.num_offsets; ++i) {
      const int64_t down = call.offsets[2 * i], across = call.offsets[2 * i + 1];
      const int64_t rows = row.count[down + 1], cols = col.count[across + 1], column = total;
      if (!rows || !cols) continue;
      const int64_t start = col.key[across + 1] * pad(rows * call.size, unit);
      add_run(row.key[down + 1], start, rows * cols, unit);
      segments[num_segments++] = {down * call.size, across * call.size, rows,
                                  cols, total - column, column};
    }
  }

 private:
  void add_run(int64_t key_row, int64_t start, int64_t keys, int64_t unit) {
    const int64_t count = pad(keys, unit);
    padded |= count > keys;
    Run* last = num_runs ? runs + num_runs - 1 : nullptr;
    const bool adjacent = last && last->key_row == key_row && last->start + last->count == start;
    if (adjacent) last->count += count;
    else runs[num_runs++] = {key_row, start, count, total};
    total += count;
  }
};

// What is added to scores by the displacement of key from query: the bias, and -infinity outside
// the exact window. The tables are turned by 180 degrees, so that keys side by side are adjacent.
struct Bias {
  const Call& call;
  std::vector<float> tables;
  const bool by_head;
  const int64_t number;  // of the call in this process

  explicit Bias(const Call& call) : call(call), by_head(call.table), number(next_number()) {
    const int64_t side = call.side(), entries = side * side;
    if (!call.table && !call.exact) return;
    tables.assign((by_head ? call.heads : 1) * entries, 0.0f);
    for (size_t i = 0; by_head && i < tables.size(); ++i)
      tables[i] = call.table[i / entries * entries + entries - 1 - i % entries];
    for (size_t i = 0; call.exact && i < tables.size(); ++i) {
      const int64_t middle = 2 * call.size - 1, entry = i % entries;
      const int64_t down = entry / side - middle, across = entry % side - middle;
      if (std::max(std::abs(down), std::abs(across)) > call.size) tables[i] = -INFINITE;
    }
  }

  static int64_t next_number() {
    static std::atomic<int64_t> numbers{0};
    return numbers++;
  }

  const float* table(int64_t head) const {
    const int64_t entries = call.side() * call.side();
    return tables.empty() ? nullptr : tables.data() + (by_head ? head * entries : 0);
  }

  // Whether nothing is added to the scores of these keys.
  bool is_zero(const Keys& keys) const {
    return tables.empty() && !call.to_global && !keys.padded;
  }

  // Call visit(i, column, entry) for each row of keys of each segment and each of the queries from
  // `first` on: its keys have the columns from `column` on, and the table's entries from `entry`.
  template <class Visit>
  void each_row(const Keys& keys, int64_t first, int64_t count, int64_t cols, Visit visit) const {
    const int64_t side = call.side(), middle = 2 * call.size - 1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t x = (first + i) / cols, y = (first + i) % cols;
      for (int s = 0; s < keys.num_segments; ++s) {
        const Segment& part = keys.segments[s];
        const int64_t corner = (part.down - x + middle) * side + part.across - y + middle;
        for (int64_t row = 0; row < part.rows; ++row)
          visit(i, part.column + row * part.cols, corner + row * side, part.cols);
      }
    }
  }

  // Fill a tile: a row for each of `count` queries from `first` on, of a chunk with `cols` columns.
  void fill_tile(
      Matrix tile, const Keys& keys, int64_t head, int64_t first, int64_t count,
      int64_t cols) const {
    const float* entries = table(head);
    const float* global = call.to_global ? call.to_global + head * call.num_global : nullptr;
    const int64_t start = keys.num_segments ? keys.segments[0].column : keys.total;
    for (int64_t i = 0; i < count; ++i) {
      float* row = tile.data + i * tile.stride;
      for (int64_t g = 0; g < start; ++g)
        row[g] = g >= call.num_global ? -INFINITE : global ? global[g] : 0.0f;
      for (int s = 0; s < keys.num_segments; ++s) {
        const Segment& part = keys.segments[s];
        for (int64_t j = part.rows * part.cols; j < part.count; ++j)
          row[part.column + j] = -INFINITE;
      }
    }
    each_row(keys, first, count, cols, [&](int64_t i, int64_t column, int64_t entry, int64_t size) {
      float* out = tile.data + i * tile.stride + column;
      for (int64_t j = 0; j < size; j += LANES) {  // rows are short: no loop over their entries
        const Lanes lanes = first_lanes(std::min<int64_t>(size - j, LANES));
        store(out + j, entries ? load(entries + entry + j, lanes) : fill(0.0f), lanes);
      }
    });
  }

  // Add the gradient of a tile to those of the turned table and of the bias toward global tokens.
  void add_gradient(
      Matrix tile, const Keys& keys, int64_t first, int64_t count, int64_t cols,
      float* dtable, float* dglobal) const {
    if (call.dto_global)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t g = 0; g < call.num_global; ++g) dglobal[g] += tile.data[i * tile.stride + g];
    if (!call.dtable) return;
    each_row(keys, first, count, cols, [&](int64_t i, int64_t column, int64_t entry, int64_t size) {
      const float* in = tile.data + i * tile.stride + column;
      for (int64_t j = 0; j < size; ++j) dtable[entry + j] += in[j];
    });
  }
};

}  // namespace vil
