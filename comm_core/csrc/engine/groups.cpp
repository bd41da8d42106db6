#include "groups.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "comm_core/work.hpp"
#include "group.hpp"

namespace comm_core {
namespace {

std::shared_ptr<Work> nobodys() { return std::make_shared<Work>("close", "", "", 0); }

}  // namespace

void Groups::add(std::shared_ptr<Group> group) {
  const auto& added = all_[group.get()] = group;
  if (closing_) added->close(nobodys());
}

bool Groups::settle() {
  bool moved = false;
  for (std::size_t i = 0; i < awake_.size();) {  // who is woken meanwhile stands at the end
    Group* const group = awake_[i];
    moved |= group->settle();
    if (!group->at_rest()) {
      ++i;
      continue;
    }
    awake_[i] = awake_.back();
    awake_.pop_back();
    group->rest();
    if (group->over()) all_.erase(group);
  }
  return moved;
}

void Groups::fail(const std::exception_ptr& error) {
  for (auto& [key, group] : all_) group->fail(error);
}

void Groups::close() {
  closing_ = true;
  for (auto& [key, group] : all_) {
    if (!group->closed() && !group->closing()) group->close(nobodys());
  }
}

bool Groups::closed() const {
  return std::ranges::all_of(all_, [](const auto& entry) { return entry.second->closed(); });
}

}  // namespace comm_core
