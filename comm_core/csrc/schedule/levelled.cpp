#include "levelled.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "../layout.hpp"
#include "planner.hpp"
#include "sequence.hpp"
#include "tracks.hpp"

namespace comm_core {
namespace {

using SchedulePtr = std::unique_ptr<Schedule>;

struct Copy {
  const std::byte* from;
  std::byte* to;
  std::int64_t bytes;
};

/// Takes together what lies apart, or the other way round.
class Copies final : public Schedule {
 public:
  explicit Copies(std::vector<Copy> copies) : copies_(std::move(copies)) {}
  bool finished() override { return true; }
  std::int64_t bytes_left() const override { return 0; }

 protected:
  void on_start() override {
    for (const auto& [from, to, bytes] : copies_) {
      if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
    }
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  std::vector<Copy> copies_;
};

SchedulePtr in_a_row(SchedulePtr first, SchedulePtr second) {
  Sequence::Parts parts;
  parts.push_back(std::move(first));
  parts.push_back(std::move(second));
  return std::make_unique<Sequence>(std::move(parts));
}

/// Elements of a piece of which this rank sends about `share`, all told, to other groups. While the first piece is
/// within groups nothing is between them, so there are some; but each costs a few messages' time.
std::int64_t piece_of(std::int64_t share, std::int64_t item, const Settings& settings) {
  constexpr std::int64_t kPieces = 8;
  const auto segment = std::max<std::int64_t>(1, settings.segment_bytes / item);
  return std::clamp((share + kPieces - 1) / kPieces, segment, settings.window * segment);
}

/// The operation, where this rank is, and how chunks are cut: all have their pieces of `piece` elements, as far as they
/// reach.
struct Shape {
  Shape(const Operation& operation, int rank, const Settings& with)
      : op(operation),
        levels(*op.levels),
        settings(with),
        group(levels.group_of(rank)),
        member(levels.member_of(rank)),
        item(static_cast<std::int64_t>(item_size(op.dtype))),
        ring(hybrid() && op.kind != OpKind::kAllReduce ? levels.num_groups() : 1),
        piece(ring * piece_of(*std::max_element(op.recv_counts.begin(), op.recv_counts.end()) / ring, item, settings)),
        offsets(offsets_of(op.recv_counts)) {}

  const Operation op;
  const Levels& levels;
  const Settings settings;
  const int group, member;
  const std::int64_t item;
  const std::int64_t ring;  // parts of a chunk that are reduced across groups
  const std::int64_t piece;
  const CountList offsets;  // of the chunks

  int num_groups() const { return levels.num_groups(); }
  int group_size() const { return levels.group_size(); }
  bool hybrid() const { return levels.kind == Levels::Kind::kHybrid; }
  Tracks::Track within() const { return {levels.groups[static_cast<std::size_t>(group)], {}}; }
  Tracks::Track across() const { return {levels.line(member), {}}; }

  std::int64_t num_pieces() const {
    return (*std::max_element(op.recv_counts.begin(), op.recv_counts.end()) + piece - 1) / piece;
  }
  std::int64_t count(int chunk, std::int64_t k) const {
    return std::clamp<std::int64_t>(op.recv_counts[static_cast<std::size_t>(chunk)] - k * piece, 0, piece);
  }
  /// The chunks that member `j` of a group deals with.
  std::vector<int> chunks(int j) const { return hybrid() ? std::vector<int>{j} : levels.line(j); }
  /// Piece `k` of each of them.
  CountList counts(int j, std::int64_t k) const {
    CountList found;
    for (const int chunk : chunks(j)) found.push_back(count(chunk, k));
    return found;
  }
  /// Piece `k` of all of them, by member.
  CountList sums(std::int64_t k) const {
    CountList found;
    for (int j = 0; j < group_size(); ++j) {
      const auto parts = counts(j, k);
      found.push_back(std::accumulate(parts.begin(), parts.end(), std::int64_t{0}));
    }
    return found;
  }
  /// Where piece `k` of every chunk lies in the whole buffer, in elements, and its size; by member.
  std::vector<std::pair<std::int64_t, std::int64_t>> places(std::int64_t k) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    for (int j = 0; j < group_size(); ++j) {
      for (const int chunk : chunks(j)) {
        found.emplace_back(offsets[static_cast<std::size_t>(chunk)] + k * piece, count(chunk, k));
      }
    }
    return found;
  }
  /// Whether the whole buffer is one piece, and lies as it is taken together.
  bool lies_together() const {
    if (num_pieces() > 1) return false;
    std::int64_t end = 0;
    for (const auto& [offset, size] : places(0)) {
      if (size > 0 && offset != end) return false;
      end += size;
    }
    return true;
  }

