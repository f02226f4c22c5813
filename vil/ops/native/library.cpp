// The functions that library.py calls. They return null, or a message if they failed, and write
// their results to the tensors of the call.
#include <stdexcept>
#include <string>

#include "attention.h"
#include "linear.h"
#include "mlp.h"
#include "patches.h"

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

}  // namespace
}  // namespace vil

extern "C" const char* vil_attention(const vil::Call* call, int is_backward) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    if (call->bfloat16)
      return is_backward ? vil::backward<vil::BFloat16>(*call) : vil::forward<vil::BFloat16>(*call);
#endif
    if (call->bfloat16) throw std::runtime_error("compiled without bfloat16");
    return is_backward ? vil::backward<vil::Float32>(*call) : vil::forward<vil::Float32>(*call);
  });
}

extern "C" const char* vil_linear(const vil::LinearCall* call, int is_backward) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    using vil::BFloat16, vil::linear;
    if (call->compute_bfloat16) {
      if (call->x_bfloat16)
        return call->y_bfloat16 ? linear<BFloat16, uint16_t, uint16_t>(*call, is_backward)
                                : linear<BFloat16, uint16_t, float>(*call, is_backward);
      return call->y_bfloat16 ? linear<BFloat16, float, uint16_t>(*call, is_backward)
                              : linear<BFloat16, float, float>(*call, is_backward);
    }
#endif
    if (call->compute_bfloat16) throw std::runtime_error("compiled without bfloat16");
    vil::linear<vil::Float32, float, float>(*call, is_backward);
  });
}

extern "C" const char* vil_pack_linear(const vil::LinearCall* call, int) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    if (call->compute_bfloat16) return vil::pack_linear<vil::BFloat16>(*call);
#endif
    if (call->compute_bfloat16) throw std::runtime_error("compiled without bfloat16");
    vil::pack_linear<vil::Float32>(*call);
  });
}

extern "C" const char* vil_pack_mlp(const vil::MlpCall* call, int) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    if (call->compute_bfloat16) return vil::pack_mlp<vil::BFloat16>(*call);
#endif
    if (call->compute_bfloat16) throw std::runtime_error("compiled without bfloat16");
    vil::pack_mlp<vil::Float32>(*call);
  });
}

extern "C" const char* vil_mlp(const vil::MlpCall* call, int is_backward) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    if (call->tokens_bfloat16) return vil::mlp<vil::BFloat16, uint16_t>(*call, is_backward);
    if (call->compute_bfloat16) return vil::mlp<vil::BFloat16, float>(*call, is_backward);
#endif
    if (call->compute_bfloat16) throw std::runtime_error("compiled without bfloat16");
    vil::mlp<vil::Float32, float>(*call, is_backward);
  });
}

extern "C" const char* vil_embed_patches(const vil::PatchCall* call, int) {
  return vil::guarded([&] {
#if defined(__AVX512BF16__)
    if (call->bfloat16) return vil::embed_patches<vil::BFloat16>(*call);
#endif
    if (call->bfloat16) throw std::runtime_error("compiled without bfloat16");
    vil::embed_patches<vil::Float32>(*call);
  });
}
