// The functions that library.py calls. They return null, or a message if they failed, and write
// their results to the tensors of the call.
#include <stdexcept>
#include <string>

#include "block.h"

namespace vil {
namespace {

thread_local std::string message;

template <class Run>
const char* guarded(Run run) {
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

// Call run(Float32()), or run(BFloat16()) if `half`.
template <class Run>
const char* with_type(bool half, Run run) {
  return guarded([&] {
#if defined(__AVX512BF16__)
    if (half) return run(BFloat16());
#endif
    if (half) throw std::runtime_error("compiled without bfloat16");
    run(Float32());
  });
}

}  // namespace
}  // namespace vil

extern "C" void vil_use_openmp(vil::RunParallel function) { vil::run_parallel = function; }

extern "C" const char* vil_attention(const vil::Call* call, int is_backward) {
  return vil::with_type(call->bfloat16, [&](auto type) {
    using Type = decltype(type);
    is_backward ? vil::backward<Type>(*call) : vil::forward<Type>(*call);
  });
}

extern "C" const char* vil_linear(const vil::LinearCall* call, int is_backward) {
  return vil::with_type(call->compute_bfloat16, [&](auto type) {
    using Type = decltype(type);
    using Element = typename Type::Element;
    if (call->x_bfloat16)
      return call->y_bfloat16 ? vil::linear<Type, Element, Element>(*call, is_backward)
                              : vil::linear<Type, Element, float>(*call, is_backward);
    call->y_bfloat16 ? vil::linear<Type, float, Element>(*call, is_backward)
                     : vil::linear<Type, float, float>(*call, is_backward);
  });
}

extern "C" const char* vil_pack_linear(const vil::LinearCall* call, int) {
  return vil::with_type(call->compute_bfloat16,
                        [&](auto type) { vil::pack_linear<decltype(type)>(*call); });
}

extern "C" const char* vil_block(const vil::BlockCall* call, int) {
  return vil::with_type(call->first.compute_bfloat16, [&](auto type) {
    using Type = decltype(type);
    call->first.x_bfloat16 ? vil::block<Type, typename Type::Element>(*call)
                           : vil::block<Type, float>(*call);
  });
}

extern "C" const char* vil_mlp(const vil::MlpCall* call, int is_backward) {
  return vil::with_type(call->compute_bfloat16 || call->tokens_bfloat16, [&](auto type) {
    using Type = decltype(type);
    using Element = typename Type::Element;
    call->tokens_bfloat16 ? vil::mlp<Type, Element>(*call, is_backward)
                          : vil::mlp<Type, float>(*call, is_backward);
  });
}
