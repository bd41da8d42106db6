// Schedules of all ranks in one thread, over a network that delivers in any order it likes: every operation, with
// random sizes, must end with the right result, whether sends are buffered or wait for their receives, and whoever is
// late must not find more waiting for it than it can take in soon.
//
//     schedule_test SEED ROUNDS
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.hpp"
#include "network.hpp"
#include "reduce/half.hpp"
#include "schedule/planner.hpp"

using namespace comm_core;

namespace {

/// What ranks contribute, and its sum over all of them. Whole numbers, whose sums have no order; ...
struct Int32 {
  using Number = std::int32_t;
  static constexpr DType kDType = DType::kInt32;
  static Number value(int rank, std::size_t i) { return static_cast<Number>(1000 * (rank + 1) + 7 * i); }
  static Number sum(int size, std::size_t i) {
    Number total = 0;
    for (int r = 0; r < size; ++r) total += value(r, i);
    return total;
  }
};
/// ... and those whose sums are made in fp32, in the order of the ranks, and rounded once: any other way shows.
struct BFloat16 {
  using Number = std::uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static Number value(int rank, std::size_t i) {
    const float sign = (static_cast<std::size_t>(rank) + i) % 3 == 0 ? -1.0F : 1.0F;
    return float_to_bfloat16(sign * std::ldexp(1.0F + 0.37F * static_cast<float>(i % 11), 9 * (rank % 4)));
  }
  static Number sum(int size, std::size_t i) {
    float total = bfloat16_to_float(value(0, i));
    for (int r = 1; r < size; ++r) total += bfloat16_to_float(value(r, i));
    return float_to_bfloat16(total);
  }
};

template <class E>
struct Rank {
  std::vector<typename E::Number> send, recv;
  Operation operation;
};

template <class Numbers>
std::byte* bytes_of(Numbers& numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}

/// A random operation for all ranks, and what each should have in recv afterwards.
template <class E>
struct Case {
  std::vector<Rank<E>> ranks;
  std::vector<std::vector<typename E::Number>> expected;
};

template <class E>
Case<E> make_case(Random& random, int size, OpKind kind) {
  using Numbers = std::vector<typename E::Number>;
  const auto value = [](int rank, std::size_t i) { return E::value(rank, i); };
  Case<E> made;
  CountList counts;
  const int scale = pick(random, 0, 1) == 0 ? 40 : 3;
  for (int r = 0; r < size; ++r) counts.push_back(pick(random, 0, 2) == 0 ? 0 : pick(random, 0, scale));
  // Now and then one rank has nearly everything.
  if (pick(random, 0, 7) == 0) counts[static_cast<std::size_t>(pick(random, 0, size - 1))] += 400;
  const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  if (kind == OpKind::kAllReduce || kind == OpKind::kReduce) counts = balanced_counts(static_cast<int>(total), size);
  const auto offsets = offsets_of(counts);
  const int root = pick(random, 0, size - 1);
  const bool in_place = pick(random, 0, 1) == 0;
  Numbers sum, joined;
  for (std::size_t i = 0; i < total; ++i) sum.push_back(E::sum(size, i));
  for (int r = 0; r < size; ++r) {
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i) {
      joined.push_back(value(r, static_cast<std::size_t>(i)));
    }
  }
  made.ranks.resize(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    auto& rank = made.ranks[static_cast<std::size_t>(r)];
    const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    const auto before = static_cast<std::size_t>(offsets[static_cast<std::size_t>(r)]);
    const auto fill = [&](Numbers& numbers, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) numbers.push_back(value(r, i));
    };
    Operation& o = rank.operation;
    o.kind = kind;
    o.dtype = E::kDType;
    o.recv_counts = counts;
    o.peer = root;
    o.count = static_cast<std::int64_t>(total);
    switch (kind) {
      case OpKind::kReduceScatter:
        fill(rank.send, total);
        rank.recv.resize(own);
        made.expected.emplace_back(sum.begin() + static_cast<std::ptrdiff_t>(before),
                                   sum.begin() + static_cast<std::ptrdiff_t>(before + own));
        break;
      case OpKind::kAllGather:
        fill(rank.send, own);
        rank.recv.resize(total);
        if (in_place)
          std::copy(rank.send.begin(), rank.send.end(), rank.recv.begin() + static_cast<std::ptrdiff_t>(before));
        made.expected.push_back(joined);
        break;
      case OpKind::kAllToAll: {
        o.send_counts.assign(static_cast<std::size_t>(size), 0);
        o.recv_counts.assign(static_cast<std::size_t>(size), 0);
        Numbers wanted;
        for (int p = 0; p < size; ++p) {
          const auto out = static_cast<std::size_t>((3 * r + 5 * p + scale) % 7);
          const auto in = static_cast<std::size_t>((3 * p + 5 * r + scale) % 7);
          o.send_counts[static_cast<std::size_t>(p)] = static_cast<std::int64_t>(out);
          o.recv_counts[static_cast<std::size_t>(p)] = static_cast<std::int64_t>(in);
          for (std::size_t i = 0; i < out; ++i) rank.send.push_back(value(r * size + p, i));
          for (std::size_t i = 0; i < in; ++i) wanted.push_back(value(p * size + r, i));
        }
        rank.recv.resize(wanted.size());
        made.expected.push_back(std::move(wanted));
        break;
      }
      case OpKind::kBroadcast:
        fill(rank.recv, total);
        made.expected.emplace_back();
        for (std::size_t i = 0; i < total; ++i) made.expected.back().push_back(value(root, i));
        break;
      case OpKind::kReduce:
        fill(rank.send, total);
        if (r == root) rank.recv.resize(total);
        made.expected.push_back(r == root ? sum : Numbers{});
        break;
      case OpKind::kAllReduce:
      case OpKind::kBarrier:
      case OpKind::kSend:
      case OpKind::kReceive:
        fill(in_place ? rank.recv : rank.send, total);
        rank.recv.resize(total);
        made.expected.push_back(sum);
        break;
    }
    o.recv = bytes_of(rank.recv);
    o.send = bytes_of(rank.send);
    if (kind == OpKind::kAllReduce && in_place) o.send = o.recv;
    if (kind == OpKind::kAllGather && in_place) o.send = o.recv + sizeof(typename E::Number) * before;
  }
  return made;
}

