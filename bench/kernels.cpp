// How fast a rank combines what arrived: every type and operation, beside memcpy of as many bytes, in one run.
//
//     kernels BYTES SECONDS        BYTES of one operand; SECONDS for each row
#include "reduce/kernels.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm_core/types.hpp"

using namespace comm_core;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// The median over many calls, in seconds.
double median(const std::function<void()>& call, double seconds) {
  call();
  std::vector<double> samples;
  for (const auto begin = Clock::now(); samples.size() < 5 || seconds_since(begin) < seconds;) {
    const auto before = Clock::now();
    call();
    samples.push_back(seconds_since(before));
  }
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

}  // namespace

int main(int argc, char** argv) {
  const auto bytes = static_cast<std::size_t>(argc > 1 ? std::atoll(argv[1]) : 128 * 1024);
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.02;
  // Zeros: the same work as any other numbers, and none of them is subnormal or grows.
  std::vector<std::byte> a(bytes), b(bytes), out(bytes);
  const auto report = [&](const char* name, const std::string& op, const std::function<void()>& call) {
    std::printf("%-10s%-8s%8.1f\n", name, op.c_str(), static_cast<double>(bytes) / 1e9 / median(call, seconds));
  };
  std::printf("%-10s%-8s%8s   of the result; two operands of %zu KB\n", "type", "op", "GB/s", bytes / 1024);
  report("any", "memcpy", [&] { std::memcpy(out.data(), a.data(), bytes); });
  for (int type = 0; type <= static_cast<int>(DType::kBool); ++type) {
    const auto dtype = static_cast<DType>(type);
    const auto count = static_cast<std::int64_t>(bytes / item_size(dtype));
    for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd}) {
      if (!is_supported(dtype, op)) continue;
      report(std::string(name_of(dtype)).c_str(), std::string(name_of(op)), [&] {
        // As rings do; 16-bit floating types are combined as soon as all contributions are there.
        if (is_half(dtype)) return combine_all(dtype, op, out.data(), {a.data(), b.data()}, count);
        combine_last(dtype, op, out.data(), a.data(), b.data(), count, 2);
      });
    }
  }
  return 0;
}
