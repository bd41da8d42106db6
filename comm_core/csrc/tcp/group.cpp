#include "group.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string_view>
#include <utility>

#include "../layout.hpp"
#include "../schedule/planner.hpp"
#include "../signature.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

class TcpStrand final : public Strand {
 public:
  TcpStrand(TcpGroup& group, Signatures signatures, Stream stream, OnFailure on_failure)
      : Strand(signatures, group.rank(), std::move(on_failure)), group_(group), stream_(stream) {}

 protected:
  void post_send(const Transfer& transfer, const std::byte* data, SendMode mode, int signature) override {
    group_.world().send(group_.id(), stream_, transfer, member(transfer.peer), data, mode, signature);
  }
  void post_receive(const Transfer& transfer, std::byte* data, int) override {
    group_.world().receive(group_.id(), stream_, transfer, member(transfer.peer), data);
  }
  void give_up() override { group_.world().drop(group_.id(), *this); }

 private:
  int member(int peer) const { return group_.members()[static_cast<std::size_t>(peer)]; }

  TcpGroup& group_;
  const Stream stream_;
};

/// A letter is one message: what arrives of it has memory, whoever reads it later.
class TcpMail final : public Mail {
 public:
  explicit TcpMail(TcpGroup& group) : group_(group) {}

  void post(int peer, std::string payload, std::shared_ptr<Work> work) override {
    ++*unsent_;
    const auto gone = [unsent = unsent_, work = std::move(work)] {
      --*unsent;
      work->finish();
    };
    group_.world().tell(group_.id(), FrameKind::kLetter, group_.members()[static_cast<std::size_t>(peer)],
                        std::move(payload), gone);
  }
  bool settle() override { return false; }
  bool idle() const override { return *unsent_ == 0; }
  bool drained() const override { return *unsent_ == 0; }
  std::int64_t bytes_left() const override { return 0; }
  void fail(std::exception_ptr, std::exception_ptr) override {}
  void close() override {}
  bool closed() const override { return true; }

 private:
  TcpGroup& group_;
  const std::shared_ptr<int> unsent_ = std::make_shared<int>(0);  // the world may keep a letter longer than the group
};

/// Whatever others still send for the group goes nowhere, and nothing of this rank is under way once it has failed: so
/// nobody has to be waited for.
class TcpAbandonment final : public Abandonment {
 public:
  explicit TcpAbandonment(std::shared_ptr<Work> work) : Abandonment(std::move(work)) {}

  bool settle(bool) override {
    if (over()) return false;
    finish();
    return true;
  }
  bool quiet() const override { return over(); }
};

/// FNV-1a.
class Hash {
 public:
  Hash& add(std::uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(number >> shift & 0xff);
    return *this;
  }
  Hash& add(std::string_view text) {
    for (const char letter : text) add_byte(static_cast<unsigned char>(letter));
    return *this;
  }
  GroupId value() const { return value_; }

 private:
  void add_byte(std::uint64_t byte) { value_ = (value_ ^ byte) * 0x100'0000'01b3; }

  GroupId value_ = 0xcbf2'9ce4'8422'2325;
};

/// Of whatever all members of a new group know of it.
GroupId id_of(GroupId parent, std::uint64_t split, int color) {
  return Hash().add(parent).add(split).add(static_cast<std::uint64_t>(color)).value();
}

}  // namespace

std::shared_ptr<TcpGroup> TcpGroup::make(Groups& groups, std::shared_ptr<World> world, GroupId id,
                                         std::vector<int> members, const Settings& settings) {
  Settings own = settings;
  if (world->is_one_machine(members)) {
    // What one rank copies from another's memory needs no packets; fewer pieces cost less, and few at a time stay in
    // caches.
    constexpr std::int64_t kSegment = 128 * 1024, kWindow = 6;
    if (!own.segment_is_given) own.segment_bytes = kSegment;
    if (!own.window_is_given) own.window = kWindow;
  }
  auto group = std::make_shared<TcpGroup>(groups, std::move(world), id, std::move(members), own);
  groups.add(group);
  group->world().open(id, *group);
  return group;
}

