// Run tasks on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>

#include <omp.h>

#include "amx.h"

namespace vil {

template <class Scratch>
Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Call run(i, scratch) for each i below `count`, on several threads. A thread keeps its scratch
// memory, unless it is large.
template <class Scratch, class Run>
void parallel(int64_t count, int64_t threads, Run run) {
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  const auto work = [&] {
    Scratch& scratch = own_scratch<Scratch>();
    try {
      for (int64_t i; (i = next++) < count;) run(i, scratch);
      if (scratch.is_large()) scratch = Scratch();
    } catch (...) {
      next = count;
#pragma omp critical(vil_attention)
      error = std::current_exception();
    }
    release_tiles();
  };
  threads = std::min(threads, count);
  if (threads <= 1 || omp_in_parallel()) {
    work();  // also in a forked process, where OpenMP's threads are missing
  } else {
#pragma omp parallel num_threads(threads)
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace vil
