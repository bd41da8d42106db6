#include "connection.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

constexpr std::size_t kBatch = 16;             // messages in one call
constexpr std::int64_t kReadAtOnce = 1 << 20;  // others have their turn after so many bytes
constexpr std::size_t kScrap = 64 * 1024;
constexpr std::chrono::duration<double> kPause{200e-6}, kLull{5e-3};  // a lull says nothing of how fast data comes
constexpr std::int64_t kMostAtOnce = 512 * 1024;

/// Where bytes go that nobody wants.
std::byte* scrap() {
  static thread_local std::array<std::byte, kScrap> memory;
  return memory.data();
}

std::size_t bytes_of(const Outgoing& message) { return static_cast<std::size_t>(message.frame.bytes); }

iovec piece(const void* data, std::size_t bytes) { return {const_cast<void*>(data), bytes}; }

}  // namespace

Connection::Connection(Line line, Socket socket, Receiver& receiver)
    : line_(line), socket_(std::move(socket)), receiver_(receiver) {}

void Connection::send(Outgoing message, Turn turn) {
  if (!message.owned.empty()) message.data = nullptr;  // it moves with the message
  if (turn == Turn::kUrgent) {
    urgent_.push_back(std::move(message));
    return;
  }
  const Queue key = queue_of(message.frame);
  auto& queue = queues_[key];
  if (queue.empty()) turns_.push_back(key);
  queue.push_back(std::move(message));
}

bool Connection::fill() {
  while (batch_.size() < kBatch) {
    if (!urgent_.empty()) {
      batch_.push_back(std::move(urgent_.front()));
      urgent_.pop_front();
      continue;
    }
    if (turns_.empty()) break;
    const Queue key = turns_.front();
    turns_.pop_front();
    const auto found = queues_.find(key);
    batch_.push_back(std::move(found->second.front()));
    found->second.pop_front();
    if (found->second.empty()) {
      queues_.erase(found);
    } else {
      turns_.push_back(key);
    }
  }
  return !batch_.empty();
}

bool Connection::flush() {
  bool moved = false;
  while (!blocked_ && fill()) {
    std::array<iovec, 2 * kBatch> pieces;
    std::size_t count = 0, total = 0, skip = done_;
    const auto add = [&](const void* data, std::size_t bytes) {
      const auto gone = std::min(skip, bytes);
      skip -= gone;
      if (bytes == gone) return;
      pieces[count++] = piece(static_cast<const std::byte*>(data) + gone, bytes - gone);
      total += bytes - gone;
    };
    std::int64_t following = 0;
    for (auto at = batch_.rbegin(); at != batch_.rend(); ++at) {
      if (at + 1 == batch_.rend() && done_ > 0) break;  // its frame has gone
      at->frame.following = following;
      following += at->frame.bytes;
    }
    for (const auto& message : batch_) {
      add(&message.frame, sizeof(Frame));
      add(message.data ? static_cast<const void*>(message.data) : message.owned.data(),
          static_cast<std::size_t>(message.frame.bytes));
    }
    msghdr header{};
    header.msg_iov = pieces.data();
    header.msg_iovlen = count;
    const auto sent = ::sendmsg(fd(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) throw TransportError(error_text(errno));
      blocked_ = true;
      return moved;
    }
    moved = true;
    pass(static_cast<std::size_t>(sent));
    if (static_cast<std::size_t>(sent) < total) {
      blocked_ = true;
      return true;
    }
  }
  return moved;
}

void Connection::pass(std::size_t bytes) {
  done_ += bytes;
  // All of them leave the queue first: whoever is told may send more, or fail and drop what waits.
  std::vector<Outgoing> gone;
  while (!batch_.empty()) {
    const auto size = sizeof(Frame) + static_cast<std::size_t>(batch_.front().frame.bytes);
    if (done_ < size) break;
    done_ -= size;
    gone.push_back(std::move(batch_.front()));
    batch_.pop_front();
  }
  for (const auto& message : gone) {
    if (message.gone) message.gone();
    if (message.transfer.strand && message.reported) receiver_.sent(message.transfer);
  }
}

