// The passes of local attention: the division of a call into tasks for threads.
//
// A task computes a head of an image or, if there are few of them, a band of its rows of chunks.
// Each task has its own sums, which are added in a fixed order. Tasks depend only on the sizes of
// the call, so results are equal bit for bit for all numbers of threads.
#pragma once

#include <vector>

#include "backward.h"
#include "forward.h"
#include "globals.h"
#include "threads.h"

namespace vil {

constexpr int64_t FEWEST_BANDS = 16;  // of a call with enough rows of chunks
constexpr int64_t FEW_QUERIES = 96;   // of a part of a chunk, because each part packs all its keys

inline std::vector<Band> bands_of(const Call& call) {
  const int64_t rows = call.chunks(0), lanes = call.images * call.heads;
  // not more than needed, because a band also packs the rows around it
  const int64_t count = std::clamp<int64_t>(divide_up(FEWEST_BANDS, lanes), 1, divide_up(rows, 2));
  std::vector<Band> bands;
  for (int64_t lane = 0; lane < lanes; ++lane)  // the images of a head in turn, which share a tile
    for (int64_t i = 0; i < count; ++i)
      bands.push_back(
          {lane % call.images, lane / call.images, i * rows / count, (i + 1) * rows / count});
  return bands;
}

// Divide the bands of a forward pass into parts if they are few. Reduces the size of a block of
// queries to that of a part.
inline std::vector<Band> parts_of(const Call& call, const std::vector<Band>& bands, Sizes& sizes) {
  const int64_t few = divide_up(FEWEST_BANDS, bands.size());
  const int64_t most = std::max<int64_t>(sizes.queries / FEW_QUERIES, 1);
  const int64_t count = call.layout_heads ? 1 : std::min(few, most);
  sizes.block = std::min(sizes.block, pad(divide_up(sizes.queries, count), 2));
  std::vector<Band> parts;
  for (int64_t part = 0; part < count; ++part)
    for (Band band : bands) {
      band.part = part, band.parts = count;
      parts.push_back(band);
    }
  return parts;
}

template <class Type>
void forward(const Call& call) {
  if (!(call.images * call.heads)) return;
  const Bias bias(call);
  Sizes sizes = sizes_of<Type>(call);
  const auto bands = parts_of(call, bands_of(call), sizes);
  parallel<Scratch>(bands.size(), call.threads, [&](int64_t i, Scratch& scratch) {
    Forward<Type>(call, bias, sizes, scratch, bands[i]).run();
    if (GlobalQueries<Type>::wanted(call) && !bands[i].first && !bands[i].part)
      GlobalQueries<Type>(call, scratch, bands[i].image, bands[i].head).forward();
  });
}

// Sum the partial gradients of the keys of a head of an image, which has `count` tasks.
template <class Type>
void sum_partial(
    const Call& call, const Sizes& sizes, Scratch& scratch, Band band, std::vector<Partial>* tasks,
    int64_t count) {
  const auto lines = lines_of(call, 0, band.image), columns = lines_of(call, 1, band.image);
  const auto add = [&](float* sums, const float* more, int64_t keys) {
    for (int64_t d = 0; d < call.dim; ++d, sums += sizes.key_stride, more += sizes.key_stride)
      for (int64_t j = 0; j < keys; ++j) sums[j] += more[j];
  };
  for (int64_t task = 0; task < count; ++task)
    for (Partial& first : tasks[task]) {
      if (!first.dkeys_t.get()) continue;
      for (int64_t other = task; other < count; ++other)
        for (Partial& more : tasks[other])
          if (&more != &first && more.row == first.row && more.dkeys_t.get()) {
            add(first.dkeys_t.get(), more.dkeys_t.get(), first.count);
            add(first.dvalues_t.get(), more.dvalues_t.get(), first.count);
            more.dkeys_t = Buffer();
          }
      const int64_t rows = first.row == GLOBAL ? 1 : lines[first.row].count[1];
      write_keys<Type>(call, sizes, scratch, band, first.row, rows, columns, first.count,
                       first.dkeys_t.get(), call.dk, call.scale);
      write_keys<Type>(call, sizes, scratch, band, first.row, rows, columns, first.count,
                       first.dvalues_t.get(), call.dv, 1.0f);
      first.dkeys_t = Buffer();
    }
}

template <class Type>
void backward(const Call& call) {
  if (!(call.images * call.heads)) return;
  const Bias bias(call);
  const Sizes sizes = sizes_of<Type>(call);
  const auto bands = bands_of(call);
  const int64_t lanes = call.images * call.heads, share = bands.size() / lanes;
  const int64_t num_table = call.dtable ? bias.entries : 0;
  const int64_t width = num_table + (call.dto_global ? call.num_global : 0);
  std::vector<float> biases(bands.size() * width, 0.0f);
  std::vector<std::vector<Partial>> partial(bands.size());
  parallel<Scratch>(bands.size(), call.threads, [&](int64_t i, Scratch& scratch) {
    float* sums = biases.data() + i * width;
    Backward<Type>(call, bias, sizes, scratch, bands[i], partial[i], sums, sums + num_table).run();
  });
  const int64_t from_globals = call.dfrom_globals ? call.num_global * (call.num_global + 1) : 0;
  std::vector<float> global_biases(lanes * from_globals, 0.0f);
  parallel<Scratch>(lanes, call.threads, [&](int64_t i, Scratch& scratch) {
    const Band& band = bands[i * share];
    sum_partial<Type>(call, sizes, scratch, band, &partial[i * share], share);
    if (GlobalQueries<Type>::wanted(call))
      GlobalQueries<Type>(call, scratch, band.image, band.head)
          .backward(global_biases.data() + i * from_globals);
  });
  for (int64_t i = 0; i < lanes; ++i)
    for (int64_t j = 0; j < from_globals; ++j)
      call.dfrom_globals[bands[i * share].head * from_globals + j] +=
          global_biases[i * from_globals + j];
  for (size_t i = 0; i < bands.size(); ++i) {
    const float* sums = biases.data() + i * width;
    for (int64_t j = 0; j < num_table; ++j)
      call.dtable[bands[i].head * bias.table_entries() + bias.table_entry(j)] += sums[j];
    for (int64_t g = num_table; g < width; ++g)
      call.dto_global[bands[i].head * call.num_global + g - num_table] += sums[g];
  }
}

}  // namespace vil
