// A patch embedding: a convolution of disjoint patches, a layer norm, and the sum with position
// embeddings. The tokens are written once.
#pragma once

#include "linear.h"

namespace vil {

struct PatchCall {       // as in vil/ops/patch_embed.py
  const void* x;         // (images, channels, rows, columns)
  void* y;               // (images, num_global + patches, outputs), contiguous
  const float* weight;   // packed, (outputs, pixels of a patch)
  const float *bias, *gain, *shift;  // (outputs,); null without a bias, or without a norm
  const float* added;    // (num_global + patches, outputs): global tokens, then positions
  int64_t strides[4], images, channels, grid[2], patch, outputs, num_global, threads;
  // whether the channels of x are adjacent, else the columns are; dtype of x, y and the matmul
  int64_t adjacent_channels, bfloat16;
  double eps;
};

// Computes patches of an image, block by block. Of a patch, either the channels of a pixel are
// adjacent, or the pixels of a row.
template <class Type>
class PatchTask {
 public:
  using Element = typename Type::Element;

  PatchTask(const PatchCall& call, const Panels<Type>& weight, LinearScratch& scratch)
      : call(call), weight(weight), scratch(scratch), width(call.outputs),
        units(call.channels * call.patch * call.patch / Type::PAIR) {}

  void write_globals(int64_t image) {
    for (int64_t i = 0; i < call.num_global; ++i)
      write_row(call.added + i * width, width, token(image, i));
  }

  void run(int64_t image, int64_t first, int64_t count) {
    float* patches = scratch.x.take((count + 1) * units + LANES);
    auto* out = reinterpret_cast<Element*>(patches);
    for (int64_t i = first; i < first + count; ++i) out = copy_patch(image, i, out);
    if (count % Type::PAIR) std::memset(out, 0, units * sizeof(float));
    const Matrix product{scratch.product.take(count * width), width};
    weight.multiply(count, {patches, units}, product);
    float* normed = scratch.normed.take(width);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = call.num_global + first + i;
      float* row = product.from(i, 0).data;
      if (call.bias) add_row(row, call.bias, width);
      if (call.gain) {
        normalize(row, width, call.eps, call.gain, call.shift, normed);
        row = normed;
      }
      add_row(row, call.added + place * width, width);
      write_row(row, width, token(image, place));
    }
  }

 private:
  const PatchCall& call;
  const Panels<Type>& weight;
  LinearScratch& scratch;
  const int64_t width, units;

  Element* token(int64_t image, int64_t place) const {
    const int64_t grid = call.grid[0] * call.grid[1];
    return static_cast<Element*>(call.y) + (image * (call.num_global + grid) + place) * width;
  }

  // Copy the pixels of a patch. Return the end of the copy.
  Element* copy_patch(int64_t image, int64_t number, Element* out) const {
    const int64_t *by = call.strides, p = call.patch;
    const int64_t row = number / call.grid[1] * p, column = number % call.grid[1] * p;
    const auto* x = static_cast<const Element*>(call.x) + image * by[0] + row * by[2] +
                    column * by[3];
    const bool by_pixel = call.adjacent_channels;
    for (int64_t i = 0; i < (by_pixel ? p : call.channels); ++i)
      for (int64_t j = 0; j < p; ++j)
        out = by_pixel ? copy(x + i * by[2] + j * by[3], call.channels, out)
                       : copy(x + i * by[1] + j * by[2], p, out);
    return out;
  }

  static Element* copy(const Element* from, int64_t count, Element* to) {
    if (count * sizeof *from == 16) std::memcpy(to, from, 16);  // without a call: 4 floats
    else std::memcpy(to, from, count * sizeof *from);
    return to + count;
  }
};

template <class Type>
void embed_patches(const PatchCall& call) {
  Panels<Type> weight;
  weight.use(const_cast<float*>(call.weight), call.channels * call.patch * call.patch, call.outputs);
  const int64_t patches = call.grid[0] * call.grid[1];
  const int64_t wanted = divide_up(FORWARD_TASKS * call.threads, call.images);
  const int64_t blocks = divide_up(patches, std::clamp(patches / wanted, FEW_ROWS, MIN_ROWS));
  parallel<LinearScratch>(call.images * blocks, call.threads, [&](int64_t i, LinearScratch& scratch) {
    const int64_t image = i / blocks, block = i % blocks, first = block * patches / blocks;
    PatchTask<Type> task(call, weight, scratch);
    if (!block) task.write_globals(image);
    task.run(image, first, (block + 1) * patches / blocks - first);
  });
}

}  // namespace vil
