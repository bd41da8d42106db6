// Operations of ranks in groups, all ranks in one thread, over a network that delivers in any order it likes: each must
// end with the right result, the same bits on all ranks that get the same, and send no more between groups than groups
// of one rank would.
//
//     levels_test SEED ROUNDS
#include "comm_core/levels.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.hpp"
#include "network.hpp"
#include "reduce/half.hpp"
#include "schedule/planner.hpp"

using namespace comm_core;

namespace {

/// What ranks contribute, and how a few contributions are reduced.
struct Int32 {
  using Number = std::int32_t;
  static constexpr DType kDType = DType::kInt32;
  static Number value(int rank, std::size_t i) { return static_cast<Number>(1000 * (rank + 1) + 7 * i); }
  static Number reduced(const std::vector<Number>& all, ReduceOp op) {
    if (op == ReduceOp::kMax) return *std::ranges::max_element(all);
    return std::accumulate(all.begin(), all.end(), Number{0});
  }
  static constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax};
};
/// In fp32, in the order of the ranks, and rounded once in each group and once across groups.
struct BFloat16 {
  using Number = std::uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static Number value(int rank, std::size_t i) {
    const float sign = (static_cast<std::size_t>(rank) + i) % 3 == 0 ? -1.0F : 1.0F;
    return float_to_bfloat16(sign * std::ldexp(1.0F + 0.37F * static_cast<float>(i % 11), 9 * (rank % 4)));
  }
  static Number reduced(const std::vector<Number>& all, ReduceOp op) {
    float total = bfloat16_to_float(all[0]);
    for (std::size_t r = 1; r < all.size(); ++r) total += bfloat16_to_float(all[r]);
    if (op == ReduceOp::kAvg) total *= 1.0F / static_cast<float>(all.size());
    return float_to_bfloat16(total);
  }
  static constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg};
};

Levels make_levels(Random& random) {
  Levels levels;
  levels.kind = pick(random, 0, 1) == 0 ? Levels::Kind::kTwoLevel : Levels::Kind::kHybrid;
  const int num_groups = pick(random, 1, 3), group_size = pick(random, 1, 3);
  std::vector<int> ranks(static_cast<std::size_t>(num_groups * group_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (pick(random, 0, 1) == 0) std::shuffle(ranks.begin(), ranks.end(), random);
  for (int g = 0; g < num_groups; ++g) {
    levels.groups.emplace_back(ranks.begin() + g * group_size, ranks.begin() + (g + 1) * group_size);
  }
  return levels;
}

CountList make_counts(Random& random, std::size_t size) {
  CountList counts;
  const int scale = pick(random, 0, 1) == 0 ? 60 : 3;
  for (std::size_t r = 0; r < size; ++r) counts.push_back(pick(random, 0, 2) == 0 ? 0 : pick(random, 0, scale));
  // Now and then one rank has nearly everything.
  if (pick(random, 0, 5) == 0) counts[static_cast<std::size_t>(pick(random, 0, static_cast<int>(size) - 1))] += 600;
  return counts;
}

template <class E>
struct Case {
  using Number = typename E::Number;
  using Numbers = std::vector<Number>;

  std::shared_ptr<const Levels> levels;
  OpKind kind;
  ReduceOp op;
  CountList counts;  // of the chunks; of an all_reduce, of no meaning
  bool in_place;
  std::vector<Numbers> send, recv, expected = {};
  std::vector<Operation> operations = {};

  int size() const { return levels->num_groups() * levels->group_size(); }
  bool hybrid() const { return levels->kind == Levels::Kind::kHybrid; }
  int shard(int rank) const { return hybrid() ? levels->member_of(rank) : rank; }

  Number reduced(std::size_t i) const {
    Numbers groups;
    const bool one_level = levels->num_groups() == 1 || levels->group_size() == 1;
    if (one_level && (!hybrid() || kind == OpKind::kAllReduce)) {  // as if there were no groups
      for (int rank = 0; rank < size(); ++rank) groups.push_back(E::value(rank, i));
      return E::reduced(groups, op);
    }
    for (const auto& group : levels->groups) {
      Numbers members;
      for (const int rank : group) members.push_back(E::value(rank, i));
      groups.push_back(E::reduced(members, op));
    }
    return E::reduced(groups, op);
  }

  void fill() {
    const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    const auto offsets = offsets_of(counts);
    Numbers sum;
    for (std::size_t i = 0; i < total; ++i) sum.push_back(reduced(i));
    for (int r = 0; r < size(); ++r) {
      const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(shard(r))]);
      const auto before = offsets[static_cast<std::size_t>(shard(r))];
      Numbers mine;
      for (std::size_t i = 0; i < (kind == OpKind::kAllGather ? own : total); ++i) mine.push_back(E::value(r, i));
      Numbers out(kind == OpKind::kReduceScatter ? own : total);
      if (kind == OpKind::kReduceScatter) {
        expected.emplace_back(sum.begin() + before, sum.begin() + before + static_cast<std::int64_t>(own));
      } else if (kind == OpKind::kAllReduce) {
        expected.push_back(sum);
        if (in_place) out = mine;
      } else {
        if (in_place) std::copy(mine.begin(), mine.end(), out.begin() + before);
        auto& joined = expected.emplace_back();
        for (std::size_t chunk = 0; chunk < counts.size(); ++chunk) {
          const auto& group = levels->groups[static_cast<std::size_t>(levels->group_of(r))];
          const int owner = hybrid() ? group[chunk] : static_cast<int>(chunk);
          for (std::int64_t i = 0; i < counts[chunk]; ++i)
            joined.push_back(E::value(owner, static_cast<std::size_t>(i)));
        }
      }
      send.push_back(std::move(mine));
      recv.push_back(std::move(out));
    }
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      auto& o = operations.emplace_back();
      o.kind = kind;
      o.dtype = E::kDType;
      o.reduce = op;
      o.count = static_cast<std::int64_t>(total);
      o.recv_counts = kind == OpKind::kAllReduce ? balanced_counts(o.count, size()) : counts;
      o.recv = reinterpret_cast<std::byte*>(recv[i].data());
      o.send = reinterpret_cast<std::byte*>(send[i].data());
      if (in_place && kind == OpKind::kAllReduce) o.send = o.recv;
      if (in_place && kind == OpKind::kAllGather) {
        o.send = o.recv + static_cast<std::int64_t>(sizeof(Number)) * offsets[static_cast<std::size_t>(shard(r))];
      }
      o.levels = levels;
    }
  }

  /// Bytes between groups of one rank each that has all of its group's chunks.
  std::int64_t between_groups() const {
    const auto bytes = operations[0].count * static_cast<std::int64_t>(sizeof(Number));
    const auto once = (levels->num_groups() - 1) * bytes;
    if (kind == OpKind::kAllReduce) return 2 * once;
    if (!hybrid()) return once;
    return kind == OpKind::kAllGather ? 0 : 2 * once;
  }
};

