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
#include "abandonment.hpp"
#include "blocking.hpp"
#include "comm_core/settings.hpp"
#include "job_order.hpp"

namespace comm_core {
namespace {

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

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
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
    context.groups.add(group);
    return group;
  } catch (...) {
    if (beside != MPI_COMM_NULL) MPI_Comm_free(&beside);
    MPI_Comm_free(&comm);
    throw;
  }
}

MpiGroup::MpiGroup(MpiContext& context, MPI_Comm comm, MPI_Comm beside, const Settings& settings)
    : Group(context.groups, rank_in(comm), size_of(comm), settings, largest_tag(), MpiMail::kNumTags),
      context_(context),
      comm_(returning_errors(comm)),
      beside_(returning_errors(beside)) {
  std::tie(before_, after_) = neighbours(comm_, rank());
  const auto on_failure = [this](const std::exception_ptr& error) { fail_here(error); };
  auto mail = std::make_unique<MpiMail>(context_.requests, beside_, rank(), letters(), on_failure, [this] { wake(); });
  mail_ = mail.get();
  open(std::make_unique<MpiStrand>(context_.requests, comm_, Strand::Signatures::kOperation, rank(), on_failure),
       std::move(mail));
  mail_->open();
}

std::unique_ptr<Strand> MpiGroup::make_message_strand(int, int, bool) {
  return std::make_unique<MpiStrand>(context_.requests, beside_, Strand::Signatures::kAny, rank(),
                                     [this](const std::exception_ptr& error) { fail_here(error); });
}

Item MpiGroup::split_item(std::optional<int> color, int key, HandOver hand_over) {
  const auto turn = std::make_shared<TurnLock::Holder>(context_.turn_lock);
  const auto go_through = [this, color, key, turn, hand_over = std::move(hand_over)] {
    const TurnLock::Return at_the_end(*turn);
    const MPI_Comm part = divide(comm_, color.value_or(MPI_UNDEFINED), key, *turn);
    hand_over(part == MPI_COMM_NULL ? nullptr : make(context_, part, *turn, settings()));
  };
  // See [Note: nothing blocks alone]: all have come to this one; all have kept the others out; all go in.
  const auto go_in = [this, turn]() -> std::unique_ptr<Schedule> {
    Sequence::Parts parts;
    parts.push_back(plan(Operation{}, rank(), size(), settings()));
    parts.push_back(std::make_unique<Turn>(turn, before_, after_));
    parts.push_back(plan(Operation{}, rank(), size(), settings()));
    return std::make_unique<Sequence>(std::move(parts));
  };
  // Peers may never take what it has sent, so it is not to keep the turn until then.
  const auto failed = [turn] { turn->give_back(); };
  return {split_signature(), go_in, nullptr, nullptr, go_through, failed};
}

std::unique_ptr<Abandonment> MpiGroup::make_abandonment(std::shared_ptr<Work> work) {
  return std::make_unique<MpiAbandonment>(context_.requests, comm_, beside_, std::move(work));
}

void MpiGroup::tell(const std::string& reason) {
  // A rank whose own part went well would wait in its next operation for what this one sends no more. It takes this
  // message instead, which comes after all others of this rank. Where MPI itself has failed nobody can be told. The
  // memory lives as long as the process: MPI may look at it until each peer has received it, and one may never do so.
  static auto* const kept = new std::deque<std::string>;
  const auto& text = kept->emplace_back(reason, 0, std::min(kMostOfAReason, settings().segment_bytes));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_BYTE, peer, failure_signature(), comm_, &request) !=
        MPI_SUCCESS) {
      return;
    }
    MPI_Request_free(&request);
  }
}

void MpiGroup::retire(bool clean) { context_.retired.add(comm_, beside_, {!clean, mail_->letters_under_way()}); }

}  // namespace comm_core