bool Connection::read() {
  for (std::int64_t budget = kReadAtOnce; budget > 0;) {
    std::array<iovec, 2> pieces;
    std::size_t count = 0, wanted = 0;
    const auto add = [&](void* data, std::size_t bytes) {
      pieces[count++] = {data, bytes};
      wanted += bytes;
    };
    bool whole = true;
    if (left_ > 0) {
      auto bytes = static_cast<std::size_t>(left_);
      if (target_ == nullptr && bytes > kScrap) bytes = kScrap, whole = false;
      add(target_ ? target_ : scrap(), bytes);
    }
    if (whole) add(stage_.data() + staged_, kStage - staged_);
    const auto got = ::readv(fd(), pieces.data(), static_cast<int>(count));
    if (got == 0) {
      finished_ = true;
      readable_ = false;
      return false;
    }
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) {
        sleep_until_worthwhile();
        return true;
      }
      throw TransportError(error_text(errno));
    }
    budget -= got;
    note_arrival(got);
    const auto landed = std::min<std::int64_t>(got, left_);
    left_ -= landed;
    if (target_) target_ += landed;
    staged_ += static_cast<std::size_t>(got - landed);
    if (open_ && left_ == 0) {
      open_ = false;
      receiver_.end(line_, frame_);
    }
    parse();
    // The kernel tells of what comes later; of an end that has come it has told.
    if (static_cast<std::size_t>(got) < wanted && !ended_) {
      sleep_until_worthwhile();
      return true;
    }
  }
  return true;
}

void Connection::note_arrival(std::int64_t bytes) {
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> passed = now - last_arrival_;
  last_arrival_ = now;
  if (passed > kLull) return;
  constexpr double kShare = 0.125;  // of what is new in the mean
  bytes_per_second_ += kShare * (static_cast<double>(bytes) / std::max(passed.count(), 1e-6) - bytes_per_second_);
}

void Connection::sleep_until_worthwhile() {
  readable_ = false;
  // See [Note: wakeups]. More than the sender is sure to send would be waited for in vain.
  const auto sure = open_ ? left_ + frame_.following : frame_.following;
  const auto streaming = static_cast<std::int64_t>(bytes_per_second_ * kPause.count());
  const auto wanted = std::max({std::int64_t{1}, open_ ? left_ : 0, std::min(sure, streaming)});
  const auto low_water = static_cast<int>(std::min(wanted, kMostAtOnce));
  if (low_water == low_water_) return;
  low_water_ = low_water;
  setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
}

void Connection::parse() {
  std::size_t at = 0;
  while (!open_ && staged_ - at >= sizeof(Frame)) {
    std::memcpy(&frame_, stage_.data() + at, sizeof(Frame));
    at += sizeof(Frame);
    begin_message(frame_);
    const auto inside = std::min(static_cast<std::size_t>(left_), staged_ - at);
    if (target_ && inside > 0) {
      std::memcpy(target_, stage_.data() + at, inside);
      target_ += inside;
    }
    at += inside;
    left_ -= static_cast<std::int64_t>(inside);
    if (left_ > 0) break;
    open_ = false;
    receiver_.end(line_, frame_);
  }
  std::memmove(stage_.data(), stage_.data() + at, staged_ - at);
  staged_ -= at;
}

void Connection::begin_message(const Frame& frame) {
  if (frame.kind > FrameKind::kGivenUp || frame.bytes < 0 || frame.bytes > kLongestMessage) {
    throw TransportError("what arrives is no message of comm_core's");
  }
  open_ = true;
  left_ = frame.bytes;
  target_ = receiver_.begin(line_, frame);
}

std::vector<Transfer> Connection::drop(const Strand& strand) {
  const auto is_its = [&](const Outgoing& message) { return message.transfer.strand == &strand; };
  return drop_those(is_its);
}

void Connection::drop(const Transfer& transfer) {
  drop_those([&](const Outgoing& message) { return is_of(message.transfer, transfer); });
}

std::vector<Transfer> Connection::drop_those(const std::function<bool(const Outgoing&)>& are_meant) {
  std::vector<Transfer> reported;
  const auto note = [&](const Outgoing& message) {
    if (message.reported) reported.push_back(message.transfer);
  };
  for (auto& message : batch_) {
    if (!are_meant(message)) continue;
    note(message);
    if (message.data) message.owned.assign(reinterpret_cast<const char*>(message.data), bytes_of(message));
    message.data = nullptr;
    message.transfer = {};
  }
  for (auto& [key, queue] : queues_) {
    for (const auto& message : queue) {
      if (are_meant(message)) note(message);
    }
    std::erase_if(queue, are_meant);
  }
  std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
  std::erase_if(turns_, [this](Queue key) { return !queues_.contains(key); });
  return reported;
}

std::vector<Outgoing> Connection::drop_all() {
  std::vector<Outgoing> all;
  for (auto* queue : {&batch_, &urgent_}) {
    for (auto& message : std::exchange(*queue, {})) all.push_back(std::move(message));
  }
  for (auto& [key, queue] : queues_) {
    for (auto& message : queue) all.push_back(std::move(message));
  }
  queues_.clear();
  turns_.clear();
  done_ = 0;
  return all;
}

void Connection::shut_down() noexcept { ::shutdown(fd(), SHUT_WR); }

}  // namespace comm_core
