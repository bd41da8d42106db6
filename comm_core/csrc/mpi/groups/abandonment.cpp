#include "abandonment.hpp"

#include <utility>

#include "../check.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {

MpiAbandonment::MpiAbandonment(RequestTable& requests, MPI_Comm comm, MPI_Comm beside, std::shared_ptr<Work> work)
    : Abandonment(std::move(work)),
      requests_(requests),
      comm_(comm),
      beside_(beside),
      last_change_(std::chrono::steady_clock::now()) {}

bool MpiAbandonment::settle(bool sent) {
  if (over()) return false;
  bool moved = false;
  try {
    moved = take(comm_);
    moved |= take(beside_);
    if (sent && !std::exchange(barrier_posted_, true)) {
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Ibarrier(beside_, &request), "MPI_Ibarrier");
      Pending pending;
      pending.owner = this;
      pending.transfer.is_send = true;
      requests_.add(request, std::move(pending));
      moved = true;
    }
  } catch (...) {
    finish(std::current_exception());
    return true;
  }
  const auto now = std::chrono::steady_clock::now();
  if (moved) last_change_ = now;
  if (quiet() || now - last_change_ > settings().exit_patience) {
    finish();
    moved = true;
  }
  return moved;
}

bool MpiAbandonment::take(MPI_Comm comm) {
  bool found = false;
  for (;;) {
    int is_there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &is_there, &message, &status), "MPI_Improbe");
    if (is_there == 0) return found;
    found = true;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    Pending pending;
    pending.owner = this;
    pending.transfer.ticket = next_ticket_++;
    auto& memory = messages_[pending.transfer.ticket];
    memory.resize(static_cast<std::size_t>(bytes));
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Imrecv(memory.data(), bytes, MPI_BYTE, &message, &request), "MPI_Imrecv");
    requests_.add(request, std::move(pending));
  }
}

void MpiAbandonment::complete(const Pending& request, const Ended&) {
  last_change_ = std::chrono::steady_clock::now();
  if (request.transfer.is_send) {
    barrier_done_ = true;
  } else {
    messages_.erase(request.transfer.ticket);
  }
}

}  // namespace comm_core
