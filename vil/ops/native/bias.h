// The bias and the mask of the scores of a chunk, and the gradient of the bias.
#pragma once

#include <atomic>
#include <vector>

#include "softmax.h"
#include "window.h"

namespace vil {

// Return the lanes whose bit is set in `bits`.
#if defined(__AVX512F__)
inline Lanes lanes_of(uint32_t bits) { return static_cast<Lanes>(bits); }
#else
inline Lanes lanes_of(uint32_t bits) {
  const __m256i single = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), single), single);
}
#endif

// Return at least LANES bits, beginning with bit `at`.
inline uint32_t bits_from(const uint8_t* bytes, int64_t at) {
  uint32_t word;
  std::memcpy(&word, bytes + at / 8, sizeof word);
  return word >> at % 8;
}

// Tables of the values that are added to scores: the bias, and -infinity outside the exact window.
// A table has an entry for each displacement of a key from a query. Displacements that are not in
// the call's table use its outermost entries. The tables are rotated by 180 degrees relative to the
// call's table, so that entries of adjacent keys are adjacent.
struct Bias {
  const Call& call;
  const int64_t side, entries;  // entries in a row of a table, and in a table
  std::vector<float> tables;
  const bool by_head;
  const int64_t number;  // of the call in this process

  explicit Bias(const Call& call)
      : call(call), side(2 * call.span[1] + 1), entries((2 * call.span[0] + 1) * side),
        by_head(call.table), number(next_number()) {
    if (!call.table && !call.exact) return;
    tables.assign((by_head ? call.heads : 1) * entries, 0.0f);
    for (size_t i = 0; by_head && i < tables.size(); ++i)
      tables[i] = call.table[i / entries * table_entries() + table_entry(i % entries)];
    for (size_t i = 0; call.exact && i < tables.size(); ++i) {
      const int64_t down = i % entries / side - call.span[0];
      const int64_t across = i % entries % side - call.span[1];
      if (std::max(std::abs(down), std::abs(across)) > call.size) tables[i] = -INFINITE;
    }
  }

  static int64_t next_number() {
    static std::atomic<int64_t> numbers{0};
    return numbers++;
  }

  int64_t table_entries() const { return (2 * call.reach[0] + 1) * (2 * call.reach[1] + 1); }

  // Return the entry of the call's table for an entry of these tables.
  int64_t table_entry(int64_t entry) const {
    const int64_t row = std::clamp(call.span[0] - entry / side, -call.reach[0], call.reach[0]);
    const int64_t col = std::clamp(call.span[1] - entry % side, -call.reach[1], call.reach[1]);
    return (row + call.reach[0]) * (2 * call.reach[1] + 1) + col + call.reach[1];
  }

  const float* table(int64_t head) const {
    return tables.empty() ? nullptr : tables.data() + (by_head ? head * entries : 0);
  }

  // Return whether nothing is added to the scores of these keys.
  bool is_zero(const Keys& keys) const {
    return tables.empty() && !call.to_global && !keys.masked;
  }

  // Call visit(i, segment, row, entry) for each of `count` queries, beginning with query `first`,
  // and each row of keys in each segment. The first key of the row has the entry `entry` of the
  // table.
  template <class Visit>
  void each_row(const Keys& keys, int64_t first, int64_t count, int64_t cols, Visit visit) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t x = (first + i) / cols, y = (first + i) % cols;
      for (const Segment& part : keys.segments) {
        const int64_t corner =
            (part.down - x + call.span[0]) * side + part.across - y + call.span[1];
        for (int64_t row = 0; row < part.rows; ++row) visit(i, part, row, corner + row * side);
      }
    }
  }

  // Fill a tile. It has a row for each of `count` queries, beginning with query `first`. cols:
  // columns of the queries' chunk.
  void fill_tile(
      Matrix tile, const Keys& keys, int64_t head, int64_t first, int64_t count,
      int64_t cols) const {
    const float* entries = table(head);
    const float* global = call.to_global ? call.to_global + head * call.num_global : nullptr;
    const int64_t start = keys.segments.empty() ? keys.total : keys.segments[0].column;
    for (int64_t i = 0; i < count; ++i) {
      float* row = tile.data + i * tile.stride;
      for (int64_t g = 0; g < start; ++g)
        row[g] = g >= call.num_global ? -INFINITE : global ? global[g] : 0.0f;
      for (const Segment& part : keys.segments)
        for (int64_t j = part.rows * part.cols; j < part.count; ++j)
          row[part.column + j] = -INFINITE;
    }
    const auto fill_row = [&](int64_t i, const Segment& part, int64_t row, int64_t entry) {
      float* out = tile.data + i * tile.stride + part.column + row * part.cols;
      const int64_t query = (first + i) / cols * call.size + (first + i) % cols;
      const int64_t bit = 8 * query * call.mask_bytes + row * call.size;
      for (int64_t j = 0; j < part.cols; j += LANES) {  // rows are short: use masked vectors
        const Lanes lanes = first_lanes(std::min<int64_t>(part.cols - j, LANES));
        Vector x = entries ? load(entries + entry + j, lanes) : fill(0.0f);
        if (part.mask) x = select(lanes_of(bits_from(part.mask, bit + j)), x, fill(-INFINITE));
        store(out + j, x, lanes);
      }
    };
    each_row(keys, first, count, cols, fill_row);
  }

  // Add the gradient of a tile to the gradients of a table and of the bias toward global tokens.
  void add_gradient(
      Matrix tile, const Keys& keys, int64_t first, int64_t count, int64_t cols,
      float* dtable, float* dglobal) const {
    if (call.dto_global)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t g = 0; g < call.num_global; ++g) dglobal[g] += tile.data[i * tile.stride + g];
    if (!call.dtable) return;
    const auto add = [&](int64_t i, const Segment& part, int64_t row, int64_t entry) {
      const float* in = tile.data + i * tile.stride + part.column + row * part.cols;
      for (int64_t j = 0; j < part.cols; ++j) dtable[entry + j] += in[j];
    };
    each_row(keys, first, count, cols, add);
  }
};

}  // namespace vil
