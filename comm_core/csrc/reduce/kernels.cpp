#include "kernels.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <type_traits>

#include "half.hpp"

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

/// Calls `act` with what makes an average of a sum over `ranks`, rounded once. Only a sum of -0.0 gives -0.0: a
/// negative sum that underflows gives +0.0. Powers of two have an exact inverse, and a product takes a fraction of a
/// quotient's time.
template <std::floating_point T, class Act>
void with_average(std::size_t ranks, const Act& act) {
  const auto keep_mark = [](T mean, T sum) { return mean == T(0) && sum != T(0) ? T(0) : mean; };
  const T divisor = static_cast<T>(ranks);
  if (std::has_single_bit(ranks)) {
    act([=, inverse = T(1) / divisor](T sum) { return keep_mark(sum * inverse, sum); });
  } else {
    act([=](T sum) { return keep_mark(sum / divisor, sum); });
  }
}

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
void pairwise(std::byte* out, const std::byte* a, const std::byte* b, std::int64_t n) {
  T* const o = as<T>(out);
  const T* const x = as<T>(a);
  const T* const y = as<T>(b);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) o[i] = Op::apply(x[i], y[i]);
}

template <std::floating_point T>
void pairwise_mean(std::byte* out, const std::byte* a, const std::byte* b, std::int64_t n, int ranks) {
  T* const o = as<T>(out);
  const T* const x = as<T>(a);
  const T* const y = as<T>(b);
  with_average<T>(static_cast<std::size_t>(ranks), [&](const auto& average) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) o[i] = average(x[i] + y[i]);
  });
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

void narrow_mean(DType dtype, const float* sums, std::byte* to, std::int64_t n, std::size_t ranks) {
  with_average<float>(ranks, [&](const auto& average) {
    Block<float> means;
    for (std::int64_t i = 0; i < n; ++i) means[static_cast<std::size_t>(i)] = average(sums[i]);
    narrow_half(dtype, means.data(), to, n);
  });
  auto* const h = as<std::uint16_t>(to);
  constexpr std::uint16_t kNegativeZero = 0x8000;
  for (std::int64_t i = 0; i < n; ++i) {
    h[i] = h[i] == kNegativeZero && sums[i] != 0.0F ? std::uint16_t{0} : h[i];
  }
}

template <class Op>
void combine_half_block(DType dtype, bool mean, std::byte* out, const std::vector<const std::byte*>& sources,
                        std::int64_t first, std::int64_t n) {
  Block<float> sum;
  Block<float> next;
  widen_half(dtype, sources[0] + 2 * first, sum.data(), n);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    widen_half(dtype, sources[s] + 2 * first, next.data(), n);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) sum[i] = Op::apply(sum[i], next[i]);
  }
  if (mean) {
    narrow_mean(dtype, sum.data(), out + 2 * first, n, sources.size());
  } else {
    narrow_half(dtype, sum.data(), out + 2 * first, n);
  }
}

template <class T, class Op>
void combine_block(bool mean, std::byte* out, const std::vector<const std::byte*>& sources, std::int64_t first,
                   std::int64_t n) {
  Block<T> sum;
  std::copy_n(as<T>(sources[0]) + first, n, sum.begin());
  for (std::size_t s = 1; s < sources.size(); ++s) {
    const T* const next = as<T>(sources[s]) + first;
    for (std::int64_t i = 0; i < n; ++i) {
      auto& element = sum[static_cast<std::size_t>(i)];
      element = Op::apply(element, next[i]);
    }
  }
  if constexpr (std::floating_point<T>) {
    if (mean) {
      with_average<T>(sources.size(), [&](const auto& average) {
        for (std::int64_t i = 0; i < n; ++i) {
          auto& element = sum[static_cast<std::size_t>(i)];
          element = average(element);
        }
      });
    }
  }
  std::copy_n(sum.begin(), n, as<T>(out) + first);
}

}  // namespace

void combine(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count) {
  visit(dtype, op, [&]<class T, class Op>(T, Op) { pairwise<T, Op>(out, a, b, count); });
}

void combine_last(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count,
                  int ranks) {
  if (op != ReduceOp::kAvg) return combine(dtype, op, out, a, b, count);
  if (dtype == DType::kFloat64) return pairwise_mean<double>(out, a, b, count, ranks);
  pairwise_mean<float>(out, a, b, count, ranks);
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
