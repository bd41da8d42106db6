// Letters that arrived, until somebody reads them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "comm_core/backend.hpp"
#include "comm_core/deadline.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {

class Letterbox {
 public:
  using Readers = std::shared_ptr<std::atomic<int>>;

  /// Counts the threads that wait for a letter here in `readers`, which other boxes may share.
  explicit Letterbox(Readers readers = std::make_shared<std::atomic<int>>(0)) : readers_(std::move(readers)) {}

  void put(Letter letter) {
    {
      const std::lock_guard lock(mutex_);
      letters_.push_back(std::move(letter));
    }
    arrived_.notify_one();
  }

  /// No more letters: whoever waits for one is told.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    arrived_.notify_all();
  }

  /// Throws InvalidUsage when the box is closed and empty.
  std::optional<Letter> take(std::chrono::duration<double> timeout, const std::function<void()>& interrupted) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kAttention = std::chrono::milliseconds(50);
    const auto deadline = deadline_after(timeout, "receive_post");
    const Reader reader(*readers_);
    std::unique_lock lock(mutex_);
    while (letters_.empty()) {
      if (closed_) throw InvalidUsage("receive_post: the communicator was closed");
      const auto now = Clock::now();
      if (now >= deadline) return std::nullopt;
      arrived_.wait_until(lock, std::min<Clock::time_point>(deadline, now + kAttention));
      if (!letters_.empty() || !interrupted) continue;
      lock.unlock();
      interrupted();
      lock.lock();
    }
    Letter letter = std::move(letters_.front());
    letters_.pop_front();
    return letter;
  }

 private:
  class Reader {
   public:
    explicit Reader(std::atomic<int>& readers) : readers_(readers) { ++readers_; }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader() { --readers_; }

   private:
    std::atomic<int>& readers_;
  };

  const Readers readers_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Letter> letters_;
  bool closed_ = false;
};

}  // namespace comm_core