TcpGroup::TcpGroup(Groups& groups, std::shared_ptr<World> world, GroupId id, std::vector<int> members,
                   const Settings& settings)
    : Group(groups, static_cast<int>(std::ranges::find(members, world->rank()) - members.begin()),
            static_cast<int>(members.size()), settings, std::numeric_limits<int>::max(), kFirstTag),
      world_(std::move(world)),
      id_(id),
      members_(std::move(members)) {
  Group::open(make_strand(Strand::Signatures::kOperation, kCollectives), std::make_unique<TcpMail>(*this));
}

std::unique_ptr<Strand> TcpGroup::make_strand(Strand::Signatures signatures, Stream stream) {
  return std::make_unique<TcpStrand>(*this, signatures, stream,
                                     [this](const std::exception_ptr& error) { fail_here(error); });
}

std::unique_ptr<Strand> TcpGroup::make_message_strand(int, int tag, bool) {
  return make_strand(Strand::Signatures::kAny, static_cast<Stream>(kFirstTag + tag));
}

bool TcpGroup::has(int world_rank) const { return std::ranges::find(members_, world_rank) != members_.end(); }

int TcpGroup::rank_of(int world_rank) const {
  return static_cast<int>(std::ranges::find(members_, world_rank) - members_.begin());
}

void TcpGroup::take_letter(int world_rank, std::string letter) {
  letters()->put({rank_of(world_rank), std::move(letter)});
}

void TcpGroup::lose(int world_rank, const std::string& why) {
  const std::string during = collectives().running();
  fail_here(std::make_exception_ptr(TransportError(
      (during.empty() ? "" : during + ": ") + "rank " + std::to_string(rank()) + " of " + std::to_string(size()) +
      " lost the connection to rank " + std::to_string(rank_of(world_rank)) + ": " + why)));
}

Item TcpGroup::split_item(std::optional<int> color, int key, HandOver hand_over) {
  struct Choice {
    std::int64_t color, key;
  };
  struct Choices {
    Choice mine;
    std::vector<Choice> all;
  };
  constexpr std::int64_t kNone = -1;
  const auto choices = std::make_shared<Choices>(
      Choices{{color.value_or(kNone), key}, std::vector<Choice>(static_cast<std::size_t>(size()))});
  const auto gather = [this, choices] {
    Operation operation;
    operation.kind = OpKind::kAllGather;
    operation.dtype = DType::kInt64;
    operation.count = 2 * static_cast<std::int64_t>(size());
    operation.recv_counts = balanced_counts(operation.count, size());
    operation.send = reinterpret_cast<const std::byte*>(&choices->mine);
    operation.recv = reinterpret_cast<std::byte*>(choices->all.data());
    return plan(operation, rank(), size(), settings());
  };
  const auto divide = [this, choices, number = num_splits_++, hand_over = std::move(hand_over)] {
    const auto chosen = choices->mine.color;
    if (chosen == kNone) return hand_over(nullptr);
    std::vector<int> ranks;
    for (int peer = 0; peer < size(); ++peer) {
      if (choices->all[static_cast<std::size_t>(peer)].color == chosen) ranks.push_back(peer);
    }
    std::ranges::stable_sort(ranks, {}, [&](int peer) { return choices->all[static_cast<std::size_t>(peer)].key; });
    for (int& peer : ranks) peer = members_[static_cast<std::size_t>(peer)];
    hand_over(
        make(groups(), world_, id_of(id_, number, static_cast<int>(chosen)), std::move(ranks), comm_core::settings()));
  };
  return {split_signature(), gather, nullptr, choices, divide};
}

std::shared_ptr<Group> TcpGroup::part(const std::vector<int>& ranks, const std::string& name) {
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(members_[static_cast<std::size_t>(rank)]);
  const auto id = Hash().add(id_).add(name).value();
  return make(groups(), world_, id, std::move(members), comm_core::settings());
}

std::unique_ptr<Abandonment> TcpGroup::make_abandonment(std::shared_ptr<Work> work) {
  return std::make_unique<TcpAbandonment>(std::move(work));
}

void TcpGroup::tell(const std::string& reason) {
  for (const int peer : members_) {
    if (peer != world_->rank()) world_->tell(id_, FrameKind::kFailed, peer, reason);
  }
}

void TcpGroup::retire(bool clean) { world_->close(id_, *this, clean); }

}  // namespace comm_core
