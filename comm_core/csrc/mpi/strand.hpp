// A strand whose messages go over one communicator of MPI.
#pragma once

#include <mpi.h>

#include "../engine/strand.hpp"
#include "requests.hpp"

namespace comm_core {

/// The signatures are the tags. Where they say what an operation is, messages with any tag are taken.
class MpiStrand final : public Strand, public RequestOwner {
 public:
  MpiStrand(RequestTable& requests, MPI_Comm comm, Signatures signatures, int rank, OnFailure on_failure);

  void complete(const Pending& request, const Ended& ended) override;

 protected:
  void post_send(const Transfer& transfer, const std::byte* data, SendMode mode, int signature) override;
  void post_receive(const Transfer& transfer, std::byte* data, int signature) override;
  void give_up() override { requests_.cancel_receives(*this); }

 private:
  RequestTable& requests_;
  MPI_Comm comm_;
};

}  // namespace comm_core
