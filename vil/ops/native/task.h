// A task of a forward or backward pass: one head of one image, or a band of its rows of chunks.
//
// For a window, a task computes the rows of chunks one by one, and keeps the keys of the neighbor
// rows in packed form. In each row, it computes the blocks of queries with the same tile one after
// another. For a layout, a task packs all rows of keys first, and computes chunks with equal tiles
// one after another.
#pragma once

#include <map>
#include <optional>

#include "pack.h"

namespace vil {

constexpr int64_t BLOCK_BYTES = 1 << 18;  // scores of a block, which fit into the level-2 cache
constexpr int64_t TILE_UNITS = 1 << 19;   // tiles that are kept for the next image

// A packed row of chunks, or the global tokens.
struct KeyRow {
  int64_t row = -2, count = 0;  // row: -2 if unused. count: keys, with padding
  int64_t visits = 0, all_visits = 0;  // by rows of queries: so far, in all tasks
  Buffer keys, keys_t, values, values_t;  // rows joined in pairs, and their transposes
  Buffer dkeys_t, dvalues_t;  // (channels, keys)
};

struct TileKey {  // identifies the tile in a buffer; the same for all images
  int64_t call = -1, head = 0, block = 0;
  int64_t row[4] = {}, column[4] = {};  // queries, and keys at each step
  bool operator==(const TileKey& other) const { return !std::memcmp(this, &other, sizeof *this); }
};

struct Scratch {  // memory of a thread, which is kept for its next call
  std::vector<KeyRow> key_rows;  // the global tokens, and rows of chunks
  Buffer rows, tokens, queries, queries_t, grads, grads_t;
  Buffer scores, dscores, rounded, out;
  std::vector<Buffer> tiles, dtiles;
  std::vector<TileKey> tile_keys;
  std::vector<Statistics> statistics;

  // Return whether the memory is too large to be kept.
  bool is_large() const {
    int64_t units = 0;
    for (const KeyRow& row : key_rows)
      for (const Buffer* x : {&row.keys, &row.keys_t, &row.values, &row.values_t, &row.dkeys_t,
                              &row.dvalues_t})
        units += x->capacity();
    for (const Buffer& tile : tiles) units += tile.capacity();
    for (const Buffer& tile : dtiles) units += tile.capacity();
    return units > KEPT_UNITS;
  }
};

struct Tile {  // the tile in use for a kind of columns
  int64_t kind = -1, block = -1, first = 0, count = 0, cols = 0;  // kind: of rows or chunks
  std::optional<Keys> keys;
};

struct Sizes {  // of a call, in units of 32 bits
  int64_t unit, units, queries, score_stride, key_stride, query_stride, block;
};

template <class Type>
Sizes sizes_of(const Call& call) {
  const int64_t queries = std::min(call.size, call.grid[0]) * std::min(call.size, call.grid[1]);
  const int64_t tile = pad(queries, Type::PAIR);
  Sizes sizes;
  sizes.queries = queries;  // of a chunk
  sizes.unit = Type::PAIR;
  sizes.units = units_of<Type>(call.dim);
  sizes.score_stride = odd_stride(pad(call.num_global, Type::PAIR) + call.num_offsets * tile);
  sizes.key_stride = odd_stride(std::max(call.chunks(1) * tile, pad(call.num_global, Type::PAIR)));
  const int64_t most = std::max<int64_t>(BLOCK_BYTES / 4 / sizes.score_stride, 8);
  sizes.block = pad(divide_up(queries, divide_up(queries, most)), 2);
  sizes.query_stride = odd_stride(sizes.block);
  return sizes;
}

struct Band {  // rows of chunks of a head of an image, or a part of their queries
  int64_t image, head, first, last;  // last: not included
  int64_t part = 0, parts = 1;       // of the blocks of queries of each chunk
};

// The state of one task. `Pass` derives from it and has pack(KeyRow&), start(slot, queries) and
// flush(slot) for the gradient of a tile, compute(..) for a block of queries, and close(KeyRow&)
// for a row of keys that this task does not need any more.
template <class Type, class Pass>
class Task {
 public:
  Task(const Call& call, const Bias& bias, const Sizes& sizes, Scratch& scratch, Band band)
      : call(call), bias(bias), sizes(sizes), scratch(scratch), band(band),
        lines(lines_of(call, 0, band.image)), columns(lines_of(call, 1, band.image)) {
    int64_t row_kinds = 0;
    for (const Line& line : lines) row_kinds = std::max(row_kinds, line.kind + 1);
    for (const Line& column : columns) num_kinds = std::max(num_kinds, column.kind + 1);
    const int64_t units = row_kinds * num_kinds * sizes.block * sizes.score_stride;
    keep_tiles = units <= TILE_UNITS && sizes.block >= sizes.queries;
    const size_t tiles = (keep_tiles ? row_kinds : 1) * num_kinds;
    scratch.tiles.resize(std::max(scratch.tiles.size(), tiles));
    scratch.tile_keys.resize(scratch.tiles.size());
    scratch.dtiles.resize(std::max<size_t>(scratch.dtiles.size(), num_kinds));
    held.resize(num_kinds);
    const size_t rows = 1 + (call.layout_heads ? lines.size() : 3);
    if (scratch.key_rows.size() < rows) scratch.key_rows.resize(rows);
    for (KeyRow& row : scratch.key_rows) row.row = -2;
  }

