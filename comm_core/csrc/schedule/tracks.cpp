#include "tracks.hpp"

#include <algorithm>

namespace comm_core {

Tracks::Tracks(Track first, Track second, Scratch scratch)
    : scratch_(std::move(scratch)), progress_{Progress{std::move(first)}, Progress{std::move(second)}} {}

void Tracks::on_start() {
  for (auto& at : progress_) at.ranks.emplace(transport(), at.track.members);
  finished();
}

bool Tracks::finished() {
  for (bool moved = true; moved;) {
    moved = advance(progress_[0], progress_[1].num_over);
    moved |= advance(progress_[1], progress_[0].num_over);
  }
  return progress_[0].at_end() && progress_[1].at_end();
}

bool Tracks::advance(Progress& at, std::size_t num_over_there) {
  if (at.runs()) {
    if (!at.begun.back()->finished()) return false;
    ++at.num_over;
    return true;
  }
  std::erase_if(at.begun, [](const auto& schedule) { return schedule->drained(); });
  if (at.at_end() || at.begun.size() > 1) return false;
  Step& next = at.track.steps[at.num_begun];
  if (num_over_there < next.after) return false;
  at.begun.push_back(std::exchange(next.make, nullptr)());
  ++at.num_begun;
  at.begun.back()->start(*at.ranks);
  return true;
}

bool Tracks::drained() const {
  return std::ranges::all_of(progress_, [](const Progress& at) {
    return std::ranges::all_of(at.begun, [](const auto& schedule) { return schedule->drained(); });
  });
}

std::int64_t Tracks::bytes_left() const {
  std::int64_t sum = 0;
  for (const auto& at : progress_) {
    if (at.runs()) sum += at.begun.back()->bytes_left();
    for (auto i = at.num_begun; i < at.track.steps.size(); ++i) sum += at.track.steps[i].bytes;
  }
  return sum;
}

}  // namespace comm_core
