// Everybody talks to everybody directly: all_to_all, and the single-step form of the other operations.
#pragma once

#include <memory>
#include <vector>

#include "comm_core/types.hpp"
#include "flow.hpp"
#include "schedule.hpp"

namespace comm_core {

/// What goes to one peer and what comes from it. Zero bytes: no message at all, on either side.
struct Lane {
  int peer = 0;
  const std::byte* out = nullptr;
  std::int64_t out_bytes = 0;
  std::byte* in = nullptr;
  std::int64_t in_bytes = 0;
};

/// Every lane on its own, at the pace of its Flow: something may go out where nothing comes back.
class Exchange : public Schedule {
 public:
  /// What may be overwritten before every peer has it is copied first.
  enum class Sources { kStay, kOverwritten };
  Exchange(std::vector<Lane> lanes, Pieces pieces, Sources sources = Sources::kStay);
  bool finished() override { return bytes_left_ == 0 && num_unsent_ == 0; }
  std::int64_t bytes_left() const override { return bytes_left_; }

 protected:
  void on_start() override;
  void on_sent(std::int64_t ticket) override;
  void on_received(std::int64_t ticket) override;

  /// Where a segment of a lane lands. Null: not yet, ask again through post().
  virtual std::byte* landing(std::size_t lane, std::int64_t segment);
  /// A segment landed; the segments of one lane land in any order.
  virtual void landed(std::size_t, std::int64_t) {}
  void post(std::size_t lane);

  const Pieces& pieces() const { return pieces_; }
  const std::vector<Lane>& lanes() const { return lanes_; }

 private:
  struct Progress {
    Flow out, in;
    std::int64_t next_in = 0, receiving = 0;
  };
  std::int64_t ticket(std::size_t lane, std::int64_t segment) const;
  void fill(std::size_t lane);

  std::vector<Lane> lanes_;
  std::vector<Progress> progress_;
  Pieces pieces_;
  Sources sources_;
  std::int64_t bytes_left_ = 0;
  std::int64_t num_unsent_ = 0;  // messages that still need the caller's memory
};

/// Receives the same stretch of elements from every peer and combines all contributions in rank order, segment by
/// segment: the sum does not depend on how buffers were cut, and 16-bit floats are rounded once.
class DirectReduce final : public Exchange {
 public:
  struct Target {
    const std::byte* own;  ///< this rank's contribution
    std::byte* out;        ///< may be `own`
    std::int64_t bytes;
    int rank;
    DType dtype;
    ReduceOp op;
  };
  /// `lanes` lead to all other ranks; their `in` is not used.
  DirectReduce(std::vector<Lane> lanes, Target target, Pieces pieces, Sources sources = Sources::kStay);

 protected:
  void on_start() override;
  std::byte* landing(std::size_t lane, std::int64_t segment) override;
  void landed(std::size_t lane, std::int64_t segment) override;

 private:
  std::byte* slot(std::size_t lane, std::int64_t segment);
  void reduce_next();

  Target target_;
  Flow stretch_;
  std::unique_ptr<std::byte[]> slots_;
  std::vector<int> arrived_;  // contributions per segment of the window
  std::int64_t reduced_ = 0;
};

}  // namespace comm_core
