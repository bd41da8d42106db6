#include "comm_core/levels.hpp"

#include <algorithm>
#include <cstddef>
#include <set>

namespace comm_core {
namespace {

constexpr std::size_t kMostShown = 200;

Levels decoded(const std::vector<std::int64_t>& numbers) {
  Levels levels;
  levels.kind = static_cast<Levels::Kind>(numbers[0]);
  std::size_t at = 1;
  while (at < numbers.size()) {
    const auto count = static_cast<std::size_t>(numbers[at++]);
    auto& group = levels.groups.emplace_back();
    for (std::size_t i = 0; i < count; ++i) group.push_back(static_cast<int>(numbers[at++]));
  }
  return levels;
}

std::string shown(const std::vector<std::vector<int>>& groups) {
  std::string text = "[";
  for (const auto& group : groups) {
    if (text.size() > kMostShown) return text + ", ...]";
    text += text.size() > 1 ? ", [" : "[";
    for (std::size_t i = 0; i < group.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(group[i]);
    text += "]";
  }
  return text + "]";
}

std::string name_of(Levels::Kind kind) { return kind == Levels::Kind::kTwoLevel ? "two_level" : "hybrid"; }

/// Where these groups are no partition of so many ranks into groups of one size.
std::string trouble_in(const std::vector<std::vector<int>>& groups, int size) {
  const std::string all = "the groups " + shown(groups);
  const std::string remedy = "; each of the " + std::to_string(size) + " ranks is in one group, and all have one size";
  std::set<int> found;
  for (const auto& group : groups) {
    for (const int rank : group) {
      const std::string named = "rank " + std::to_string(rank);
      if (rank < 0 || rank >= size) return all + " name " + named + ", which there is not" + remedy;
      if (!found.insert(rank).second) return all + " name " + named + " twice" + remedy;
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    if (!found.contains(rank)) return all + " leave out rank " + std::to_string(rank) + remedy;
  }
  for (const auto& group : groups) {
    if (group.size() == groups.front().size()) continue;
    return all + " have " + std::to_string(groups.front().size()) + " ranks and " + std::to_string(group.size()) +
           remedy;
  }
  return "";
}

}  // namespace

int Levels::group_of(int rank) const {
  const auto holds = [rank](const auto& group) { return std::ranges::find(group, rank) != group.end(); };
  return static_cast<int>(std::ranges::find_if(groups, holds) - groups.begin());
}

int Levels::member_of(int rank) const {
  const auto& group = groups[static_cast<std::size_t>(group_of(rank))];
  return static_cast<int>(std::ranges::find(group, rank) - group.begin());
}

std::vector<int> Levels::line(int member) const {
  std::vector<int> ranks;
  for (const auto& group : groups) ranks.push_back(group[static_cast<std::size_t>(member)]);
  return ranks;
}

std::vector<std::int64_t> Levels::encoded() const {
  std::vector<std::int64_t> numbers{static_cast<std::int64_t>(kind)};
  for (const auto& group : groups) {
    numbers.push_back(static_cast<std::int64_t>(group.size()));
    numbers.insert(numbers.end(), group.begin(), group.end());
  }
  return numbers;
}

std::string trouble_with(std::span<const std::vector<std::int64_t>> given) {
  const auto first = decoded(given.front());
  for (std::size_t rank = 1; rank < given.size(); ++rank) {
    if (given[rank] == given.front()) continue;
    const auto other = decoded(given[rank]);
    return "rank 0 asks for " + name_of(first.kind) + "(" + shown(first.groups) + ") and rank " + std::to_string(rank) +
           " for " + name_of(other.kind) + "(" + shown(other.groups) + "); all ranks give the same groups";
  }
  const auto trouble = trouble_in(first.groups, static_cast<int>(given.size()));
  return trouble.empty() ? "" : name_of(first.kind) + ": " + trouble;
}

}  // namespace comm_core
