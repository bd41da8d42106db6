#include "world.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "comm_core/errors.hpp"
#include "group.hpp"

namespace comm_core {
namespace {

/// How long the end of a job waits for peers to read what was sent last, and to come to their own ends.
constexpr std::chrono::seconds kLinger{2};

/// A message that is copied by its receiver costs two more system calls and a small message back.
constexpr std::int64_t kWorthLending = 16 * 1024;

constexpr std::int64_t kCopiedAtOnce = 256 * 1024;

const char* const kEnded = "it has ended before";
const char* const kLeft = "closed at the other end";

}  // namespace

World::World(Mesh mesh, const Socket& poll)
    : rank_(mesh.rank), num_sockets_(static_cast<int>(mesh.peers.front().sockets.size())), poll_(poll) {
  for (auto& peer : mesh.peers) {
    neighbours_.push_back({peer.beside, peer.readable, false});
    for (auto& socket : peer.sockets) {
      const auto line = static_cast<Line>(connections_.size());
      auto& made = connections_.emplace_back();
      if (!socket) continue;
      made = std::make_unique<Connection>(line, std::move(socket), *this);
      watch(poll_, made->fd(), EPOLLIN | EPOLLRDHUP | EPOLLOUT | EPOLLET, made.get());
    }
  }
  arriving_.resize(connections_.size());
  for (int peer = 0; peer < size(); ++peer) {
    if (neighbours_[static_cast<std::size_t>(peer)].readable != 0) tell(0, FrameKind::kReads, peer);
  }
}

World::~World() {
  for (const auto& connection : connections_) {
    if (connection) unwatch(poll_, connection->fd());
  }
}

Inbox& World::inbox(GroupId id) {
  auto& found = inboxes_[id];
  if (!found) found = std::make_unique<Inbox>();
  return *found;
}

void World::open(GroupId id, TcpGroup& group) {
  Inbox& box = inbox(id);
  box.group = &group;
  box.members = group.members();
  ++num_open_;
  begun_ = true;
  for (auto& [peer, letter] : std::exchange(box.letters, {})) group.take_letter(peer, std::move(letter));
  for (const int peer : group.members()) {
    if (peer == rank_ || connection(first_line(peer))) continue;
    box.closed_by.insert(peer);
    if (!box.gone.contains(peer)) group.lose(peer, kEnded);
  }
}

void World::close(GroupId id, const TcpGroup& group, bool clean) {
  for (const int peer : group.members()) {
    if (peer != rank_) tell(id, clean ? FrameKind::kClosed : FrameKind::kGivenUp, peer);
  }
  Inbox& box = inbox(id);
  box.group = nullptr;
  box.closed = true;
  box.closed_by.insert(rank_);
  for (std::size_t line = 0; line < arriving_.size(); ++line) {
    if (arriving_[line].inbox == &box) discard(static_cast<Line>(line));
  }
  box.channels.clear();
  --num_open_;
  if (box.forgotten()) inboxes_.erase(id);
}

void World::discard(Line line) {
  if (connection(line)) connection(line)->discard_rest();
  arriving(line) = Arriving();
}

Line World::line_of_next(Inbox& box, int peer, Stream stream, std::int64_t Inbox::Count::* which) {
  const int among = lines_in_use(peer);
  if (among == 1) return first_line(peer);
  return first_line(peer) + static_cast<int>((box.counts[{peer, stream}].*which)++ % among);
}

void World::put(Line line, Outgoing message, Connection::Turn turn) {
  if (peer_of(line) == rank_) {
    to_itself_.push_back(std::move(message));
    return;
  }
  Connection* const found = connection(line);
  if (found == nullptr) {
    if (message.gone) message.gone();
    if (message.transfer.strand && message.reported) fail_later(message.transfer, kEnded);
    return;
  }
  if (found->flushed() && !found->blocked()) to_flush_.push_back(line);
  found->send(std::move(message), turn);
}

void World::send(GroupId id, Stream stream, const Transfer& transfer, int peer, const std::byte* data, SendMode mode,
                 int signature) {
  Outgoing message;
  message.frame = {id, transfer.bytes, signature, stream, FrameKind::kMessage, mode == SendMode::kMatched, 0};
  message.data = data;
  message.transfer = transfer;
  Inbox& box = inbox(id);
  const Line line = line_of_next(box, peer, stream, &Inbox::Count::sent);
  if (mode == SendMode::kMatched) {
    if (const auto gone = box.gone.find(peer); gone != box.gone.end()) return fail_later(transfer, gone->second);
    box.channels[{line, stream}].untaken.push_back(transfer);
  }
  if (neighbours_[static_cast<std::size_t>(peer)].reads && transfer.bytes >= kWorthLending && connection(line)) {
    lend(peer, message);
  } else if (mode == SendMode::kMatched) {
    message.reported = false;  // when it was taken
  }
  put(line, std::move(message));
}

/// [Note: loans] On one machine the receiver copies a message from the sender's memory (process_vm_readv): once,
/// instead of into the kernel and out of it. Until it says that it has done so, the memory stays, whatever becomes of
/// the operation: else a peer that has not heard of a failure yet would read what is there by then.
void World::lend(int peer, Outgoing& message) {
  const Loan loan{reinterpret_cast<std::uint64_t>(message.data), message.frame.bytes, ++num_loans_};
  lent_.emplace(loan.number, Lent{message.transfer, peer, !message.frame.acknowledge});
  message.frame.kind = FrameKind::kLent;
  message.frame.bytes = sizeof loan;
  message.data = nullptr;
  message.owned.assign(reinterpret_cast<const char*>(&loan), sizeof loan);
  message.transfer = {};
}

void World::copy(Line line, const Frame& frame, const Loan& loan) {
  Frame message = frame;
  message.kind = FrameKind::kMessage;
  message.bytes = loan.bytes;
  if (loan.bytes < 0 || loan.bytes > kLongestMessage) throw TransportError("what arrives is no loan");
  std::byte* const target = begin(line, message);
  const auto pid = neighbours_[static_cast<std::size_t>(peer_of(line))].readable;
  if (target && !read_memory(pid, loan.address, target, static_cast<std::size_t>(loan.bytes))) {
    throw TransportError("its memory cannot be read any more");
  }
  Outgoing answer;
  answer.frame = {loan.number, 0, 0, kCollectives, FrameKind::kReturned, false, 0};
  put(line, std::move(answer), Connection::Turn::kUrgent);
  end(line, message);
  // Peers go on with what this rank has, while it copies the rest.
  copied_ += loan.bytes;
  if (copied_ < kCopiedAtOnce) return;
  copied_ = 0;
  flush();
}

void World::take_back(std::uint64_t number) {
  const auto node = lent_.extract(number);
  if (!node) return;
  const Lent& lent = node.mapped();
  if (lent.reported) lent.transfer.strand->complete(lent.transfer, {});
}

bool World::is_one_machine(const std::vector<int>& ranks) const {
  return std::ranges::all_of(ranks, [this](int rank) { return neighbours_[static_cast<std::size_t>(rank)].beside; });
}

void World::complete_later(const Transfer& transfer, Outcome outcome) {
  met_.emplace_back(transfer, std::move(outcome));
}

void World::fail_later(const Transfer& transfer, const std::string& why) {
  Outcome outcome;
  outcome.reason = why.empty() ? "rank " + std::to_string(transfer.peer) + " has closed the communicator" : why;
  complete_later(transfer, std::move(outcome));
}

void World::receive(GroupId id, Stream stream, const Transfer& transfer, int peer, std::byte* data) {
  Inbox& box = inbox(id);
  const Line line = line_of_next(box, peer, stream, &Inbox::Count::received);
  Channel& channel = box.channels[{line, stream}];
  channel.posted.push_back({transfer, data});
  if (!channel.early.empty()) return meet(line, channel);
  const auto gone = box.gone.find(peer);
  if (gone == box.gone.end()) return;
  channel.posted.pop_back();
  fail_later(transfer, gone->second);
}

/// Receives that were posted meet what has arrived before them.
void World::meet(Line line, Channel& channel) {
  while (!channel.early.empty() && !channel.posted.empty()) {
    const auto receive = channel.posted.front();
    const auto arrival = std::move(channel.early.front());
    channel.posted.pop_front();
    channel.early.pop_front();
    if (arrival.frame.bytes == receive.transfer.bytes) {
      std::memcpy(receive.data, arrival.bytes.get(), static_cast<std::size_t>(arrival.frame.bytes));
    }
    acknowledge(line, arrival.frame);
    complete_later(receive.transfer, {nullptr, std::nullopt, arrival.frame.signature, arrival.frame.bytes});
  }
}

void World::acknowledge(Line line, const Frame& frame) {
  if (!frame.acknowledge) return;
  Outgoing message;
  message.frame = {frame.group, 0, 0, frame.stream, FrameKind::kTaken, false, 0};
  put(line, std::move(message), Connection::Turn::kUrgent);
}

void World::tell(GroupId id, FrameKind kind, int peer, std::string bytes, std::function<void()> gone) {
  Outgoing message;
  message.frame = {id, static_cast<std::int64_t>(bytes.size()), 0, kCollectives, kind, false, 0};
  // Letters hold nobody up; whatever else there is to tell comes after the messages of the collectives.
  if (kind == FrameKind::kLetter) message.frame.stream = kLetters;
  message.owned = std::move(bytes);
  message.gone = std::move(gone);
  const bool ends = kind == FrameKind::kFailed || kind == FrameKind::kClosed || kind == FrameKind::kGivenUp;
  const Line first = first_line(peer);
  for (Line line = first + (ends ? lines_in_use(peer) : 1) - 1; line > first; --line) put(line, message);
  put(first, std::move(message));
}

void World::drop(GroupId id, Strand& strand) {
  std::vector<Transfer> dropped;
  const auto is_its = [&](const Transfer& transfer) { return transfer.strand == &strand; };
  for (auto& [key, channel] : inbox(id).channels) {
    std::erase_if(channel.posted, [&](const Channel::Receive& receive) {
      if (!is_its(receive.transfer)) return false;
      dropped.push_back(receive.transfer);
      return true;
    });
    std::ranges::copy_if(channel.untaken, std::back_inserter(dropped), is_its);
    std::erase_if(channel.untaken, is_its);
  }
  std::erase_if(met_, [&](const auto& entry) {
    if (!is_its(entry.first)) return false;
    dropped.push_back(entry.first);
    return true;
  });
  std::erase_if(to_itself_, [&](const Outgoing& message) {
    if (!is_its(message.transfer)) return false;
    if (message.reported) dropped.push_back(message.transfer);
    return true;
  });
  // Sends whose memory a peer reads are reported when it has.
  const auto spare = [&](const Transfer& transfer) {
    const auto found = std::ranges::find_if(dropped, [&](const Transfer& t) { return is_of(t, transfer); });
    if (found == dropped.end()) return false;  // it was taken, and reported
    dropped.erase(found);
    return true;
  };
  for (auto& [number, lent] : lent_) {
    if (!lent.reported && is_its(lent.transfer)) lent.reported = spare(lent.transfer);
  }
  for (Line line = 0; line < first_line(size()); ++line) {
    Arriving& at = arriving(line);
    if (at.kind == Arriving::Kind::kPosted && is_its(at.receive.transfer)) {
      dropped.push_back(at.receive.transfer);
      discard(line);
    }
    if (!connection(line)) continue;
    const auto unsent = connection(line)->drop(strand);
    dropped.insert(dropped.end(), unsent.begin(), unsent.end());
  }
  for (const auto& transfer : dropped) strand.dropped(transfer);
}

bool World::receive() {
  bool moved = give_up_waiting();
  for (const Line line : std::exchange(to_read_, {})) {
    Connection* const found = connection(line);
    if (found == nullptr) continue;
    moved = true;
    try {
      if (!found->read()) {
        leaving_.emplace(peer_of(line), std::chrono::steady_clock::now());
        if (has_left(peer_of(line))) lose(peer_of(line), kLeft);
      } else if (found->readable()) {
        to_read_.push_back(line);
      }
    } catch (const std::exception& error) {  // of memory, too
      lose(peer_of(line), error.what());
    }
  }
  while (!to_itself_.empty()) {
    moved = true;
    const Outgoing message = std::move(to_itself_.front());
    to_itself_.pop_front();
    std::byte* const target = begin(first_line(rank_), message.frame);
    const auto bytes = static_cast<std::size_t>(message.frame.bytes);
    const void* const data = message.data ? static_cast<const void*>(message.data) : message.owned.data();
    if (target && bytes > 0) std::memcpy(target, data, bytes);
    end(first_line(rank_), message.frame);
    if (message.gone) message.gone();
    if (message.transfer.strand && message.reported) sent(message.transfer);
  }
  while (!met_.empty()) {
    moved = true;
    const auto [transfer, outcome] = std::move(met_.front());
    met_.pop_front();
    transfer.strand->complete(transfer, outcome);
  }
  return moved;
}

bool World::flush() {
  bool moved = false;
  for (std::size_t i = 0; i < to_flush_.size(); ++i) {  // more may come meanwhile
    Connection* const found = connection(to_flush_[i]);
    if (found == nullptr) continue;
    try {
      moved |= found->flush();
    } catch (const TransportError& error) {
      lose(peer_of(to_flush_[i]), error.what());
      moved = true;
    }
  }
  to_flush_.clear();
  return moved;
}

void World::hear(Connection& connection, News news) {
  if (this->connection(connection.line()) == nullptr) return;  // it has ended since
  if (news.writable) {
    connection.unblock();
    to_flush_.push_back(connection.line());
  }
  if (!news.readable) return;
  if (!connection.readable()) to_read_.push_back(connection.line());
  connection.has_arrived(news.ended);
}

void World::sent(const Transfer& transfer) { transfer.strand->complete(transfer, {}); }

std::byte* World::begin(Line line, const Frame& frame) {
  Arriving& at = arriving(line);
  at = Arriving();
  const auto bytes = static_cast<std::size_t>(frame.bytes);
  switch (frame.kind) {
    case FrameKind::kLent:
      if (bytes != sizeof(Loan)) throw TransportError("what arrives is no loan");
      at.kind = Arriving::Kind::kLoan;
      return reinterpret_cast<std::byte*>(&at.loan);
    case FrameKind::kLetter:
    case FrameKind::kFailed:
      at.kind = Arriving::Kind::kText;
      at.text.resize(bytes);
      return reinterpret_cast<std::byte*>(at.text.data());
    case FrameKind::kReturned:
    case FrameKind::kReads:
    case FrameKind::kTaken:
    case FrameKind::kClosed:
    case FrameKind::kGivenUp:
      return nullptr;
    case FrameKind::kMessage:
      break;
  }
  Inbox& box = inbox(frame.group);
  at.inbox = &box;
  if (box.closed || (box.group && box.group->has_failed())) return nullptr;
  Channel& channel = box.channels[{line, frame.stream}];
  at.channel = &channel;
  // Strands look at signatures and sizes when the message is there. What does not fit goes nowhere near the memory.
  if (channel.early.empty() && !channel.posted.empty() && channel.posted.front().transfer.bytes == frame.bytes) {
    at.kind = Arriving::Kind::kPosted;
    at.receive = channel.posted.front();
    channel.posted.pop_front();
    return at.receive.data;
  }
  at.kind = Arriving::Kind::kEarly;
  at.bytes = std::make_unique_for_overwrite<std::byte[]>(bytes);
  return at.bytes.get();
}

void World::end(Line line, const Frame& frame) {
  const int peer = peer_of(line);
  Arriving at = std::exchange(arriving(line), Arriving());
  switch (frame.kind) {
    case FrameKind::kLent:
      return copy(line, frame, at.loan);
    case FrameKind::kReturned:
      return take_back(frame.group);
    case FrameKind::kReads:
      neighbours_[static_cast<std::size_t>(peer)].reads = true;
      return;
    case FrameKind::kMessage:
      if (at.kind == Arriving::Kind::kPosted) {
        acknowledge(line, frame);
        at.receive.transfer.strand->complete(at.receive.transfer,
                                             {nullptr, std::nullopt, frame.signature, frame.bytes});
      } else if (at.kind == Arriving::Kind::kEarly) {
        at.channel->early.push_back({frame, std::move(at.bytes)});
        meet(line, *at.channel);
      }
      return;
    case FrameKind::kTaken:
    case FrameKind::kLetter:
    case FrameKind::kFailed:
    case FrameKind::kClosed:
    case FrameKind::kGivenUp:
      break;
  }
  Inbox& box = inbox(frame.group);
  if (frame.kind == FrameKind::kTaken) {
    const auto found = box.channels.find({line, frame.stream});
    if (found == box.channels.end() || found->second.untaken.empty()) return;  // the group has failed here
    const Transfer transfer = found->second.untaken.front();
    found->second.untaken.pop_front();
    transfer.strand->complete(transfer, {});
  } else if (frame.kind == FrameKind::kLetter) {
    if (box.group) {
      box.group->take_letter(peer, std::move(at.text));
    } else if (!box.closed) {
      box.letters.emplace_back(peer, std::move(at.text));
    }
  } else if (!told_on_all(box, peer, frame.kind)) {
    return;
  } else if (frame.kind == FrameKind::kFailed) {
    leaves(box, peer, at.text.empty() ? "it has failed" : at.text);
  } else {
    box.closed_by.insert(peer);
    if (frame.kind == FrameKind::kClosed) leaves(box, peer, "");
    if (box.forgotten()) inboxes_.erase(frame.group);
  }
}

bool World::told_on_all(Inbox& box, int peer, FrameKind kind) const {
  return ++box.told[{peer, kind}] >= lines_in_use(peer);
}

/// Whoever waits for the peer does so in vain.
void World::leaves(Inbox& box, int peer, const std::string& why) {
  if (!box.gone.emplace(peer, why).second) return;
  for (auto& [key, channel] : box.channels) {
    if (peer_of(key.first) != peer) continue;
    for (const auto& receive : std::exchange(channel.posted, {})) fail_later(receive.transfer, why);
    for (const auto& transfer : std::exchange(channel.untaken, {})) {
      if (connection(key.first)) connection(key.first)->drop(transfer);
      fail_later(transfer, why);
    }
  }
}

void World::end_connection(Line line, const std::string& why) {
  auto& place = connections_[static_cast<std::size_t>(line)];
  const Arriving at = std::exchange(arriving(line), Arriving());
  if (at.kind == Arriving::Kind::kPosted) fail_later(at.receive.transfer, why);
  unwatch(poll_, place->fd());
  ended_.push_back(std::move(place));  // who calls may be inside it
  for (const auto& message : ended_.back()->drop_all()) {
    if (message.gone) message.gone();
    if (message.transfer.strand && message.reported) fail_later(message.transfer, why);
  }
}

/// Of several connections one may be read to its end before another: what the peer sent last may be there still.
bool World::has_left(int peer) {
  for (Line line = first_line(peer); line < first_line(peer + 1); ++line) {
    if (connection(line) && !connection(line)->finished()) return false;
  }
  return true;
}

/// A peer that has lost one connection has closed the others; the end of one that is cut off never arrives.
bool World::give_up_waiting() {
  const auto before = std::chrono::steady_clock::now() - kLinger;
  const auto late = std::ranges::find_if(leaving_, [&](const auto& entry) { return entry.second < before; });
  if (late == leaving_.end()) return false;
  lose(late->first, kLeft);
  return true;
}

/// Of several connections the others end with the first that fails.
void World::lose(int peer, const std::string& why) {
  if (!connection(first_line(peer))) return;
  leaving_.erase(peer);
  for (Line line = first_line(peer); line < first_line(peer + 1); ++line) end_connection(line, why);
  std::erase_if(lent_, [&](const auto& entry) {
    const Lent& lent = entry.second;
    if (lent.peer == peer && lent.reported) fail_later(lent.transfer, why);
    return lent.peer == peer;
  });
  std::vector<TcpGroup*> groups;
  for (const auto& [id, box] : inboxes_) {
    if (!box->has(peer)) continue;
    box->closed_by.insert(peer);
    if (box->group && !box->gone.contains(peer)) groups.push_back(box->group);
  }
  for (auto* group : groups) group->lose(peer, why);
  std::erase_if(inboxes_, [](const auto& entry) { return entry.second->forgotten(); });
}

bool World::over() {
  ended_.clear();
  if (!is_ending()) return false;
  const auto now = std::chrono::steady_clock::now();
  if (!ending_since_) ending_since_ = now;
  const auto all = [this](const auto& holds) {
    return std::ranges::all_of(connections_, [&](const auto& c) { return !c || holds(*c); });
  };
  if (!shut_down_ && all([](const Connection& c) { return c.flushed(); })) {
    shut_down_ = true;
    for (const auto& connection : connections_) {
      if (connection) connection->shut_down();
    }
  }
  if (now - *ending_since_ <= kLinger && !all([](const Connection&) { return false; })) return false;
  // Here, on the engine's thread: somebody may hold a closed group, and with it this object, for as long as it likes.
  for (auto& connection : connections_) {
    if (connection) unwatch(poll_, connection->fd());
    connection.reset();
  }
  return true;
}

}  // namespace comm_core