  void run() {
    if (call.num_global) load(scratch.key_rows[0], GLOBAL, call.num_global);
    call.layout_heads ? visit_layout() : visit_window();
    for (size_t slot = 0; slot < held.size(); ++slot) self().flush(slot);
    for (KeyRow& row : scratch.key_rows)
      if (row.row != -2) self().close(row);
  }

 protected:
  const Call& call;
  const Bias& bias;
  const Sizes& sizes;
  Scratch& scratch;
  const Band band;
  const std::vector<Line> lines, columns;
  int64_t num_kinds = 0;
  bool keep_tiles;  // of all kinds of rows, not only of the current row
  std::vector<Tile> held;

  Pass& self() { return static_cast<Pass&>(*this); }

  const KeyRow& packed(int64_t row) const {
    for (const KeyRow& held : scratch.key_rows)
      if (held.row == row) return held;
    std::abort();  // not reached: rows are packed before they are used
  }

  // Return a column of this kind. All of them have the same numbers of keys.
  const Line& column_of(int64_t kind) const {
    for (const Line& column : columns)
      if (column.kind == kind) return column;
    std::abort();
  }

  // Copy `count` queries of a chunk, beginning with query `first`, to rows that are joined in pairs
  // later.
  void copy_queries(
      Tokens x, int64_t r, int64_t c, int64_t first, int64_t count, float* out) const {
    const int64_t cols = columns[c].queries, w = call.size;
    for (int64_t i = 0; i < count; ++i)
      copy_token<Type>(
          row_of<Type>(x, band.image, band.head, query_token(r, c, first + i, cols, w)), call.dim,
          out + i * sizes.units);
    for (int64_t i = count; i < pad(count, Type::PAIR); ++i)
      std::memset(out + i * sizes.units, 0, sizes.units * sizeof(float));
  }

  void write_queries(
      Tokens x, int64_t r, int64_t c, int64_t first, int64_t i, const float* row,
      float scale) const {
    const int64_t token = query_token(r, c, first + i, columns[c].queries, call.size);
    write_token(row, call.dim, scale, row_of<Type>(x, band.image, band.head, token));
  }

  int64_t query_token(int64_t r, int64_t c, int64_t i, int64_t cols, int64_t w) const {
    return (r * w + i / cols) * call.grid[1] + c * w + i % cols;
  }

