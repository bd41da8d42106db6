#include "strand.hpp"

#include <utility>

#include "../signature.hpp"

namespace comm_core {
namespace {

constexpr std::size_t kMostDraining = 64;

}  // namespace

Strand::Strand(Signatures signatures, int rank, OnFailure on_failure)
    : signatures_(signatures), rank_(rank), on_failure_(std::move(on_failure)) {}

Strand::~Strand() = default;

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
  // A send may well be far ahead of its receive: what is small is kept for it.
  return !waiting_.empty() && (signatures_ == Signatures::kAny || draining_.size() < kMostDraining);
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
  // Peers may not have taken its last messages yet, which will be reported to it also after an error.
  if (!running->schedule || running->schedule->drained()) return;
  auto& place = running->draining;
  place = draining_.insert(draining_.end(), std::move(running));
}

void Strand::fail(std::exception_ptr error, std::exception_ptr later) {
  if (failure_) return;
  failure_ = later;
  give_up();  // before works end: whoever waits for one may write to its memory then
  if (running_) {
    if (running_->item.failed) running_->item.failed();
    if (running_->item.work) running_->item.work->finish(error);
    let_drain(std::exchange(running_, nullptr));
  }
  for (auto& item : std::exchange(waiting_, {})) {
    item.memory.reset();
    if (item.work) item.work->finish(later);
  }
}

void Strand::forget_if_drained(const Running& running) {
  if (running.draining && running.schedule->drained()) draining_.erase(*running.draining);
}

std::string Strand::title(const Transfer& transfer) const {
  const auto& work = transfer.running->item.work;
  return (work ? work->describe() : std::string("letter")) + ": rank " + std::to_string(rank_) +
         (transfer.is_send ? " sending to" : " receiving from") + " rank " + std::to_string(transfer.peer) + ", " +
         std::to_string(transfer.bytes) + " bytes";
}

void Strand::send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
                  std::int64_t ticket) {
  post_send({this, running_.get(), &from, ticket, peer, bytes, true}, data, mode, running_->item.signature);
}

void Strand::receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) {
  post_receive({this, running_.get(), &to, ticket, peer, bytes, false}, data, running_->item.signature);
}

void Strand::require_as_meant(const Transfer& transfer, const Outcome& outcome) const {
  if (outcome.reason) throw PeerFailure(title(transfer) + ", which sends nothing any more: ", *outcome.reason);
  if (outcome.error) std::rethrow_exception(outcome.error);
  if (transfer.is_send) return;
  const int expected = transfer.running->item.signature;
  if (outcome.signature != expected) {
    throw TransportError(title(transfer) + ": expected " + describe_signature(expected) + ", received " +
                         describe_signature(outcome.signature) +
                         "; all ranks of a communicator have to issue the same operations in the same order");
  }
  if (outcome.bytes != transfer.bytes) {
    throw TransportError(title(transfer) + " expected, " + std::to_string(outcome.bytes) +
                         " received; the ranks disagree about the order or the sizes of operations");
  }
}

void Strand::complete(const Transfer& transfer, const Outcome& outcome) {
  if (failure_) return dropped(transfer);
  bool reported = false;
  try {
    require_as_meant(transfer, outcome);
    reported = true;
    if (transfer.is_send) {
      transfer.schedule->sent(transfer.ticket);
      return forget_if_drained(*transfer.running);
    }
    if (transfer.running->item.work) transfer.running->item.work->advance(outcome.bytes);
    try {
      transfer.schedule->received(transfer.ticket);
    } catch (const MpiError&) {
      throw;
    } catch (const TransportError& e) {
      throw TransportError(title(transfer) + ": " + e.what());
    }
    forget_if_drained(*transfer.running);
  } catch (...) {
    if (!reported) transfer.schedule->dropped();
    const auto error = std::current_exception();
    forget_if_drained(*transfer.running);
    on_failure_(error);
  }
}

void Strand::dropped(const Transfer& transfer) {
  transfer.schedule->dropped();
  forget_if_drained(*transfer.running);
}

}  // namespace comm_core
