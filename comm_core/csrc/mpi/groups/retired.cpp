#include "retired.hpp"

#include <atomic>
#include <utility>

#include "../check.hpp"

namespace comm_core {
namespace {

std::atomic<bool> keeps{false};

}  // namespace

void RetiredComms::keep() noexcept { keeps = true; }

void RetiredComms::add(MPI_Comm comm, MPI_Comm beside, Remains remains) {
  const auto ticket = next_ticket_++;
  auto& comms = comms_[ticket] = {comm, beside, {remains.failed ? 1 : 0, remains.letters}, {}};
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Iallreduce(comms.here.data(), comms.everywhere.data(), static_cast<int>(comms.here.size()),
                                  MPI_INT64_T, MPI_SUM, comm, &request);
  if (code != MPI_SUCCESS) {
    comms_.erase(ticket);
    if (remains.failed) return;  // perhaps because MPI has
    check(code, "MPI_Iallreduce");
  }
  if (!remains.failed) ++num_awaited_;
  Pending pending;
  pending.owner = this;
  pending.transfer.is_send = true;
  pending.transfer.ticket = ticket;
  requests_.add(request, std::move(pending));
}

void RetiredComms::complete(const Pending& request, const Ended& ended) {
  const auto node = comms_.extract(request.transfer.ticket);
  auto& comms = node.mapped();
  if (comms.here[0] == 0) --num_awaited_;
  if (ended.error != MPI_SUCCESS || keeps || comms.everywhere != decltype(comms.everywhere){}) return;
  // Local in Open MPI and MPICH, as the standard expects.
  MPI_Comm_free(&comms.beside);
  MPI_Comm_free(&comms.comm);
}

}  // namespace comm_core