  // Copy the keys (or values) of a row of chunks to rows in scratch.rows. Rows without a key are 0.
  float* copy_keys(Tokens x, const KeyRow& row) {
    float* rows = scratch.rows.take(sizes.key_stride * sizes.units);
    std::memset(rows, 0, row.count * sizes.units * sizeof(float));
    each_key(call, row.row, real_rows(row.row), columns, sizes.unit, [&](int64_t token, int64_t i) {
      copy_token<Type>(row_of<Type>(x, band.image, band.head, token), call.dim,
                       rows + i * sizes.units);
    });
    return rows;
  }

  int64_t real_rows(int64_t row) const { return row == GLOBAL ? 1 : lines[row].count[1]; }

 private:
  void visit_window() {
    for (int64_t r = band.first; r < band.last; ++r) {
      const auto needed = rows_for(lines[r]);
      for (int64_t key_row : needed) hold(key_row, needed);
      for (int64_t kind = 0; kind < num_kinds; ++kind) visit(r, kind);
      for (KeyRow& row : scratch.key_rows)
        if (row.row == GLOBAL || contains(needed, row.row)) ++row.visits;
    }
  }

  // Return the distinct rows of keys that a row of chunks attends to.
  std::vector<int64_t> rows_for(const Line& line) const {
    std::vector<int64_t> needed;
    for (int64_t i = 0; i < call.num_offsets; ++i) {
      const int64_t step = call.offsets[2 * i] + 1;
      if (line.count[step] && !contains(needed, line.key[step])) needed.push_back(line.key[step]);
    }
    return needed;
  }

  static bool contains(const std::vector<int64_t>& rows, int64_t row) {
    return std::find(rows.begin(), rows.end(), row) != rows.end();
  }

  // Pack a row of keys, in the memory of a row that is not needed now.
  void hold(int64_t key_row, const std::vector<int64_t>& needed) {
    KeyRow* free = nullptr;
    for (int i = 1; i < 4; ++i) {
      KeyRow& row = scratch.key_rows[i];
      if (row.row == key_row) return;
      if (!contains(needed, row.row) && (!free || row.row == -2)) free = &row;
    }
    if (free->row != -2) self().close(*free);
    load(*free, key_row, 0);
    for (const Line& line : lines) free->all_visits += contains(rows_for(line), key_row);
  }

  void load(KeyRow& row, int64_t key_row, int64_t count) {
    row.row = key_row;
    row.visits = 0;
    row.all_visits = key_row == GLOBAL ? lines.size() : 0;
    row.count = pad(count, sizes.unit);
    if (key_row != GLOBAL)
      row.count = each_key(call, key_row, real_rows(key_row), columns, sizes.unit,
                           [](int64_t, int64_t) {});
    self().pack(row);
  }

  // Compute the chunks of row r whose column is of this kind.
  void visit(int64_t r, int64_t kind) {
    const int64_t cols = column_of(kind).queries, queries = lines[r].queries * cols;
    const Keys kind_keys(call, lines[r], column_of(kind), sizes.unit);
    const bool plain = bias.is_zero(kind_keys);
    for (int64_t block = band.part; block * sizes.block < queries; block += band.parts) {
      hold_tile(kind, lines[r].kind, block, queries, cols, kind_keys);
      const Tile& tile = held[kind];
      Buffer* added = plain ? nullptr : &tile_for(r, kind, kind_keys);
      for (size_t c = 0; c < columns.size(); ++c)
        if (columns[c].kind == kind)
          self().compute(r, c, Keys(call, lines[r], columns[c], sizes.unit), tile.first,
                         tile.count, added, kind);
    }
  }

