// CUDA's words, so that kernels compile as C++ and run here, thread after thread: their arithmetic, without a GPU.
#pragma once

#include <cmath>

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static  // one block runs at a time

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;
using std::isfinite;

/// Comes back when every thread of the block has called it.
void __syncthreads();
