#include "connector.hpp"

#include <utility>

#include "../../schedule/flow.hpp"
#include "../check.hpp"
#include "blocking.hpp"
#include "comm_core/settings.hpp"
#include "group.hpp"
#include "job_order.hpp"

namespace comm_core {

Connector::Connector(MpiContext& context, MPI_Comm comm, std::shared_ptr<Work> work, HandOver hand_over)
    : context_(context),
      comm_(comm),
      work_(std::move(work)),
      hand_over_(std::move(hand_over)),
      turn_(context.turn_lock) {}

bool Connector::settle() {
  if (under_way_ || over()) return false;
  try {
    if (order_.empty()) {
      begin();
    } else if (num_tokens_ == order_.size()) {
      make();
    } else {
      const int next = order_[num_tokens_];
      if (next == rank_ && !turn_.take()) return false;
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = MPI_Ibcast(&token_, 1, MPI_BYTE, next, comm_, &request);
      follow(code, "MPI_Ibcast", request);
    }
  } catch (...) {
    work_->finish(std::current_exception());
  }
  return true;
}

void Connector::begin() {
  int is_inter = 0;
  check(MPI_Comm_test_inter(comm_, &is_inter), "MPI_Comm_test_inter");
  if (is_inter != 0) throw Unsupported("an intercommunicator has no ranks of its own to connect");
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  order_ = in_job_order(comm_);
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Ibarrier(comm_, &request);
  follow(code, "MPI_Ibarrier", request);
}

void Connector::follow(int code, const char* call, MPI_Request request) {
  check(code, call);
  Pending pending;
  pending.owner = this;
  pending.transfer.is_send = true;
  context_.requests.add(request, std::move(pending));
  under_way_ = true;
}

void Connector::complete(const Pending&, const Ended& ended) {
  under_way_ = false;
  if (std::exchange(gathered_, true)) ++num_tokens_;
  if (ended.error == MPI_SUCCESS) return;
  work_->finish(std::make_exception_ptr(MpiError("connect: " + mpi_error_text(ended.error), ended.error)));
}

void Connector::make() {
  const TurnLock::Return at_the_end(turn_);
  Settings settings = comm_core::settings();
  settings.window = window_over(latency(comm_, turn_), settings);
  hand_over_(MpiGroup::make(context_, duplicate(comm_, turn_), turn_, settings));
  work_->finish();
}

}  // namespace comm_core