/// How many messages may wait for a rank that does not come, if nothing is small: three blocks of a ring, or a window;
/// a reduce of 16-bit numbers is two exchanges, and has one of each.
std::int64_t patience(OpKind kind, DType dtype, int size, std::int64_t window) {
  constexpr int kToken = 1;  // of Announced, before the data
  if (kind == OpKind::kReduce && is_half(dtype)) return 2 * std::max<std::int64_t>(2, window) + kToken;
  const int steps = kind == OpKind::kAllReduce ? 2 * (size - 1) : size - 1;
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllGather || kind == OpKind::kAllReduce
             ? 3 * steps * window
             : std::max<std::int64_t>(2, window) + (kind == OpKind::kAllToAll ? 0 : kToken);
}

template <class E>
void run(Random& random, OpKind kind) {
  const int size = pick(random, 2, 6);
  Case<E> test = make_case<E>(random, size, kind);
  Settings settings;
  settings.segment_bytes = 8 * pick(random, 1, 4);
  settings.window = pick(random, 1, 5);
  settings.small_bytes = pick(random, 0, 2) == 0 ? 1 << 20 : 0;
  const int slow = pick(random, 0, 1) == 0 ? pick(random, 0, size - 1) : -1;
  Network network(size, pick(random, 0, 1) == 0, slow, random);
  std::vector<std::unique_ptr<Endpoint>> ends;
  std::vector<std::unique_ptr<Schedule>> schedules;
  for (int r = 0; r < size; ++r) {
    ends.push_back(std::make_unique<Endpoint>(network, r));
    schedules.push_back(plan(test.ranks[static_cast<std::size_t>(r)].operation, r, size, settings));
  }
  std::vector<int> late(static_cast<std::size_t>(size));  // ranks that have not begun yet
  std::iota(late.begin(), late.end(), 0);
  std::shuffle(late.begin(), late.end(), random);
  const bool very_late = pick(random, 0, 3) == 0;  // they begin when nobody can go on without them
  for (bool moved = false; moved || !late.empty();) {
    if (!late.empty() && (!moved || (!very_late && pick(random, 0, 9) == 0))) {
      const auto r = static_cast<std::size_t>(late.back());
      late.pop_back();
      schedules[r]->start(*ends[r]);
    }
    moved = network.step();
    for (int r = 0; r < size; ++r) {
      const bool began = std::find(late.begin(), late.end(), r) == late.end();
      if (began) schedules[static_cast<std::size_t>(r)]->finished();
    }
    if (!moved) moved = network.step();  // the next part of a sequence
  }
  if (settings.small_bytes == 0 && network.most_waiting() > patience(kind, E::kDType, size, settings.window)) {
    throw std::runtime_error(std::to_string(network.most_waiting()) + " messages wait for one rank, at a window of " +
                             std::to_string(settings.window));
  }
  for (int r = 0; r < size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    if (!schedules[i]->finished() || !schedules[i]->drained()) throw std::runtime_error("nobody can go on");
    if (schedules[i]->bytes_left() != 0) throw std::runtime_error("bytes are still awaited after the end");
    if (test.ranks[i].recv != test.expected[i]) throw std::runtime_error("a result is wrong");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  const OpKind kinds[] = {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllReduce,
                          OpKind::kBroadcast,     OpKind::kReduce,    OpKind::kAllToAll};
  for (int round = 0; round < rounds; ++round) {
    for (const auto kind : kinds) {
      Random random(seed * 1'000'003 + static_cast<std::uint64_t>(round));
      try {
        round % 2 == 0 ? run<Int32>(random, kind) : run<BFloat16>(random, kind);
      } catch (const std::exception& e) {
        std::printf("%s, seed %llu, round %d: %s\n", std::string(name_of(kind)).c_str(),
                    static_cast<unsigned long long>(seed), round, e.what());
        return 1;
      }
    }
  }
  std::printf("%d rounds passed\n", rounds);
  return 0;
}
