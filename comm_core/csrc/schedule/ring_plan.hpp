// Which segment a rank of a ring sends and receives, and in which order. Pure.
//
// Every chunk is cut into segments, and segments into blocks of `window`. A ring works block by block:
//
//     for each block: for each step: for each segment of the block
//
// so a segment is forwarded one block-row after it arrived, and what travels stays in the cache. Sender and receiver
// walk the same order, and therefore agree which message is which without any tag.
#pragma once

#include <compare>
#include <cstdint>

#include "../layout.hpp"

namespace comm_core {

struct RingPlan {
  int rank = 0;
  int size = 1;
  int steps = 0;             ///< size - 1 for reduce_scatter and all_gather, twice that for all_reduce
  int first_shift = 0;       ///< step s sends chunk rank - s - first_shift (mod size)
  std::int64_t segment = 1;  ///< elements of one segment
  std::int64_t window = 1;   ///< segments of one block
  CountList counts;
  CountList offsets;

  int left() const { return (rank + size - 1) % size; }
  int right() const { return (rank + 1) % size; }
  int chunk_sent(int step) const { return ((rank - step - first_shift) % size + 2 * size) % size; }
  int chunk_received(int step) const { return chunk_sent(step + 1); }
  /// From this block on a single chunk is left, which every rank sends at most once. Never where chunks are about
  /// equal, nor in all_reduce, where every chunk comes back to where it began.
  std::int64_t lone_block() const;
  std::int64_t num_blocks() const;
};

/// A position in the common order.
struct Place {
  std::int64_t block = 0;
  int step = 0;
  std::int64_t index = 0;  ///< segment within its block
  auto operator<=>(const Place&) const = default;
};

/// Walks the segments one rank sends, or those it receives.
class RingCursor {
 public:
  enum class Direction { kSend, kReceive };
  RingCursor(const RingPlan& plan, Direction direction);

  bool at_end() const { return place_.block >= num_blocks_; }
  const Place& place() const { return place_; }
  int chunk() const;
  /// First element of the segment within its chunk, and how many there are.
  std::int64_t offset() const { return (place_.block * plan_->window + place_.index) * plan_->segment; }
  std::int64_t count() const;
  void next();

 private:
  bool exists() const;
  void settle();

  const RingPlan* plan_;
  Direction direction_;
  std::int64_t num_blocks_;
  Place place_;
};

}  // namespace comm_core
