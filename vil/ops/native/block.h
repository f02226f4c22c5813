// A transformer block without gradients: attention, then an MLP, each after a layer norm and with a
// residual connection. The tensors between its layers stay in memory of this thread.
#pragma once

#include "attention.h"
#include "mlp.h"

namespace vil {

// As in vil/ops/block.py. first: to queries, keys and values, from x (images, tokens, channels).
// last: of the outputs of the attention. The result is the y of the MLP. Other pointers to tokens
// are not set.
struct BlockCall {
  LinearCall first, last;
  Call attention;
  MlpCall mlp;
};

// Element: of x and y. In the attention, the tokens have the type of the matmuls.
template <class Type, class Element>
void block(BlockCall call) {
  using Inner = typename Type::Element;
  Call& attention = call.attention;
  const int64_t rows = call.first.rows, dim = call.first.inputs, tokens = rows / attention.images;
  BorrowedBuffer buffers[3];
  const auto take = [&](int i, int64_t channels, size_t bytes) -> void* {
    return buffers[i].take(divide_up(rows * channels * bytes, sizeof(float)));
  };
  auto* qkv = static_cast<Inner*>(take(0, 3 * dim, sizeof(Inner)));
  auto* out = static_cast<Inner*>(take(1, dim, sizeof(Inner)));
  void* between = take(2, dim, sizeof(Element));
  // the heads of the tokens from number `token` on, in rows of `width` channels
  const auto view = [&](Inner* data, int64_t width, int64_t token) {
    return Tokens{data + token * width, tokens * width, attention.dim, width};
  };
  call.first.y = qkv;
  linear<Type, Element, Inner>(call.first, false);
  attention.q = view(qkv, 3 * dim, attention.num_global);
  attention.k = view(qkv + dim, 3 * dim, 0);
  attention.v = view(qkv + 2 * dim, 3 * dim, 0);
  attention.out = view(out, dim, attention.num_global);
  if (attention.num_global) {
    attention.q_global = view(qkv, 3 * dim, 0);
    attention.out_global = view(out, dim, 0);
  }
  forward<Type>(attention);
  call.last.x = out;
  call.last.residual = call.first.x;
  call.last.y = between;
  linear<Type, Inner, Element>(call.last, false);
  call.mlp.x = between;
  mlp<Type, Element>(call.mlp, false);
}

}  // namespace vil