  /// An operation of the same kind of elements, among the ranks of a group or across groups.
  Operation part(OpKind kind, const std::byte* send, std::byte* recv, CountList sizes) const {
    Operation made;
    made.kind = kind;
    made.dtype = op.dtype;
    made.reduce = op.reduce;
    made.send = send;
    made.recv = recv;
    made.count = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    made.recv_counts = std::move(sizes);
    return made;
  }
  SchedulePtr within(OpKind kind, const std::byte* send, std::byte* recv, CountList sizes) const {
    return plan(part(kind, send, recv, std::move(sizes)), member, group_size(), settings);
  }
  SchedulePtr across(OpKind kind, const std::byte* send, std::byte* recv, CountList sizes) const {
    return plan(part(kind, send, recv, std::move(sizes)), group, num_groups(), settings);
  }
};

using ShapePtr = std::shared_ptr<const Shape>;

std::byte* room(Tracks::Scratch& scratch, std::int64_t bytes) {
  scratch.push_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)));
  return scratch.back().get();
}

std::size_t steps(std::int64_t count) { return static_cast<std::size_t>(std::max<std::int64_t>(0, count)); }

SchedulePtr reduce_scatter(const ShapePtr& s) {
  auto within = s->within(), across = s->across();
  Tracks::Scratch scratch;
  const auto largest = s->sums(0);
  const auto mine = largest[static_cast<std::size_t>(s->member)] * s->item;
  const bool apart = !s->lies_together();
  const auto total = std::accumulate(largest.begin(), largest.end(), std::int64_t{0}) * s->item;
  std::byte* const packed = apart ? room(scratch, total) : nullptr;
  std::array<std::byte*, 2> partial{};  // of two pieces: one is being made while the other one travels
  if (!s->hybrid()) partial = {room(scratch, mine), room(scratch, mine)};
  for (std::int64_t k = 0; k < s->num_pieces(); ++k) {
    std::byte* const out = s->op.recv + k * s->piece * s->item;
    std::byte* const sum = s->hybrid() ? out : partial[static_cast<std::size_t>(k % 2)];
    const auto reduce = [s, k, packed, sum]() -> SchedulePtr {
      if (packed == nullptr) return s->within(OpKind::kReduceScatter, s->op.send, sum, s->sums(k));
      std::vector<Copy> copies;
      auto* to = packed;
      for (const auto& [offset, count] : s->places(k)) {
        copies.push_back({s->op.send + offset * s->item, to, count * s->item});
        to += count * s->item;
      }
      return in_a_row(std::make_unique<Copies>(std::move(copies)),
                      s->within(OpKind::kReduceScatter, packed, sum, s->sums(k)));
    };
    const auto exchange = [s, k, sum, out]() -> SchedulePtr {
      if (!s->hybrid()) return s->across(OpKind::kReduceScatter, sum, out, s->counts(s->member, k));
      return s->across(OpKind::kAllReduce, out, out, balanced_counts(s->count(s->member, k), s->num_groups()));
    };
    within.steps.push_back({reduce, mine, s->hybrid() ? 0 : steps(k - 1)});
    across.steps.push_back({exchange, mine, steps(k + 1)});
  }
  return std::make_unique<Tracks>(std::move(within), std::move(across), std::move(scratch));
}

SchedulePtr all_gather(const ShapePtr& s) {
  auto within = s->within(), across = s->across();
  if (s->hybrid()) {
    const auto gather = [s] { return s->within(OpKind::kAllGather, s->op.send, s->op.recv, s->op.recv_counts); };
    within.steps.push_back({gather, s->op.count * s->item});
    return std::make_unique<Tracks>(std::move(within), std::move(across));
  }
  Tracks::Scratch scratch;
  const auto largest = s->sums(0);
  const auto total = std::accumulate(largest.begin(), largest.end(), std::int64_t{0}) * s->item;
  const std::array<std::byte*, 2> gathered{room(scratch, total), room(scratch, total)};
  for (std::int64_t k = 0; k < s->num_pieces(); ++k) {
    std::byte* const all = gathered[static_cast<std::size_t>(k % 2)];
    std::byte* const mine = all + offsets_of(s->sums(k))[static_cast<std::size_t>(s->member)] * s->item;
    const auto exchange = [s, k, mine] {
      return s->across(OpKind::kAllGather, s->op.send + k * s->piece * s->item, mine, s->counts(s->member, k));
    };
    const auto gather = [s, k, all, mine] {
      std::vector<Copy> copies;
      const auto* from = all;
      for (const auto& [offset, count] : s->places(k)) {
        copies.push_back({from, s->op.recv + offset * s->item, count * s->item});
        from += count * s->item;
      }
      return in_a_row(s->within(OpKind::kAllGather, mine, all, s->sums(k)),
                      std::make_unique<Copies>(std::move(copies)));
    };
    across.steps.push_back({exchange, total / s->group_size(), steps(k - 1)});
    within.steps.push_back({gather, total, steps(k + 1)});
  }
  return std::make_unique<Tracks>(std::move(within), std::move(across), std::move(scratch));
}

