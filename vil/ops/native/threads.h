// Run tasks on the threads of OpenMP.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "amx.h"

namespace vil {

// OpenMP's function that calls run(data) on several threads. library.py finds it in the copy of
// OpenMP that torch uses, because a process must have only one copy. Null: there is only one thread.
using RunParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);
inline RunParallel run_parallel = nullptr;

template <class Scratch>
Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Call run(i, scratch) for each i below `count`. A thread takes the next task when it is free, so a
// thread that another process delays holds up only one task. The tasks of a call never depend on
// the number of threads, and so neither do sums over tasks. A thread keeps its scratch memory,
// unless it is large.
template <class Scratch, class Run>
void parallel(int64_t count, int64_t threads, Run run) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  auto work = [&] {
    Scratch& scratch = own_scratch<Scratch>();
    try {
      for (int64_t i; (i = next++) < count;) run(i, scratch);
      if (scratch.is_large()) scratch = Scratch();
    } catch (...) {
      next = count;
      const std::lock_guard<std::mutex> lock(mutex);
      error = std::current_exception();
    }
    release_tiles();
  };
  threads = std::min(threads, count);
  if (threads <= 1 || !run_parallel) {
    work();  // also in a forked process, where OpenMP's threads are missing
  } else {
    const auto call = [](void* data) { (*static_cast<decltype(work)*>(data))(); };
    run_parallel(call, &work, static_cast<unsigned>(threads), 0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace vil
