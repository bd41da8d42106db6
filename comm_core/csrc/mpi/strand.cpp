#include "strand.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "../signature.hpp"
#include "check.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {

MpiStrand::MpiStrand(RequestTable& requests, MPI_Comm comm, Signatures signatures, int rank, OnFailure on_failure)
    : Strand(signatures, rank, std::move(on_failure)), requests_(requests), comm_(comm) {}

void MpiStrand::post_send(const Transfer& transfer, const std::byte* data, SendMode mode, int signature) {
  const auto post = mode == SendMode::kMatched ? MPI_Issend : MPI_Isend;
  MPI_Request request = MPI_REQUEST_NULL;
  check(post(data, static_cast<int>(transfer.bytes), MPI_BYTE, transfer.peer, signature, comm_, &request),
        [&] { return title(transfer); });
  requests_.add(request, {this, transfer, nullptr, nullptr});
}

void MpiStrand::post_receive(const Transfer& transfer, std::byte* data, int signature) {
  // See [Note: room for the longest].
  const auto room = std::max(transfer.bytes, settings().segment_bytes);
  auto landing = transfer.bytes < room ? requests_.landing() : nullptr;
  const int tag = signatures() == Signatures::kOperation ? MPI_ANY_TAG : signature;
  MPI_Request request = MPI_REQUEST_NULL;
  check(
      MPI_Irecv(landing ? landing.get() : data, static_cast<int>(room), MPI_BYTE, transfer.peer, tag, comm_, &request),
      [&] { return title(transfer); });
  requests_.add(request, {this, transfer, data, std::move(landing)});
}

void MpiStrand::complete(const Pending& request, const Ended& ended) {
  const Transfer& transfer = request.transfer;
  Outcome outcome;
  outcome.signature = ended.tag;
  outcome.bytes = ended.bytes;
  if (!transfer.is_send && ended.error == MPI_ERR_TRUNCATE) {
    outcome.bytes = std::max(outcome.bytes, transfer.bytes + 1);  // how many more, MPI does not say
  } else if (ended.error != MPI_SUCCESS) {
    const MpiError error(
        title(transfer) + ": " + mpi_error_text(ended.error) + " (MPI code " + std::to_string(ended.error) + ")",
        ended.error);
    outcome.error = std::make_exception_ptr(error);
  } else if (!transfer.is_send && signatures() == Signatures::kOperation && ended.tag == failure_signature()) {
    outcome.reason = ended.reason;
  }
  Strand::complete(transfer, outcome);
}

}  // namespace comm_core
