#include "requests.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "../signature.hpp"
#include "check.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {
namespace {

constexpr std::size_t kMostLandings = 32;

}  // namespace

void RequestTable::add(MPI_Request request, Pending pending) {
  requests_.push_back(request);
  pending_.push_back(std::move(pending));
}

std::unique_ptr<std::byte[]> RequestTable::landing() {
  if (landings_.empty()) {
    return std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(settings().segment_bytes));
  }
  auto last = std::move(landings_.back());
  landings_.pop_back();
  return last;
}

bool RequestTable::progress() {
  // MPI_Testsome progresses the library only when it finds nothing complete, and reports what that brought the next
  // time it is asked.
  if (!test() && !test()) return false;
  for (auto& done : done_) {
    const auto bytes = done.ended.bytes;
    if (!done.pending.transfer.is_send) {
      bytes_received_ += bytes;
      const auto* const memory = done.pending.landing ? done.pending.landing.get() : done.pending.target;
      if (done.ended.tag == failure_signature() && memory != nullptr) {
        const auto length = static_cast<std::size_t>(std::min(bytes, kMostOfAReason));
        done.ended.reason.assign(reinterpret_cast<const char*>(memory), length);
      }
    }
    if (done.pending.landing) {
      if (done.ended.error == MPI_SUCCESS && bytes == done.pending.transfer.bytes) {
        std::memcpy(done.pending.target, done.pending.landing.get(), static_cast<std::size_t>(bytes));
      }
      if (landings_.size() < kMostLandings) landings_.push_back(std::move(done.pending.landing));
    }
    done.pending.owner->complete(done.pending, done.ended);
  }
  return true;
}

bool RequestTable::test() {
  done_.clear();
  if (requests_.empty()) return false;
  const int count = static_cast<int>(requests_.size());
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int found = 0;
  const int code = MPI_Testsome(count, requests_.data(), &found, indices_.data(), statuses_.data());
  if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
  if (found <= 0) return false;
  for (int i = 0; i < found; ++i) {
    const auto index = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    const int error = code == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS;
    int bytes = 0;
    if (!pending_[index].transfer.is_send) {
      int cancelled = 0;
      MPI_Test_cancelled(&status, &cancelled);
      if (cancelled == 0) MPI_Get_count(&status, MPI_BYTE, &bytes);
    }
    done_.push_back({std::move(pending_[index]), {error, status.MPI_SOURCE, status.MPI_TAG, bytes}});
  }
  // From the back, so that the last entry moves into the gap and no index shifts.
  std::sort(indices_.begin(), indices_.begin() + found, std::greater<>());
  for (int i = 0; i < found; ++i) {
    const auto index = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    requests_[index] = requests_.back();
    pending_[index] = std::move(pending_.back());
    requests_.pop_back();
    pending_.pop_back();
  }
  return true;
}

void RequestTable::cancel_receives(const RequestOwner& owner) {
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i].owner == &owner && !pending_[i].transfer.is_send) MPI_Cancel(&requests_[i]);
  }
}

bool RequestTable::has(const RequestOwner& owner) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const Pending& p) { return p.owner == &owner; });
}

}  // namespace comm_core
