// Sums and averages of random bits, NaN, infinities, subnormals and -0.0 among them, against one element at a time.
//
//     kernels_test SEED ROUNDS
#include "reduce/kernels.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm_core/types.hpp"
#include "reduce/half.hpp"

using namespace comm_core;

namespace {

using Random = std::mt19937_64;

/// How elements of a type are read, added and written. `Wide` is what sums are kept in.
struct Float16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static constexpr DType kDType = DType::kFloat16;
  static constexpr int kMantissa = 10;
  static Wide widen(Stored bits) { return float16_to_float(bits); }
  static Stored narrow(Wide value) { return float_to_float16(value); }
};
struct BFloat16 {
  using Stored = std::uint16_t;
  using Wide = float;
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr int kMantissa = 7;
  static Wide widen(Stored bits) { return bfloat16_to_float(bits); }
  static Stored narrow(Wide value) { return float_to_bfloat16(value); }
};
struct Float32 {
  using Stored = std::uint32_t;
  using Wide = float;
  static constexpr DType kDType = DType::kFloat32;
  static constexpr int kMantissa = 23;
  static Wide widen(Stored bits) { return std::bit_cast<Wide>(bits); }
  static Stored narrow(Wide value) { return std::bit_cast<Stored>(value); }
};
struct Float64 {
  using Stored = std::uint64_t;
  using Wide = double;
  static constexpr DType kDType = DType::kFloat64;
  static constexpr int kMantissa = 52;
  static Wide widen(Stored bits) { return std::bit_cast<Wide>(bits); }
  static Stored narrow(Wide value) { return std::bit_cast<Stored>(value); }
};

template <class F>
constexpr typename F::Stored kSign =
    static_cast<typename F::Stored>(typename F::Stored{1} << (8 * sizeof(typename F::Stored) - 1));

/// Any bits, but half of all exponents are those of zeros and subnormals, of infinities and NaNs, or of large numbers.
template <class F>
typename F::Stored random_bits(Random& random) {
  using Stored = typename F::Stored;
  const auto bits = static_cast<Stored>(random());
  const auto mantissa = static_cast<Stored>((Stored{1} << F::kMantissa) - 1);
  const auto exponents = static_cast<Stored>(~(mantissa | kSign<F>));
  switch (random() % 8) {
    case 0:
      return static_cast<Stored>(bits & (mantissa | kSign<F>));
    case 1:
      return static_cast<Stored>(bits & kSign<F>);
    case 2:
      return static_cast<Stored>((random() % 2 == 0 ? bits : bits & kSign<F>) | exponents);
    case 3:
      return static_cast<Stored>((bits | exponents) & ~(mantissa + 1));
    default:
      return bits;
  }
}

template <class F>
typename F::Stored expected(ReduceOp op, const std::vector<std::vector<typename F::Stored>>& data, std::size_t i) {
  auto sum = F::widen(data[0][i]);
  for (std::size_t s = 1; s < data.size(); ++s) sum += F::widen(data[s][i]);
  if (op == ReduceOp::kSum) return F::narrow(sum);
  return F::narrow(sum / static_cast<typename F::Wide>(data.size()));
}

template <class F>
void expect(typename F::Stored wanted, typename F::Stored got, const char* where) {
  // Which of two NaNs a sum becomes is the processor's affair.
  if (wanted == got || (std::isnan(F::widen(wanted)) && std::isnan(F::widen(got)))) return;
  char text[160];
  std::snprintf(text, sizeof text, "%s of %s: expected %llx, got %llx", where, std::string(name_of(F::kDType)).c_str(),
                static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(got));
  throw std::runtime_error(text);
}

template <class F>
void run(Random& random) {
  using Stored = typename F::Stored;
  std::vector<std::vector<Stored>> data(2 + random() % 6);
  const auto count = random() % 5000;
  for (auto& source : data) {
    for (std::size_t i = 0; i < count; ++i) source.push_back(random_bits<F>(random));
  }
  std::vector<const std::byte*> sources;
  for (const auto& source : data) sources.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<Stored> out(count);
  auto* const to = reinterpret_cast<std::byte*>(out.data());
  for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    combine_all(F::kDType, op, to, sources, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) expect<F>(expected<F>(op, data, i), out[i], "combine_all");
  }
  if (is_half(F::kDType)) return;
  data.resize(2);
  combine_last(F::kDType, ReduceOp::kAvg, to, sources[0], sources[1], static_cast<std::int64_t>(count), 2);
  for (std::size_t i = 0; i < count; ++i) expect<F>(expected<F>(ReduceOp::kAvg, data, i), out[i], "combine_last");
}

}  // namespace

int main(int argc, char** argv) {
  Random random(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  try {
    for (int round = 0; round < rounds; ++round) {
      run<Float16>(random);
      run<BFloat16>(random);
      run<Float32>(random);
      run<Float64>(random);
    }
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  std::printf("%d rounds passed\n", rounds);
  return 0;
}
