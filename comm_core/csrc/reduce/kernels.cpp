#include "kernels.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <type_traits>

#include "half.hpp"
#include "vectorised.hpp"

namespace comm_core {
namespace {

// - Operators on one element. Integers wrap around, which signed arithmetic may not.

template <class T>
using Wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::integral<T>) return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    return a + b;
  }
};
struct Prod {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::integral<T>) return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    return a * b;
  }
};
// A NaN on either side wins, as in numpy and torch.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Or {
  static std::uint8_t apply(std::uint8_t a, std::uint8_t b) { return (a | b) != 0 ? 1 : 0; }
};
struct And {
  static std::uint8_t apply(std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>((a != 0 ? 1 : 0) & (b != 0 ? 1 : 0));
  }
};

// An average is rounded once. Powers of two have an exact inverse, and a product takes a fraction of a quotient's time.
template <std::floating_point T>
struct Quotient {
  T divisor;
  T operator()(T sum) const { return sum / divisor; }
};
template <std::floating_point T>
struct Product {
  T inverse;
  T operator()(T sum) const { return sum * inverse; }
};

// - Loops

template <class T>
T* as(std::byte* p) {
  return reinterpret_cast<T*>(p);
}
template <class T>
const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

template <class T, class Op>
COMM_CORE_VECTORISED void pairwise(T* out, const T* a, const T* b, std::int64_t n) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
}

template <std::floating_point T, class Average>
COMM_CORE_VECTORISED void pairwise_average(T* out, const T* a, const T* b, std::int64_t n, Average average) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) out[i] = average(a[i] + b[i]);
}

/// out = (a + b) / ranks: the last sum of an average.
template <std::floating_point T>
void pairwise_mean(T* out, const T* a, const T* b, std::int64_t n, std::size_t ranks) {
  const T divisor = static_cast<T>(ranks);
  if (std::has_single_bit(ranks)) return pairwise_average(out, a, b, n, Product<T>{T(1) / divisor});
  pairwise_average(out, a, b, n, Quotient<T>{divisor});
}

/// Calls visit(T{}, Op{}) for the element type and operator meant; AVG is visited as Sum.
template <class T, class Visit>
void visit_op(ReduceOp op, const Visit& visit) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return visit(T{}, Sum{});
    case ReduceOp::kMin:
      return visit(T{}, Min{});
    case ReduceOp::kMax:
      return visit(T{}, Max{});
    case ReduceOp::kProd:
      return visit(T{}, Prod{});
  }
}

template <class Visit>
void visit_bool(ReduceOp op, const Visit& visit) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kMax:
      return visit(std::uint8_t{}, Or{});
    case ReduceOp::kMin:
    case ReduceOp::kProd:
      return visit(std::uint8_t{}, And{});
  }
}

/// The 16-bit floating types are visited as float, the type they are accumulated in.
template <class Visit>
void visit(DType dtype, ReduceOp op, const Visit& call) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
      return visit_op<float>(op, call);
    case DType::kFloat64:
      return visit_op<double>(op, call);
    case DType::kInt8:
      return visit_op<std::int8_t>(op, call);
    case DType::kInt16:
      return visit_op<std::int16_t>(op, call);
    case DType::kInt32:
      return visit_op<std::int32_t>(op, call);
    case DType::kInt64:
      return visit_op<std::int64_t>(op, call);
    case DType::kUInt8:
      return visit_op<std::uint8_t>(op, call);
    case DType::kBool:
      return visit_bool(op, call);
  }
}

// - Many sources, a block that fits the cache at a time

constexpr std::int64_t kBlock = 2048;
template <class T>
using Block = std::array<T, kBlock>;

/// sums = sums op next, where `num_done` contributions are combined already; the last of an average also divides.
template <class T, class Op>
void accumulate(bool mean, T* sums, const T* next, std::int64_t n, std::size_t num_done, std::size_t num_sources) {
  if constexpr (std::floating_point<T> && std::is_same_v<Op, Sum>) {
    if (mean && num_done + 1 == num_sources) return pairwise_mean(sums, sums, next, n, num_sources);
  }
  pairwise<T, Op>(sums, sums, next, n);
}

template <class Op>
void combine_half_block(DType dtype, bool mean, std::byte* out, const std::vector<const std::byte*>& sources,
                        std::int64_t first, std::int64_t n) {
  Block<float> sum;
  Block<float> next;
  widen_half(dtype, sources[0] + 2 * first, sum.data(), n);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    widen_half(dtype, sources[s] + 2 * first, next.data(), n);
    accumulate<float, Op>(mean, sum.data(), next.data(), n, s, sources.size());
  }
  narrow_half(dtype, sum.data(), out + 2 * first, n);
}

template <class T, class Op>
void combine_block(bool mean, std::byte* out, const std::vector<const std::byte*>& sources, std::int64_t first,
                   std::int64_t n) {
  Block<T> sum;
  std::copy_n(as<T>(sources[0]) + first, n, sum.begin());
  for (std::size_t s = 1; s < sources.size(); ++s) {
    accumulate<T, Op>(mean, sum.data(), as<T>(sources[s]) + first, n, s, sources.size());
  }
  std::copy_n(sum.begin(), n, as<T>(out) + first);
}

}  // namespace

void combine(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count) {
  visit(dtype, op, [&]<class T, class Op>(T, Op) { pairwise<T, Op>(as<T>(out), as<T>(a), as<T>(b), count); });
}

void combine_last(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count,
                  int ranks) {
  if (op != ReduceOp::kAvg) return combine(dtype, op, out, a, b, count);
  const auto mean_as = [&]<class T>(T) {
    pairwise_mean(as<T>(out), as<T>(a), as<T>(b), count, static_cast<std::size_t>(ranks));
  };
  dtype == DType::kFloat64 ? mean_as(double{}) : mean_as(float{});
}

void combine_all(DType dtype, ReduceOp op, std::byte* out, const std::vector<const std::byte*>& sources,
                 std::int64_t count) {
  const bool mean = op == ReduceOp::kAvg;
  visit(dtype, op, [&]<class T, class Op>(T, Op) {
    for (std::int64_t first = 0; first < count; first += kBlock) {
      const std::int64_t n = std::min(kBlock, count - first);
      if constexpr (std::is_same_v<T, float>) {
        if (is_half(dtype)) {
          combine_half_block<Op>(dtype, mean, out, sources, first, n);
          continue;
        }
      }
      combine_block<T, Op>(mean, out, sources, first, n);
    }
  });
}

}  // namespace comm_core
