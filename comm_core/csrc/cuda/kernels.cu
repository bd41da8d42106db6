// What a step does to its buffers beside moving them: into a 16-bit wire buffer and back, averages, a shard's norm.
//
// Compiled into one fat binary that is loaded at run time through the driver, so nothing here may need the CUDA runtime.
// Every kernel has the same parameters, (source, target, count, scale), which the launcher in kernel_image.cpp relies
// on; how many blocks of how many threads it needs is decided in comm_core/cuda_kernels.py from the constants below.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;   // neighbouring elements that a thread moves at once
constexpr int kUnroll = 4;  // such groups per thread, all loaded before the first is stored
using Count = unsigned long long;

template <class T, int width = kWidth>
struct alignas(sizeof(T) * width) Group {
  T at[width];
};

__device__ float widened(float x) { return x; }
__device__ double widened(double x) { return x; }
__device__ float widened(__half x) { return __half2float(x); }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

// To the nearest value, ties to even.
__device__ void narrow(float x, float& out) { out = x; }
__device__ void narrow(double x, double& out) { out = x; }
__device__ void narrow(float x, __half& out) { out = __float2half_rn(x); }
__device__ void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <class From, class To, class Wide>
__device__ To converted(From value, Wide scale) {
  To out;
  narrow(widened(value) * scale, out);
  return out;
}

template <class G, class T>
__device__ bool aligned(const T* address) {
  return reinterpret_cast<Count>(address) % sizeof(G) == 0;
}

template <class From, class To, class Wide>
__device__ void cast(const From* source, To* target, Count count, Wide scale) {
  const Count start = Count(blockIdx.x) * (kThreads * kWidth * kUnroll);
  if (aligned<Group<From>>(source) && aligned<Group<To>>(target) && start + kThreads * kWidth * kUnroll <= count) {
    Group<From> in[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      in[u] = *reinterpret_cast<const Group<From>*>(source + start + (u * kThreads + threadIdx.x) * kWidth);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Group<To> out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out.at[i] = converted<From, To, Wide>(in[u].at[i], scale);
      *reinterpret_cast<Group<To>*>(target + start + (u * kThreads + threadIdx.x) * kWidth) = out;
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kUnroll * kWidth; ++u) {
    const Count index = start + u * kThreads + threadIdx.x;
    if (index < count) target[index] = converted<From, To, Wide>(source[index], scale);
  }
}

// Sum of squares and number of values that are infinite or NaN.
struct Found {
  double squares, nonfinite;
};

// The block's sum in thread 0, added up in an order that depends on nothing but the block's size.
__device__ Found block_sum(Found mine) {
  __shared__ Found all[kThreads];
  all[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      all[threadIdx.x].squares += all[threadIdx.x + half].squares;
      all[threadIdx.x].nonfinite += all[threadIdx.x + half].nonfinite;
    }
    __syncthreads();
  }
  return all[0];
}

template <class T>
__device__ void add(T value, Found& found) {
  const double wide = static_cast<double>(widened(value));
  found.squares += wide * wide;
  if (!isfinite(wide)) found.nonfinite += 1.0;
}

// Each block leaves its sum in target[block]; inspect_fold adds these up. A thread loads 16 bytes at once, and kUnroll
// times before it adds, so that enough is on its way from memory.
template <class T>
__device__ void inspect(const T* source, Found* target, Count count) {
  constexpr int width = 16 / sizeof(T);
  using Loaded = Group<T, width>;
  Found mine{0.0, 0.0};
  const Count stride = Count(gridDim.x) * kThreads;
  const Count first = Count(blockIdx.x) * kThreads + threadIdx.x;
  Count done = 0;
  if (aligned<Loaded>(source)) {
    const auto groups = reinterpret_cast<const Loaded*>(source);
    const Count num_groups = count / width;
    Count g = first;
    for (; g + (kUnroll - 1) * stride < num_groups; g += kUnroll * stride) {
      Loaded loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) loaded[u] = groups[g + u * stride];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < width; ++i) add(loaded[u].at[i], mine);
      }
    }
    for (; g < num_groups; g += stride) {
      const Loaded group = groups[g];
#pragma unroll
      for (int i = 0; i < width; ++i) add(group.at[i], mine);
    }
    done = num_groups * width;
  }
  for (Count index = done + first; index < count; index += stride) add(source[index], mine);
  const Found sum = block_sum(mine);
  if (threadIdx.x == 0) target[blockIdx.x] = sum;
}

}  // namespace

#define CAST(NAME, FROM, TO, WIDE)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                     \
      NAME(const FROM* source, TO* target, Count count, double scale) {                                      \
    cast<FROM, TO, WIDE>(source, target, count, static_cast<WIDE>(scale));                                   \
  }
#define INSPECT(NAME, TYPE)                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                     \
      NAME(const TYPE* source, Found* target, Count count, double) {                                         \
    inspect<TYPE>(source, target, count);                                                                    \
  }

CAST(cast_float32_bfloat16, float, __nv_bfloat16, float)
CAST(cast_float32_float16, float, __half, float)
CAST(cast_bfloat16_float32, __nv_bfloat16, float, float)
CAST(cast_float16_float32, __half, float, float)
CAST(cast_bfloat16_bfloat16, __nv_bfloat16, __nv_bfloat16, float)
CAST(cast_float16_float16, __half, __half, float)
CAST(cast_float32_float32, float, float, float)
CAST(cast_float64_float64, double, double, double)
INSPECT(inspect_float32, float)
INSPECT(inspect_float64, double)
INSPECT(inspect_float16, __half)
INSPECT(inspect_bfloat16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(kThreads)
    inspect_fold(const Found* source, Found* target, Count count, double) {
  Found mine{0.0, 0.0};
  for (Count index = threadIdx.x; index < count; index += kThreads) {
    mine.squares += source[index].squares;
    mine.nonfinite += source[index].nonfinite;
  }
  const Found sum = block_sum(mine);
  if (threadIdx.x == 0) *target = sum;
}
