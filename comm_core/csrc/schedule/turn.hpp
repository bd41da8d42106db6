// One at a time, where what follows blocks: whoever is let in is let in on all ranks.
#pragma once

#include <memory>
#include <utility>

#include "schedule.hpp"

namespace comm_core {

/// One of a process. Everything that takes it does so on the engine's thread.
class TurnLock {
 public:
  /// Holds the lock from take() until give_back() or its end.
  class Holder {
   public:
    explicit Holder(TurnLock& lock) : lock_(lock) {}
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    ~Holder() { give_back(); }

    /// False while another one holds it.
    bool take() { return holds_ = holds_ || !std::exchange(lock_.taken_, true); }
    bool holds() const { return holds_; }
    void give_back() {
      if (std::exchange(holds_, false)) lock_.taken_ = false;
    }

   private:
    TurnLock& lock_;
    bool holds_ = false;
  };

  /// Gives back what `holder` has, at its own end.
  class Return {
   public:
    explicit Return(Holder& holder) : holder_(holder) {}
    Return(const Return&) = delete;
    Return& operator=(const Return&) = delete;
    ~Return() { holder_.give_back(); }

   private:
    Holder& holder_;
  };

 private:
  bool taken_ = false;
};

/// Takes the locks of all ranks of a group, one rank after the other: a token goes from `before` to this rank, which
/// keeps it until it has its own lock, and on to `after` (-1: this rank is the first, or the last). No two groups wait
/// for each other's locks as long as all go through their ranks in one order, that of the job.
class Turn final : public Schedule {
 public:
  Turn(std::shared_ptr<TurnLock::Holder> holder, int before, int after)
      : holder_(std::move(holder)), before_(before), after_(after) {}

  bool finished() override {
    if (passed_) return true;
    if ((before_ >= 0 && !arrived_) || !holder_->take()) return false;
    if (after_ >= 0) send_copy(after_, &token_, 1, SendMode::kMatched);
    return passed_ = true;
  }
  std::int64_t bytes_left() const override { return before_ >= 0 && !arrived_ ? 1 : 0; }

 protected:
  void on_start() override {
    if (before_ >= 0) receive(before_, &token_, 1, 0);
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override { arrived_ = true; }

 private:
  std::shared_ptr<TurnLock::Holder> holder_;
  const int before_, after_;
  std::byte token_{};
  bool arrived_ = false, passed_ = false;
};

}  // namespace comm_core
