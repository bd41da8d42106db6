// Ranks in groups of equal size, such as those of one host each, and what a communicator does by them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] comm_core {

/// The ranks of a communicator, each in one of `groups`. Member i of every group forms a line of its own across them.
struct Levels {
  enum class Kind {
    kTwoLevel,  ///< reduce_scatter, all_gather and all_reduce as ever, in two steps: what leaves a group leaves it once
    kHybrid,    ///< shards are those of a group's members: see Operation
  };
  Kind kind = Kind::kTwoLevel;
  std::vector<std::vector<int>> groups;

  int num_groups() const noexcept { return static_cast<int>(groups.size()); }
  int group_size() const noexcept { return static_cast<int>(groups.front().size()); }
  /// The number of the group that `rank` is in, and its own number there.
  int group_of(int rank) const;
  int member_of(int rank) const;
  /// Member `member` of every group, in the order of the groups.
  std::vector<int> line(int member) const;

  /// All of it in numbers, by which ranks compare what they were given.
  std::vector<std::int64_t> encoded() const;
};

/// Why ranks that give these Levels, encoded and in rank order, cannot have them; empty: they can. The same text on all
/// ranks. Pure.
std::string trouble_with(std::span<const std::vector<std::int64_t>> given);

}  // namespace comm_core
