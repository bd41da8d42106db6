// All ranks of a job, the connections to them, and what arrives for which group.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../engine/strand.hpp"
#include "connection.hpp"
#include "mesh.hpp"

namespace comm_core {

class TcpGroup;

using GroupId = std::uint64_t;

/// Receives and arrivals of one strand on one connection meet here, in their order.
struct Channel {
  struct Receive {
    Transfer transfer;
    std::byte* data;
  };
  struct Arrival {
    Frame frame;
    std::unique_ptr<std::byte[]> bytes;
  };
  std::deque<Receive> posted;
  std::deque<Arrival> early;     // they came before their receives
  std::deque<Transfer> untaken;  // sends that wait until the peer has taken them
};

/// What a rank knows of a group, perhaps before the group is made here: other ranks may be sooner.
struct Inbox {
  TcpGroup* group = nullptr;
  std::vector<int> members;  // none: it is not made here yet
  bool closed = false;       // here
  std::map<std::pair<Line, Stream>, Channel> channels;
  /// Messages so far, with a peer; both sides count alike, and so know by which connection one goes.
  struct Count {
    std::int64_t sent = 0, received = 0;
  };
  std::map<std::pair<int, Stream>, Count> counts;
  std::map<std::pair<int, FrameKind>, int> told;     // on how many of its connections a peer has told this
  std::vector<std::pair<int, std::string>> letters;  // they came before the group
  std::map<int, std::string> gone;                   // peers that send no more, and why; "": they have closed the group
  std::set<int> closed_by;
  bool has(int peer) const { return std::ranges::find(members, peer) != members.end(); }
  bool forgotten() const { return closed && closed_by.size() >= members.size(); }
};

/// Ranks are those of the job everywhere in here. On the engine's thread.
///
/// [Note: several connections] Messages of a strand between two ranks take turns among the connections of both. Each
/// has its own channels there: nothing has to be put in order again, and a message that is late holds up nobody but its
/// own receive. What ends a group is told on all of them, and holds once it has come by the last: every message before
/// it is there. Between processes of one machine only the first is used.
class World final : public Receiver {
 public:
  /// `poll`, an epoll instance, tells of its connections until they end.
  World(Mesh mesh, const Socket& poll);
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() override;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(neighbours_.size()); }

  /// From here on messages for it come in.
  void open(GroupId id, TcpGroup& group);
  /// It is closed here; the others are told. `clean`: whoever still waits for this rank does so in vain. After a
  /// failure they hear of that, or give up themselves.
  void close(GroupId id, const TcpGroup& group, bool clean);

  void send(GroupId id, Stream stream, const Transfer& transfer, int peer, const std::byte* data, SendMode mode,
            int signature);
  void receive(GroupId id, Stream stream, const Transfer& transfer, int peer, std::byte* data);
  /// All of these ranks are processes of one machine. The same on each of them.
  bool is_one_machine(const std::vector<int>& ranks) const;
  /// Gives up what the strand has posted; each is dropped now, but for what is on its way, which is reported later.
  void drop(GroupId id, Strand& strand);
  /// A message for a group that is no strand's.
  void tell(GroupId id, FrameKind kind, int peer, std::string bytes = {}, std::function<void()> gone = {});

  /// Reads what has arrived, and reports what has met or failed. True if there was something.
  bool receive();
  /// Gives the kernel what it takes. True if that was something.
  bool flush();
  /// No group is open any more.
  bool is_ending() const noexcept { return begun_ && num_open_ == 0; }
  /// No group is open any more; what was to be sent is sent, and peers have come to their ends or had time for it.
  bool over();
  /// Something may have to happen though nothing arrives.
  bool waits_for_ends() const noexcept { return is_ending() || !leaving_.empty(); }

  std::byte* begin(Line line, const Frame& frame) override;
  void end(Line line, const Frame& frame) override;
  void sent(const Transfer& transfer) override;
  void hear(Connection& connection, News news) override;

 private:
  /// What arrives on a connection just now.
  struct Arriving {
    enum class Kind { kUnwanted, kPosted, kEarly, kText, kLoan };
    Kind kind = Kind::kUnwanted;
    const Inbox* inbox = nullptr;
    Channel* channel = nullptr;
    Channel::Receive receive{};
    std::unique_ptr<std::byte[]> bytes;
    std::string text;
    Loan loan;
  };
  struct Neighbour {
    bool beside;            // on the same machine
    std::int64_t readable;  // its number, where this rank can read its memory, or 0
    bool reads;             // it can read this rank's
  };
  /// A send whose memory a peer reads.
  struct Lent {
    Transfer transfer;
    int peer;
    bool reported;  // when it is returned; else when it is taken
  };
  Inbox& inbox(GroupId id);
  Arriving& arriving(Line line) { return arriving_[static_cast<std::size_t>(line)]; }
  Connection* connection(Line line) { return connections_[static_cast<std::size_t>(line)].get(); }
  int peer_of(Line line) const { return line / num_sockets_; }
  Line first_line(int peer) const { return peer * num_sockets_; }
  int lines_in_use(int peer) const { return neighbours_[static_cast<std::size_t>(peer)].beside ? 1 : num_sockets_; }
  Line line_of_next(Inbox& inbox, int peer, Stream stream, std::int64_t Inbox::Count::* which);
  void put(Line line, Outgoing message, Connection::Turn turn = Connection::Turn::kInOrder);
  void acknowledge(Line line, const Frame& frame);
  void lend(int peer, Outgoing& message);
  void copy(Line line, const Frame& frame, const Loan& loan);
  void take_back(std::uint64_t number);
  void meet(Line line, Channel& channel);
  void complete_later(const Transfer& transfer, Outcome outcome);
  void fail_later(const Transfer& transfer, const std::string& why);
  void leaves(Inbox& inbox, int peer, const std::string& why);
  /// A peer tells this on one more of its connections: whether it is the last. See [Note: several connections].
  bool told_on_all(Inbox& inbox, int peer, FrameKind kind) const;
  void discard(Line line);
  bool has_left(int peer);
  bool give_up_waiting();
  void lose(int peer, const std::string& why);
  void end_connection(Line line, const std::string& why);

  const int rank_, num_sockets_;  // with each peer
  const Socket& poll_;
  std::vector<Neighbour> neighbours_;                     // by rank
  std::vector<std::unique_ptr<Connection>> connections_;  // by line; null for this rank, and where it has ended
  std::vector<Arriving> arriving_;                        // by line
  std::unordered_map<GroupId, std::unique_ptr<Inbox>> inboxes_;
  std::deque<std::pair<Transfer, Outcome>> met_;
  std::deque<Outgoing> to_itself_;
  std::unordered_map<std::uint64_t, Lent> lent_;  // by number
  std::uint64_t num_loans_ = 0;
  std::int64_t copied_ = 0;  // of loans, since the last flush
  std::vector<Line> to_flush_, to_read_;
  std::vector<std::unique_ptr<Connection>> ended_;
  std::map<int, std::chrono::steady_clock::time_point> leaving_;  // peers, one of whose connections is at its end
  int num_open_ = 0;
  bool begun_ = false, shut_down_ = false;
  std::optional<std::chrono::steady_clock::time_point> ending_since_;
};

}  // namespace comm_core