  // Start a tile for a block of queries of a chunk, unless this tile is in use already. Return
  // whether the tile has to be filled.
  bool hold_tile(
      int64_t slot, int64_t kind, int64_t block, int64_t queries, int64_t cols, const Keys& keys) {
    if (held[slot].kind == kind && held[slot].block == block) return false;
    self().flush(slot);
    const int64_t first = block * sizes.block, count = std::min(sizes.block, queries - first);
    held[slot].keys.reset();
    held[slot] = {kind, block, first, count, cols};
    held[slot].keys.emplace(keys);
    self().start(slot, count);
    return true;
  }

  // Return the tile in use. It is filled only if no earlier row or image has filled it.
  Buffer& tile_for(int64_t r, int64_t kind, const Keys& keys) {
    const Tile& tile = held[kind];
    const int64_t at = kind + (keep_tiles ? tile.kind * num_kinds : 0);
    const Line &line = lines[r], &column = column_of(kind);
    const TileKey key{bias.number, band.head, tile.block,
                      {line.queries, line.count[0], line.count[1], line.count[2]},
                      {column.queries, column.count[0], column.count[1], column.count[2]}};
    if (!(scratch.tile_keys[at] == key)) {
      fill_tile(at, tile, keys);
      scratch.tile_keys[at] = key;
    }
    return scratch.tiles[at];
  }

  void fill_tile(int64_t at, const Tile& tile, const Keys& keys) {
    float* data = scratch.tiles[at].take(sizes.block * sizes.score_stride);
    bias.fill_tile({data, sizes.score_stride}, keys, band.head, tile.first, tile.count, tile.cols);
  }

  // Return the chunks of the band, grouped by their tile.
  std::map<std::vector<int64_t>, std::vector<int64_t>> chunks_by_tile() const {
    std::map<std::vector<int64_t>, std::vector<int64_t>> chunks;
    const int64_t width = columns.size();
    for (int64_t chunk = band.first * width; chunk < band.last * width; ++chunk) {
      const Line &line = lines[chunk / width], &column = columns[chunk % width];
      std::vector<int64_t> tile{line.queries, column.queries};
      for (const Segment& part : keys_of(chunk).segments)
        tile.insert(tile.end(), {part.down, part.across, part.rows, part.cols,
                                 reinterpret_cast<int64_t>(part.mask)});
      chunks[tile].push_back(chunk);
    }
    return chunks;
  }

  Keys keys_of(int64_t chunk) const {
    const int64_t width = columns.size();
    return {call, lines, columns, band.head, chunk / width, chunk % width, sizes.unit};
  }

  void visit_layout() {
    const auto groups = chunks_by_tile();
    const int64_t width = columns.size();
    std::vector<char> needed(lines.size(), band.first == 0);  // all rows in the first band: each row
    for (const auto& group : groups)                          // of gradients has to be written once
      for (int64_t chunk : group.second)
        for (const Run& run : keys_of(chunk).runs)
          if (run.key_row != GLOBAL) needed[run.key_row] = 1;
    for (size_t r = 0; r < lines.size(); ++r)
      if (needed[r]) load(scratch.key_rows[1 + r], r, 0);
    const bool complete = band.last - band.first == static_cast<int64_t>(lines.size());
    for (KeyRow& row : scratch.key_rows) row.visits = 0, row.all_visits = !complete;
    scratch.tile_keys[0] = {};
    int64_t kind = 0;
    for (const auto& [tile, chunks] : groups) {
      const int64_t r = chunks[0] / width, cols = columns[chunks[0] % width].queries;
      const int64_t queries = lines[r].queries * cols;
      const Keys keys = keys_of(chunks[0]);
      const bool plain = bias.is_zero(keys);
      for (int64_t block = 0; block * sizes.block < queries; ++block) {
        if (hold_tile(0, kind, block, queries, cols, keys) && !plain) fill_tile(0, held[0], keys);
        for (int64_t chunk : chunks)
          self().compute(chunk / width, chunk % width, keys_of(chunk), held[0].first,
                         held[0].count, plain ? nullptr : &scratch.tiles[0], 0);
      }
      ++kind;
    }
  }
};

}  // namespace vil
