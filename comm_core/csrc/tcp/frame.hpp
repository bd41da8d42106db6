// What stands before the bytes of a message on a connection.
#pragma once

#include <cstdint>

namespace comm_core {

enum class FrameKind : std::uint8_t {
  kMessage,   ///< of a strand
  kLent,      ///< the same; the bytes are a Loan, for a peer that reads this process's memory
  kReturned,  ///< the memory of a loan has been read; `group` is its number
  kReads,     ///< this rank can read the peer's memory
  kTaken,     ///< the oldest message of a strand that was to be acknowledged has met its receive
  kLetter,    ///< for the mailbox
  kFailed,    ///< the group has failed on this rank; the bytes say why
  kClosed,    ///< this rank has closed the group: whoever waits for it does so in vain
  kGivenUp,   ///< the same after a failure, of which the others hear by other means
};

/// Of which strand a message is: the collectives', or that of the messages with a tag.
using Stream = std::uint16_t;
constexpr Stream kCollectives = 0, kLetters = 1, kFirstTag = 2;

/// In the byte order of the machine: all of a job have the same.
struct Frame {
  std::uint64_t group = 0;
  std::int64_t bytes = 0;  ///< that follow
  std::int32_t signature = 0;
  Stream stream = kCollectives;
  FrameKind kind = FrameKind::kMessage;
  bool acknowledge = false;    ///< the sender waits for kTaken
  std::int64_t following = 0;  ///< bytes that the sender has ready to send behind these
};
static_assert(sizeof(Frame) == 32);

constexpr std::int64_t kLongestMessage = std::int64_t{1} << 40;  ///< bytes; of none that anybody means

/// Where the bytes of a message lie that the peer copies itself.
struct Loan {
  std::uint64_t address = 0;
  std::int64_t bytes = 0;
  std::uint64_t number = 0;
};

}  // namespace comm_core
