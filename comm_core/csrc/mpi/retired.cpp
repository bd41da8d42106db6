#include "retired.hpp"

#include <atomic>
#include <utility>

#include "check.hpp"

namespace comm_core {
namespace {

std::atomic<bool> keeps{false};

}  // namespace

void RetiredComms::keep() noexcept { keeps = true; }
bool RetiredComms::kept() noexcept { return keeps; }

void RetiredComms::add(MPI_Comm comm, MPI_Comm beside) {
  if (keeps) return;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  Pending pending;
  pending.owner = this;
  pending.is_send = true;
  pending.ticket = next_ticket_++;
  comms_.emplace(pending.ticket, std::pair{comm, beside});
  requests_.add(request, std::move(pending));
}

void RetiredComms::complete(const Pending& request, const Outcome& outcome) {
  auto [comm, beside] = comms_.extract(request.ticket).mapped();
  if (outcome.error != MPI_SUCCESS || keeps) return;
  // Local in Open MPI and MPICH, as the standard expects.
  MPI_Comm_free(&beside);
  MPI_Comm_free(&comm);
}

}  // namespace comm_core
