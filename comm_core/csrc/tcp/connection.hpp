// One connection to a peer, from and into the memory of whoever sends and receives.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../engine/strand.hpp"
#include "frame.hpp"
#include "socket.hpp"

namespace comm_core {

/// A message to be sent: the bytes at `data`, which stay there, or those in `owned`.
struct Outgoing {
  Frame frame;
  const std::byte* data = nullptr;
  Transfer transfer = {};  ///< of no strand: nobody waits
  bool reported = true;    ///< to the strand when the bytes were sent; else by other means, later
  std::string owned = {};
  std::function<void()> gone = {};  ///< called when it was sent, or dropped; may be null
};

/// Whether both mean the same message.
inline bool is_of(const Transfer& a, const Transfer& b) {
  return a.strand == b.strand && a.schedule == b.schedule && a.ticket == b.ticket && a.peer == b.peer &&
         a.is_send == b.is_send;
}

class Connection;

/// The number of a connection among all of this process.
using Line = int;

/// Whoever the messages of a connection are for.
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// A message begins to arrive: where its bytes go. Null: nobody wants them.
  virtual std::byte* begin(Line line, const Frame& frame) = 0;
  /// All of its bytes are there.
  virtual void end(Line line, const Frame& frame) = 0;
  /// The bytes of a message that is to be reported may be overwritten.
  virtual void sent(const Transfer& transfer) = 0;

  /// What the kernel says of a connection.
  struct News {
    bool readable, writable, ended;
  };
  virtual void hear(Connection& connection, News news) = 0;
};

/// [Note: wakeups] Nobody can use a part of a message, so the kernel is asked to wake this thread only once the rest of
/// it is there (SO_RCVLOWAT); and where data comes fast, once as much has come as takes kPause, of what the sender has
/// said will follow without waiting for anything.
///
/// Messages of a strand keep their order. Those of several take turns, so that a long one holds nobody up; what is
/// urgent goes before all of them.
class Connection {
 public:
  Connection(Line line, Socket socket, Receiver& receiver);

  void hear(Receiver::News news) { receiver_.hear(*this, news); }

  Line line() const noexcept { return line_; }
  int fd() const noexcept { return socket_.fd(); }

  enum class Turn { kInOrder, kUrgent };
  void send(Outgoing message, Turn turn = Turn::kInOrder);
  /// Sends what the kernel takes. False where nothing was left to send, or could be sent.
  bool flush();
  /// The kernel takes no more for now.
  bool blocked() const noexcept { return blocked_; }
  void unblock() noexcept { blocked_ = false; }
  /// Everything was given to the kernel.
  bool flushed() const noexcept { return batch_.empty() && turns_.empty() && urgent_.empty(); }

  /// There is something to read. `ended`: and nothing after it.
  void has_arrived(bool ended) noexcept {
    readable_ = true;
    ended_ |= ended;
  }
  /// There may be more than the last read() took.
  bool readable() const noexcept { return readable_; }
  /// Reads what is there, up to about a megabyte. False at the end of the connection.
  bool read();
  /// It has been read to its end.
  bool finished() const noexcept { return finished_; }
  /// What arrives of the present message is thrown away from here on.
  void discard_rest() noexcept { target_ = nullptr; }

  /// Takes out what a strand had to send. What is about to leave does, from memory of its own: the peer has been told
  /// that it comes. Returns those that were to be reported, and now will not be.
  std::vector<Transfer> drop(const Strand& strand);
  /// The same of one message, which is reported by other means.
  void drop(const Transfer& transfer);
  /// Takes out everything; it is the connection's end.
  std::vector<Outgoing> drop_all();
  /// Nothing is sent any more: the peer reads the end.
  void shut_down() noexcept;

 private:
  using Queue = std::uint64_t;
  static Queue queue_of(const Frame& frame) { return frame.group * 4099 + frame.stream; }
  std::vector<Transfer> drop_those(const std::function<bool(const Outgoing&)>& are_meant);
  bool fill();
  void pass(std::size_t bytes);
  void parse();
  void begin_message(const Frame& frame);
  void note_arrival(std::int64_t bytes);
  void sleep_until_worthwhile();

  const Line line_;
  Socket socket_;
  Receiver& receiver_;

  // Sending: `batch_` is what the next call gives to the kernel, of whose first message `done_` bytes are gone.
  std::deque<Outgoing> batch_, urgent_;
  std::size_t done_ = 0;
  std::unordered_map<Queue, std::deque<Outgoing>> queues_;
  std::deque<Queue> turns_;  // those that are not empty
  bool blocked_ = false;

  // Receiving: a frame, then `left_` bytes to `target_`.
  static constexpr std::size_t kStage = 1024;
  Frame frame_{};
  bool open_ = false, readable_ = false, ended_ = false, finished_ = false;
  std::byte* target_ = nullptr;
  std::int64_t left_ = 0;
  std::array<std::byte, kStage> stage_;  // frames that have arrived, and what came with them
  std::size_t staged_ = 0;
  std::chrono::steady_clock::time_point last_arrival_{};
  double bytes_per_second_ = 0;  // while data streams
  int low_water_ = 1;
};

}  // namespace comm_core
