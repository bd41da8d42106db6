// Launches of comm_core's kernels. Threads of a block are contexts of one thread that go on to the next __syncthreads()
// one after another, so a barrier that some of them miss, or a read of what another writes later, shows.
#include "emulator.hpp"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../../comm_core/csrc/cuda/kernels.cu"

namespace {

using Kernel = void (*)(const void*, void*, Count, double);

struct Launch {
  Kernel kernel;
  const void* source;
  void* target;
  Count count;
  double scale;
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool done;
};

Launch launched;
ucontext_t scheduler;
std::vector<Thread> threads;

void body() {
  launched.kernel(launched.source, launched.target, launched.count, launched.scale);
  threads[threadIdx.x].done = true;
}

void run_block() {
  for (auto& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &scheduler;
    thread.done = false;
    makecontext(&thread.context, body, 0);
  }
  for (std::size_t num_done = 0; num_done < threads.size();) {
    num_done = 0;
    for (unsigned t = 0; t < threads.size(); ++t) {
      threadIdx.x = t;
      swapcontext(&scheduler, &threads[t].context);
      num_done += threads[t].done ? 1 : 0;
    }
    if (num_done == 0 || num_done == threads.size()) continue;
    std::fprintf(stderr, "%zu of %zu threads missed a barrier\n", num_done, threads.size());
    std::abort();
  }
}

}  // namespace

void __syncthreads() { swapcontext(&threads[threadIdx.x].context, &scheduler); }

extern "C" void emulate(Kernel kernel, unsigned blocks, unsigned num_threads, const void* source, void* target,
                        Count count, double scale) {
  launched = {kernel, source, target, count, scale};
  threads.resize(num_threads);
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block();
}
