// An operation in flight, as a state machine that reacts to messages and never blocks; and the transport it talks to.
//
// Schedules know no MPI: they are tested over a transport in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace comm_core {

class Schedule;

enum class SendMode {
  kEager,    ///< complete once the memory may be reused; the message may still be on its way
  kMatched,  ///< complete once the peer took it
};

/// Point-to-point messages within one group, matched by posting order. Completion is reported to the schedule that
/// posted, by ticket, never before the call that posted it returns; what throws is not posted. Whoever implements it
/// checks that a received message has exactly the expected size.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
                    std::int64_t ticket) = 0;
  virtual void receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) = 0;
};

/// Lifetime: start() -> sent()/received() ... -> finished() -> drained() -> destruction.
class Schedule {
 public:
  Schedule() = default;
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;
  virtual ~Schedule() = default;

  void start(Transport& transport);
  /// Called by the transport, once for each message posted.
  void sent(std::int64_t ticket);
  void received(std::int64_t ticket);

  /// A message that will not be reported: its operation failed.
  void dropped() { --outstanding_; }

  /// The result is there and the caller's buffers are not looked at any more.
  virtual bool finished() = 0;
  /// No message of this schedule is under way: it may be destroyed.
  virtual bool drained() const { return outstanding_ == 0; }
  /// Bytes that have still to arrive, for the engine's pace.
  virtual std::int64_t bytes_left() const = 0;

 protected:
  virtual void on_start() = 0;
  virtual void on_sent(std::int64_t ticket) = 0;
  virtual void on_received(std::int64_t ticket) = 0;

  Transport& transport() { return *transport_; }
  void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, std::int64_t ticket);
  /// Sends a copy, so that the caller's memory is free at once; reported with kCopyTicket. The last message of an
  /// operation to each peer goes this way and kMatched: when it is complete the transport has really drained.
  void send_copy(int peer, const std::byte* data, std::int64_t bytes, SendMode mode);
  void receive(int peer, std::byte* data, std::int64_t bytes, std::int64_t ticket);

  static constexpr std::int64_t kCopyTicket = -1;

 private:
  Transport* transport_ = nullptr;
  std::int64_t outstanding_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

}  // namespace comm_core
