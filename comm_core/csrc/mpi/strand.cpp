#include "strand.hpp"

#include <algorithm>
#include <utility>

#include "../signature.hpp"
#include "check.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {
namespace {

constexpr std::size_t kMostDraining = 64;

}  // namespace

Strand::Strand(RequestTable& requests, MPI_Comm comm, Tags tags, int rank, OnFailure on_failure)
    : requests_(requests), comm_(comm), tags_(tags), rank_(rank), on_failure_(std::move(on_failure)) {}

void Strand::add(Item item) {
  if (!failure_) {
    waiting_.push_back(std::move(item));
    return;
  }
  item.memory.reset();
  if (item.work) item.work->finish(failure_);
}

bool Strand::settle() {
  bool moved = false;
  try {
    while (!failure_) {
      if (running_) {
        if (!running_->schedule->finished()) break;
        finish(std::exchange(running_, nullptr));
      } else if (may_start()) {
        start_next();
      } else {
        break;
      }
      moved = true;
    }
  } catch (...) {
    on_failure_(std::current_exception());
    return true;
  }
  return moved;
}

bool Strand::may_start() const {
  // A send may well be far ahead of its receive: MPI keeps what is small.
  return !waiting_.empty() && (tags_ == Tags::kStrand || draining_.size() < kMostDraining);
}

void Strand::start_next() {
  auto next = std::make_unique<Running>(Running{std::move(waiting_.front()), nullptr});
  waiting_.pop_front();
  if (!next->item.make) return finish(std::move(next));
  running_ = std::move(next);
  running_->schedule = running_->item.make();
  running_->schedule->start(*this);
}

void Strand::finish(std::unique_ptr<Running> running) {
  std::exception_ptr error;
  try {
    if (running->item.done) running->item.done();
  } catch (...) {
    error = std::current_exception();
  }
  running->item.memory.reset();
  if (running->item.work) running->item.work->finish(error);
  let_drain(std::move(running));
  if (error) std::rethrow_exception(error);
}

void Strand::let_drain(std::unique_ptr<Running> running) {
  // Peers may not have taken its last messages yet, which MPI will report to it also after an error.
  if (!running->schedule || running->schedule->drained()) return;
  auto& place = running->draining;
  place = draining_.insert(draining_.end(), std::move(running));
}

void Strand::fail(std::exception_ptr error, std::exception_ptr later) {
  if (failure_) return;
  failure_ = later;
  if (running_) {
    if (running_->item.failed) running_->item.failed();
    if (running_->item.work) running_->item.work->finish(error);
    let_drain(std::exchange(running_, nullptr));
  }
  for (auto& item : std::exchange(waiting_, {})) {
    item.memory.reset();
    if (item.work) item.work->finish(later);
  }
  requests_.cancel_receives(*this);
}

void Strand::forget_if_drained(const Running& running) {
  if (running.draining && running.schedule->drained()) draining_.erase(*running.draining);
}

std::string Strand::title(const Running& running, const char* verb, int peer, std::int64_t bytes) const {
  const std::string what = running.item.work ? running.item.work->describe() : std::string("letter");
  return what + ": rank " + std::to_string(rank_) + " " + verb + " rank " + std::to_string(peer) + ", " +
         std::to_string(bytes) + " bytes";
}

void Strand::send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
                  std::int64_t ticket) {
  const auto post = mode == SendMode::kMatched ? MPI_Issend : MPI_Isend;
  MPI_Request request = MPI_REQUEST_NULL;
  check(post(data, static_cast<int>(bytes), MPI_BYTE, peer, running_->item.tag, comm_, &request),
        [&] { return title(*running_, "sending to", peer, bytes); });
  requests_.add(request, {this, running_.get(), &from, ticket, peer, bytes, true, nullptr, nullptr});
}

void Strand::receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) {
  // See [Note: room for the longest].
  const auto room = std::max(bytes, settings().segment_bytes);
  auto landing = bytes < room ? requests_.landing() : nullptr;
  const int tag = tags_ == Tags::kSignature ? MPI_ANY_TAG : running_->item.tag;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(landing ? landing.get() : data, static_cast<int>(room), MPI_BYTE, peer, tag, comm_, &request),
        [&] { return title(*running_, "receiving from", peer, bytes); });
  requests_.add(request, {this, running_.get(), &to, ticket, peer, bytes, false, data, std::move(landing)});
}

void Strand::complete(const Pending& request, const Outcome& outcome) {
  const int error = outcome.error;
  const auto bytes = outcome.bytes;
  if (failure_) {
    request.schedule->dropped();
    return forget_if_drained(*request.running);
  }
  const auto doing = [&] {
    return title(*request.running, request.is_send ? "sending to" : "receiving from", request.peer, request.bytes);
  };
  bool reported = false;
  try {
    const bool came = !request.is_send && (error == MPI_SUCCESS || error == MPI_ERR_TRUNCATE);
    if (came && tags_ == Tags::kSignature && outcome.tag == failure_signature()) {
      throw PeerFailure(doing() + ", which sends nothing any more: ", outcome.reason);
    }
    if (came && outcome.tag != request.running->item.tag) {
      throw TransportError(doing() + ": expected " + describe_signature(request.running->item.tag) + ", received " +
                           describe_signature(outcome.tag) +
                           "; all ranks of a communicator have to issue the same operations in the same order");
    }
    if (error == MPI_ERR_TRUNCATE || (error == MPI_SUCCESS && !request.is_send && bytes != request.bytes)) {
      throw TransportError(doing() + " expected, " + std::to_string(bytes) +
                           " received; the ranks disagree about the order or the sizes of operations");
    }
    check(error, doing);
    reported = true;
    if (request.is_send) {
      request.schedule->sent(request.ticket);
      return forget_if_drained(*request.running);
    }
    if (request.running->item.work) request.running->item.work->advance(bytes);
    try {
      request.schedule->received(request.ticket);
    } catch (const MpiError&) {
      throw;
    } catch (const TransportError& e) {
      throw TransportError(doing() + ": " + e.what());
    }
    forget_if_drained(*request.running);
  } catch (...) {
    if (!reported) request.schedule->dropped();
    forget_if_drained(*request.running);
    on_failure_(std::current_exception());
  }
}

}  // namespace comm_core
