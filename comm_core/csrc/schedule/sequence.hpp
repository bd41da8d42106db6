// Schedules that are made of others.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "schedule.hpp"

namespace comm_core {

/// One schedule after the other; each begins when the one before it is finished.
class Sequence final : public Schedule {
 public:
  using Parts = std::vector<std::unique_ptr<Schedule>>;
  /// `scratch` is memory the parts share.
  explicit Sequence(Parts parts, std::unique_ptr<std::byte[]> scratch = nullptr)
      : scratch_(std::move(scratch)), parts_(std::move(parts)) {}

  bool finished() override {
    while (at_ < parts_.size() && parts_[at_]->finished()) {
      if (++at_ < parts_.size()) parts_[at_]->start(transport());
    }
    return at_ == parts_.size();
  }
  bool drained() const override {
    for (const auto& part : parts_) {
      if (!part->drained()) return false;
    }
    return true;
  }
  std::int64_t bytes_left() const override {
    std::int64_t sum = 0;
    for (std::size_t i = at_; i < parts_.size(); ++i) sum += parts_[i]->bytes_left();
    return sum;
  }

 protected:
  void on_start() override {
    if (!parts_.empty()) parts_.front()->start(transport());
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  std::unique_ptr<std::byte[]> scratch_;
  Parts parts_;
  std::size_t at_ = 0;
};

/// What a group of one does, and what a rank keeps for itself.
class LocalCopy final : public Schedule {
 public:
  LocalCopy(const std::byte* from, std::byte* to, std::int64_t bytes) : from_(from), to_(to), bytes_(bytes) {}
  bool finished() override { return true; }
  std::int64_t bytes_left() const override { return 0; }

 protected:
  void on_start() override {
    if (bytes_ > 0 && from_ != to_) std::memcpy(to_, from_, static_cast<std::size_t>(bytes_));
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  const std::byte* from_;
  std::byte* to_;
  std::int64_t bytes_;
};

}  // namespace comm_core
