#include "group.hpp"

#include <algorithm>
#include <deque>
#include <tuple>
#include <utility>

#include "../../schedule/planner.hpp"
#include "../../schedule/sequence.hpp"
#include "../../schedule/turn.hpp"
#include "../../signature.hpp"
#include "../check.hpp"
#include "blocking.hpp"
#include "comm_core/settings.hpp"
#include "job_order.hpp"

namespace comm_core {
namespace {

constexpr std::chrono::seconds kMailPatience{1};

MPI_Comm returning_errors(MPI_Comm comm) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

int largest_tag() {
  int* largest = nullptr;
  int is_set = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &is_set), "MPI_Comm_get_attr");
  constexpr int kLeast = 32767;  // of any MPI
  return is_set != 0 ? *largest : kLeast;
}

void refuse(const std::shared_ptr<Work>& work, KeepAlive memory = nullptr) {
  memory.reset();
  work->finish(std::make_exception_ptr(InvalidUsage(work->title() + ": the communicator is closed")));
}

/// What every operation ends with that comes after the one that has failed with `error`.
std::exception_ptr after(const std::exception_ptr& error) {
  const std::string about = "the communicator has failed before, so this operation was not begun; its first failure: ";
  try {
    std::rethrow_exception(error);
  } catch (const MpiError& e) {
    return std::make_exception_ptr(MpiError(about + e.what(), e.code()));
  } catch (const std::exception& e) {
    return std::make_exception_ptr(TransportError(about + e.what()));
  }
}

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure& e) {
    return e.reason();
  } catch (const std::exception& e) {
    return e.what();
  }
}

/// The ranks before and after this one in the order of the whole job; -1: none.
std::pair<int, int> neighbours(MPI_Comm comm, int rank) {
  const auto order = in_job_order(comm);
  const auto at = std::ranges::find(order, rank);
  return {at != order.begin() ? *(at - 1) : -1, at + 1 != order.end() ? *(at + 1) : -1};
}

}  // namespace

std::shared_ptr<MpiGroup> MpiGroup::make(MpiContext& context, MPI_Comm comm, const TurnLock::Holder& turn,
                                         const Settings& settings) {
  MPI_Comm beside = MPI_COMM_NULL;
  try {
    beside = duplicate(comm, turn);
    auto group = std::make_shared<MpiGroup>(context, comm, beside, settings);
    context.groups.emplace(group.get(), group);
    if (context.closing) group->close(std::make_shared<Work>("close", "", "", 0));
    return group;
  } catch (...) {
    if (beside != MPI_COMM_NULL) MPI_Comm_free(&beside);
    MPI_Comm_free(&comm);
    throw;
  }
}

MpiGroup::MpiGroup(MpiContext& context, MPI_Comm comm, MPI_Comm beside, const Settings& settings)
    : context_(context),
      settings_(settings),
      comm_(returning_errors(comm)),
      beside_(returning_errors(beside)),
      largest_tag_(largest_tag()),
      letters_(std::make_shared<Letterbox>(context.readers)) {
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  std::tie(before_, after_) = neighbours(comm_, rank_);
  const auto on_failure = [this](std::exception_ptr error) { fail_here(error); };
  collectives_ = std::make_unique<Strand>(context_.requests, comm_, Strand::Tags::kSignature, rank_, on_failure);
  mailbox_ = std::make_unique<Mailbox>(context_.requests, beside_, rank_, letters_, on_failure, [this] { wake(); });
  mailbox_->open();
}

void MpiGroup::wake() {
  if (!std::exchange(awake_, true)) context_.awake.push_back(this);
}

Strand& MpiGroup::message_strand(const Operation& operation) {
  const bool sends = operation.kind == OpKind::kSend;
  auto& found = messages_[{operation.tag, {operation.peer, sends}}];
  if (!found) {
    found = std::make_unique<Strand>(context_.requests, beside_, Strand::Tags::kStrand, rank_,
                                     [this](std::exception_ptr error) { fail_here(error); });
    if (failure_) found->fail(failure_, failure_);
  }
  return *found;
}

void MpiGroup::submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) {
  if (shut()) return refuse(work, std::move(memory));
  wake();
  const bool is_message = operation.kind == OpKind::kSend || operation.kind == OpKind::kReceive;
  Strand& strand = is_message ? message_strand(operation) : *collectives_;
  // Here and not when its turn comes: the operation ahead has the wire meanwhile.
  operation.narrow();
  const auto shared = std::make_shared<Operation>(std::move(operation));
  const int tag = is_message ? Mailbox::kNumTags + shared->tag : signature_of(*shared, largest_tag_);
  strand.add(
      {tag, [shared, rank = rank_, size = size_, settings = settings_] { return plan(*shared, rank, size, settings); },
       std::move(work), std::move(memory), [shared] { shared->widen(); }});
}

