// Groups that share ranks, all of which want to enter something that blocks a rank until its whole group is there, as
// MPI_Comm_split does: in whatever order ranks come to whichever group, all must get through.
//
//     turn_test SEED ROUNDS
#include "schedule/turn.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "network.hpp"
#include "schedule/planner.hpp"
#include "schedule/sequence.hpp"

using namespace comm_core;

namespace {

/// A rank of the job, whose engine does nothing while it is inside.
struct Process {
  TurnLock lock;
  int inside = -1;  // the group it waits in
};

class Group {
 public:
  Group(int number, std::vector<int> members, std::vector<Process>& processes, Random& random)
      : number_(number),
        members_(std::move(members)),
        processes_(processes),
        network_(size(), pick(random, 0, 1) == 0, -1, random),
        late_(members_.size()) {
    network_.awake = [this](int rank) { return process(rank).inside < 0; };
    std::iota(late_.begin(), late_.end(), 0);
    std::ranges::shuffle(late_, random);
    std::vector<int> sorted(members_);
    std::ranges::sort(sorted);
    for (int rank = 0; rank < size(); ++rank) {
      const auto at = std::ranges::find(sorted, members_[static_cast<std::size_t>(rank)]) - sorted.begin();
      const auto rank_at = [&](std::ptrdiff_t place) {
        if (place < 0 || place >= std::ssize(sorted)) return -1;
        return static_cast<int>(std::ranges::find(members_, sorted[static_cast<std::size_t>(place)]) -
                                members_.begin());
      };
      holders_.push_back(std::make_shared<TurnLock::Holder>(process(rank).lock));
      Sequence::Parts parts;
      parts.push_back(plan(Operation{}, rank, size(), settings_));
      parts.push_back(std::make_unique<Turn>(holders_.back(), rank_at(at - 1), rank_at(at + 1)));
      parts.push_back(plan(Operation{}, rank, size(), settings_));
      ends_.push_back(std::make_unique<Endpoint>(network_, rank));
      sequences_.push_back(std::make_unique<Sequence>(std::move(parts)));
    }
    entered_.resize(members_.size());
  }

  /// Lets one more rank begin; false if all have, or the next one is inside another group's.
  bool begin() {
    if (late_.empty() || process(late_.back()).inside >= 0) return false;
    const auto rank = static_cast<std::size_t>(late_.back());
    late_.pop_back();
    sequences_[rank]->start(*ends_[rank]);
    return true;
  }

  /// Lets one thing happen; false if nothing can.
  bool step() {
    bool moved = network_.step();
    for (int rank = 0; rank < size(); ++rank) {
      const auto i = static_cast<std::size_t>(rank);
      const bool began = std::ranges::find(late_, rank) == late_.end();
      if (!began || entered_[i] || process(rank).inside >= 0 || !sequences_[i]->finished()) continue;
      entered_[i] = moved = true;
      process(rank).inside = number_;
    }
    if (!moved) moved = network_.step();  // the next part of a sequence
    if (!over_ && std::ranges::all_of(entered_, [](bool entered) { return entered; })) {
      over_ = moved = true;
      for (int rank = 0; rank < size(); ++rank) {
        process(rank).inside = -1;
        holders_[static_cast<std::size_t>(rank)]->give_back();
      }
    }
    return moved;
  }

  bool over() const { return over_; }

 private:
  int size() const { return static_cast<int>(members_.size()); }
  Process& process(int rank) { return processes_[static_cast<std::size_t>(members_[static_cast<std::size_t>(rank)])]; }

  int number_;
  std::vector<int> members_;  // ranks of the job, by rank of the group
  std::vector<Process>& processes_;
  Settings settings_;
  Network network_;
  std::vector<int> late_;
  std::vector<std::shared_ptr<TurnLock::Holder>> holders_;
  std::vector<std::unique_ptr<Endpoint>> ends_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<bool> entered_;
  bool over_ = false;
};

void run(Random& random) {
  const int num_ranks = pick(random, 2, 6);
  std::vector<Process> processes(static_cast<std::size_t>(num_ranks));
  std::vector<std::unique_ptr<Group>> groups;
  for (int number = pick(random, 2, 5); number-- > 0;) {
    std::vector<int> members(static_cast<std::size_t>(num_ranks));
    std::iota(members.begin(), members.end(), 0);
    std::ranges::shuffle(members, random);
    members.resize(static_cast<std::size_t>(pick(random, 2, num_ranks)));
    groups.push_back(std::make_unique<Group>(number, std::move(members), processes, random));
  }
  for (bool moved = true; moved;) {
    moved = false;
    std::ranges::shuffle(groups, random);
    for (const auto& group : groups) {
      if (pick(random, 0, 2) == 0) moved |= group->begin();
      if (pick(random, 0, 1) == 0) moved |= group->step();
    }
    // Nobody was asked, or nobody can: now everybody.
    for (auto at = groups.begin(); !moved && at != groups.end(); ++at) moved = (*at)->begin() || (*at)->step();
  }
  if (!std::ranges::all_of(groups, [](const auto& group) { return group->over(); })) {
    throw std::runtime_error("nobody can go on");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  for (int round = 0; round < rounds; ++round) {
    Random random(seed * 1'000'003 + static_cast<std::uint64_t>(round));
    try {
      run(random);
    } catch (const std::exception& e) {
      std::printf("seed %llu, round %d: %s\n", static_cast<unsigned long long>(seed), round, e.what());
      return 1;
    }
  }
  std::printf("%d rounds passed\n", rounds);
  return 0;
}