template <class E>
void run(Random& random, OpKind kind) {
  Case<E> test{
      std::make_shared<const Levels>(make_levels(random)), kind, E::kOps[pick(random, 0, 1)], {}, false, {}, {}};
  test.in_place = kind != OpKind::kReduceScatter && pick(random, 0, 1) == 0;
  const bool by_member = test.hybrid() && kind != OpKind::kAllReduce;
  const int size = test.size();
  test.counts = make_counts(random, static_cast<std::size_t>(by_member ? test.levels->group_size() : size));
  test.fill();
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
    schedules.push_back(plan(test.operations[static_cast<std::size_t>(r)], r, size, settings));
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
      if (std::ranges::find(late, r) == late.end()) schedules[static_cast<std::size_t>(r)]->finished();
    }
    if (!moved) moved = network.step();  // what a step that has begun meanwhile has sent
  }
  std::int64_t crossed = 0;
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      if (test.levels->group_of(from) != test.levels->group_of(to)) crossed += network.bytes(from, to);
    }
  }
  // Of what is small and reduced for all, each rank sends all at once.
  const bool for_all = kind == OpKind::kAllReduce || (test.hybrid() && kind == OpKind::kReduceScatter);
  const bool is_whole = for_all && settings.small_bytes > 0;
  if (!is_whole && crossed != test.between_groups()) {
    throw std::runtime_error(std::to_string(crossed) + " bytes went between groups in place of " +
                             std::to_string(test.between_groups()));
  }
  // Two steps of a track, of which each has a window of segments for every chunk, and both passes of a ring.
  const auto steps = 2 * std::max(test.levels->num_groups(), test.levels->group_size()) * test.levels->num_groups();
  if (settings.small_bytes == 0 && network.most_waiting() > 2 * steps * (settings.window + 1)) {
    throw std::runtime_error(std::to_string(network.most_waiting()) + " messages wait for one rank, at a window of " +
                             std::to_string(settings.window));
  }
  for (int r = 0; r < size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    if (!schedules[i]->finished() || !schedules[i]->drained()) throw std::runtime_error("nobody can go on");
    if (schedules[i]->bytes_left() != 0) throw std::runtime_error("bytes are still awaited after the end");
    if (test.recv[i] != test.expected[i]) throw std::runtime_error("a result is wrong");
  }
}

void expect_trouble(const std::vector<std::vector<std::vector<int>>>& given, const std::string& words) {
  std::vector<std::vector<std::int64_t>> all;
  for (const auto& groups : given) all.push_back(Levels{Levels::Kind::kTwoLevel, groups}.encoded());
  const auto trouble = trouble_with(all);
  if (words.empty() ? !trouble.empty() : trouble.find(words) == std::string::npos) {
    throw std::runtime_error("expected '" + words + "', not '" + trouble + "'");
  }
}

void check_troubles() {
  const auto alike = [](const std::vector<std::vector<int>>& groups) {
    return std::vector<std::vector<std::vector<int>>>(4, groups);
  };
  expect_trouble(alike({{0, 1}, {2, 3}}), "");
  expect_trouble(alike({{3, 1}, {0, 2}}), "");
  expect_trouble(alike({{0, 1, 2}, {3}}), "have 3 ranks and 1");
  expect_trouble(alike({{0, 1}}), "leave out rank 2");
  expect_trouble(alike({}), "leave out rank 0");
  expect_trouble(alike({{0, 1}, {2, 3}, {}}), "have 2 ranks and 0");
  expect_trouble(alike({{0, 1}, {1, 2}}), "name rank 1 twice");
  expect_trouble(alike({{0, 1}, {2, 4}}), "name rank 4, which there is not");
  auto one_differs = alike({{0, 1}, {2, 3}});
  one_differs[2] = {{0, 2}, {1, 3}};
  expect_trouble(one_differs, "rank 2 for two_level([[0, 2], [1, 3]])");
}

}  // namespace

int main(int argc, char** argv) {
  const auto seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  const OpKind kinds[] = {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllReduce};
  for (int round = 0; round < rounds; ++round) {
    for (const auto kind : kinds) {
      Random random(seed * 1'000'003 + static_cast<std::uint64_t>(round));
      try {
        if (round == 0) check_troubles();
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