/// Each rank sends everything twice: worth its bytes while those are few, as in an all_reduce of ranks that are alike.
SchedulePtr small_all_reduce(const ShapePtr& s) {
  auto within = s->within(), across = s->across();
  const auto bytes = s->op.count * s->item;
  const auto reduce = [s] {
    return s->within(OpKind::kAllReduce, s->op.send, s->op.recv, balanced_counts(s->op.count, s->group_size()));
  };
  const auto exchange = [s] {
    return s->across(OpKind::kAllReduce, s->op.recv, s->op.recv, balanced_counts(s->op.count, s->num_groups()));
  };
  within.steps.push_back({reduce, bytes});
  across.steps.push_back({exchange, bytes, 1});
  return std::make_unique<Tracks>(std::move(within), std::move(across));
}

SchedulePtr all_reduce(const ShapePtr& s) {
  const std::int64_t size = s->group_size() * s->num_groups();
  if (s->op.count * s->item * size <= 4 * s->settings.small_bytes) return small_all_reduce(s);
  auto within = s->within(), across = s->across();
  const auto piece = s->piece * size, num_pieces = (s->op.count + piece - 1) / piece;
  struct Piece {
    std::byte *all, *mine;  // in the result
    const std::byte* send;
    CountList counts;
  };
  const auto at = [s, piece](std::int64_t k) {
    const auto before = k * piece * s->item;
    auto counts = balanced_counts(std::min(piece, s->op.count - k * piece), s->group_size());
    const auto own = offsets_of(counts)[static_cast<std::size_t>(s->member)] * s->item;
    return Piece{s->op.recv + before, s->op.recv + before + own, s->op.send + before, std::move(counts)};
  };
  const auto bytes = piece / s->group_size() * s->item;
  for (std::int64_t k = 0; k <= num_pieces; ++k) {
    if (k < num_pieces) {
      // The step after which a piece is reduced within the group: see below.
      const auto reduced = within.steps.size() + 1;
      const auto reduce = [s, at, k] {
        const auto piece_k = at(k);
        return s->within(OpKind::kReduceScatter, piece_k.send, piece_k.mine, piece_k.counts);
      };
      const auto exchange = [s, at, k] {
        const auto piece_k = at(k);
        const auto count = piece_k.counts[static_cast<std::size_t>(s->member)];
        return s->across(OpKind::kAllReduce, piece_k.mine, piece_k.mine, balanced_counts(count, s->num_groups()));
      };
      within.steps.push_back({reduce, bytes});
      across.steps.push_back({exchange, bytes, reduced});
    }
    if (k == 0) continue;
    // One piece later, so that the next one can follow it between groups at once.
    const auto gather = [s, at, k] {
      const auto piece_k = at(k - 1);
      return s->within(OpKind::kAllGather, piece_k.mine, piece_k.all, piece_k.counts);
    };
    within.steps.push_back({gather, bytes, steps(k)});
  }
  return std::make_unique<Tracks>(std::move(within), std::move(across));
}

}  // namespace

SchedulePtr levelled(const Operation& operation, int rank, const Settings& settings) {
  const auto& levels = *operation.levels;
  const bool one_level = levels.num_groups() == 1 || levels.group_size() == 1;
  if (one_level && levels.kind == Levels::Kind::kTwoLevel) return nullptr;
  const auto shape = [&] { return std::make_shared<const Shape>(operation, rank, settings); };
  switch (operation.kind) {
    case OpKind::kReduceScatter:
      return reduce_scatter(shape());
    case OpKind::kAllGather:
      return all_gather(shape());
    case OpKind::kAllReduce:
      return one_level ? nullptr : all_reduce(shape());
    default:
      return nullptr;
  }
}

}  // namespace comm_core
