#include "group.hpp"

#include <algorithm>
#include <iterator>

#include "../schedule/planner.hpp"
#include "../signature.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

constexpr std::chrono::seconds kMailPatience{1};

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

}  // namespace

Group::Group(Groups& groups, int rank, int size, const Settings& settings, int largest_signature, int first_signature)
    : groups_(groups),
      rank_(rank),
      size_(size),
      settings_(settings),
      largest_signature_(largest_signature),
      first_signature_(first_signature),
      letters_(std::make_shared<Letterbox>(groups.readers())) {}

Group::~Group() = default;

void Group::open(std::unique_ptr<Strand> collectives, std::unique_ptr<Mail> mail) {
  collectives_ = std::move(collectives);
  mail_ = std::move(mail);
}

void Group::wake() {
  if (!std::exchange(awake_, true)) groups_.wake(*this);
}

Strand& Group::message_strand(const Operation& operation) {
  const bool sends = operation.kind == OpKind::kSend;
  auto& found = messages_[{operation.tag, {operation.peer, sends}}];
  if (!found) {
    found = make_message_strand(operation.peer, operation.tag, sends);
    if (failure_) found->fail(failure_, failure_);
  }
  return *found;
}

void Group::submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) {
  if (shut()) return refuse(work, std::move(memory));
  wake();
  const bool is_message = operation.kind == OpKind::kSend || operation.kind == OpKind::kReceive;
  Strand& strand = is_message ? message_strand(operation) : *collectives_;
  // Here and not when its turn comes: the operation ahead has the wire meanwhile.
  operation.narrow();
  const auto shared = std::make_shared<Operation>(std::move(operation));
  const int signature = is_message ? first_signature_ + shared->tag : signature_of(*shared, largest_signature_);
  strand.add(
      {signature,
       [shared, rank = rank_, size = size_, settings = settings_] { return plan(*shared, rank, size, settings); },
       std::move(work), std::move(memory), [shared] { shared->widen(); }});
}

void Group::split(std::optional<int> color, int key, std::shared_ptr<Work> work, HandOver hand_over) {
  if (shut()) return refuse(work);
  wake();
  Item item = split_item(color, key, std::move(hand_over));
  item.work = std::move(work);
  collectives_->add(std::move(item));
}

std::shared_ptr<Group> Group::part(const std::vector<int>&, const std::string&) {
  throw Unsupported("part: these ranks have to agree on a new group; all of them call split()");
}

void Group::post(int peer, std::string payload, std::shared_ptr<Work> work) {
  if (shut()) return refuse(work);
  if (failure_ && peer == rank_) {  // a thread that waits for letters can still be told to end
    letters_->put({rank_, std::move(payload)});
    return work->finish();
  }
  if (failure_) return work->finish(failure_);
  wake();
  try {
    mail_->post(peer, std::move(payload), work);
  } catch (...) {
    const auto error = std::current_exception();
    work->finish(error);
    fail_here(error);
  }
}

void Group::abandon(std::shared_ptr<Work> work) {
  if (shut()) return refuse(work);
  wake();
  // The first one is under way, and other ranks may ask once only.
  if (abandonment_) return abandonment_->also(std::move(work));
  fail(
      std::make_exception_ptr(TransportError("given up: other ranks never issued it, and all close the communicator")));
  abandonment_ = make_abandonment(std::move(work));
}

void Group::close(std::shared_ptr<Work> work) {
  if (closed_) return work->finish();
  wake();
  letters_->close();
  closing_ = std::move(work);
  closing_since_ = std::chrono::steady_clock::now();
}

void Group::fail(const std::exception_ptr& error, const std::exception_ptr& later) {
  if (failure_) return;
  wake();
  failure_ = later;
  collectives_->fail(error, later);
  for (auto& [key, strand] : messages_) strand->fail(error, later);
  mail_->fail(error, later);
}

void Group::fail_here(const std::exception_ptr& error) {
  if (failure_) return;
  fail(error, after(error));
  tell(reason_of(error));
}

bool Group::settle() {
  bool moved = collectives_->settle();
  for (auto at = messages_.begin(); at != messages_.end();) {
    moved |= at->second->settle();
    at = at->second->drained() ? messages_.erase(at) : std::next(at);
  }
  moved |= mail_->settle();
  if (abandonment_) moved |= abandonment_->settle(drained());
  if (closing_) try_to_close();
  return moved;
}

bool Group::idle() const {
  const auto is_idle = [](const auto& entry) { return entry.second->idle(); };
  return collectives_->idle() && std::ranges::all_of(messages_, is_idle) && mail_->idle();
}

bool Group::drained() const {
  const auto is_drained = [](const auto& entry) { return entry.second->drained(); };
  return collectives_->drained() && std::ranges::all_of(messages_, is_drained);
}

std::int64_t Group::bytes_left() const {
  std::int64_t sum = collectives_->bytes_left() + mail_->bytes_left();
  for (const auto& [key, strand] : messages_) sum += strand->bytes_left();
  return sum;
}

void Group::try_to_close() {
  const bool patient = std::chrono::steady_clock::now() - closing_since_ < kMailPatience;
  // A peer that closed before does not take letters any more; those to it are given up after a while, and so are
  // messages of a failed group. Their memory then lives as long as the process.
  if (!failure_ && !drained()) return;
  if (patient && !delivered()) return;
  mail_->close();
  if (!mail_->closed()) return;
  closed_ = true;
  std::exchange(closing_, nullptr)->finish();
  retire(!failure_ && delivered());
}

}  // namespace comm_core