void MpiGroup::split(std::optional<int> color, int key, std::shared_ptr<Work> work,
                     std::function<void(std::shared_ptr<MpiGroup>)> hand_over) {
  if (shut()) return refuse(work);
  wake();
  const auto turn = std::make_shared<TurnLock::Holder>(context_.turn_lock);
  const auto go_through = [this, color, key, turn, hand_over = std::move(hand_over)] {
    const TurnLock::Return at_the_end(*turn);
    const MPI_Comm part = divide(comm_, color.value_or(MPI_UNDEFINED), key, *turn);
    hand_over(part == MPI_COMM_NULL ? nullptr : make(context_, part, *turn, settings_));
  };
  // See [Note: nothing blocks alone]: all have come to this one; all have kept the others out; all go in.
  const auto go_in = [this, turn]() -> std::unique_ptr<Schedule> {
    Sequence::Parts parts;
    parts.push_back(plan(Operation{}, rank_, size_, settings_));
    parts.push_back(std::make_unique<Turn>(turn, before_, after_));
    parts.push_back(plan(Operation{}, rank_, size_, settings_));
    return std::make_unique<Sequence>(std::move(parts));
  };
  // Peers may never take what it has sent, so it is not to keep the turn until then.
  const auto failed = [turn] { turn->give_back(); };
  collectives_->add({split_signature(), go_in, std::move(work), nullptr, go_through, failed});
}

void MpiGroup::post(int peer, std::string payload, std::shared_ptr<Work> work) {
  if (shut()) return refuse(work);
  if (failure_) return work->finish(failure_);
  wake();
  try {
    mailbox_->post(peer, std::move(payload), work);
  } catch (...) {
    work->finish(std::current_exception());
    fail_here(std::current_exception());
  }
}

void MpiGroup::abandon(std::shared_ptr<Work> work) {
  if (shut()) return refuse(work);
  wake();
  // The first one's requests are under way, and other ranks may ask once only.
  if (abandonment_) return abandonment_->also(std::move(work));
  fail(
      std::make_exception_ptr(TransportError("given up: other ranks never issued it, and all close the communicator")));
  abandonment_ = std::make_unique<Abandonment>(context_.requests, comm_, beside_, std::move(work));
}

void MpiGroup::close(std::shared_ptr<Work> work) {
  if (closed_) return work->finish();
  wake();
  letters_->close();
  closing_ = std::move(work);
  closing_since_ = std::chrono::steady_clock::now();
}

void MpiGroup::fail(std::exception_ptr error, std::exception_ptr later) {
  if (failure_) return;
  wake();
  failure_ = later;
  collectives_->fail(error, later);
  for (auto& [key, strand] : messages_) strand->fail(error, later);
  mailbox_->fail(error, later);
}

void MpiGroup::fail_here(const std::exception_ptr& error) {
  if (failure_) return;
  fail(error, after(error));
  tell(reason_of(error));
}

void MpiGroup::tell(const std::string& reason) {
  // A rank whose own part went well would wait in its next operation for what this one sends no more. It takes this
  // message instead, which comes after all others of this rank. Where MPI itself has failed nobody can be told. The
  // memory lives as long as the process: MPI may look at it until each peer has received it, and one may never do so.
  static auto* const kept = new std::deque<std::string>;
  const auto& text = kept->emplace_back(reason, 0, std::min(kMostOfAReason, settings_.segment_bytes));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_BYTE, peer, failure_signature(), comm_, &request) !=
        MPI_SUCCESS) {
      return;
    }
    MPI_Request_free(&request);
  }
}

bool MpiGroup::settle() {
  bool moved = collectives_->settle();
  for (auto at = messages_.begin(); at != messages_.end();) {
    moved |= at->second->settle();
    at = at->second->drained() ? messages_.erase(at) : std::next(at);
  }
  moved |= mailbox_->settle();
  if (abandonment_) moved |= abandonment_->settle(drained());
  if (closing_) try_to_close();
  return moved;
}

bool MpiGroup::idle() const {
  const auto is_idle = [](const auto& entry) { return entry.second->idle(); };
  return collectives_->idle() && std::ranges::all_of(messages_, is_idle) && mailbox_->idle();
}

bool MpiGroup::drained() const {
  const auto is_drained = [](const auto& entry) { return entry.second->drained(); };
  return collectives_->drained() && std::ranges::all_of(messages_, is_drained);
}

std::int64_t MpiGroup::bytes_left() const {
  std::int64_t sum = collectives_->bytes_left() + mailbox_->bytes_left();
  for (const auto& [key, strand] : messages_) sum += strand->bytes_left();
  return sum;
}

void MpiGroup::try_to_close() {
  const bool patient = std::chrono::steady_clock::now() - closing_since_ < kMailPatience;
  // A peer that closed before does not take letters any more; those to it are given up after a while, and so are
  // messages of a failed group. Their memory, and the communicator, then live as long as the process.
  if (!failure_ && !drained()) return;
  if (patient && !(drained() && mailbox_->drained())) return;
  mailbox_->close();
  if (!mailbox_->closed()) return;
  closed_ = true;
  std::exchange(closing_, nullptr)->finish();
  context_.retired.add(comm_, beside_, {failure_ || !delivered(), mailbox_->letters_under_way()});
}

}  // namespace comm_core
