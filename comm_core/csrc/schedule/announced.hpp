// An operation whose ranks hear of each other also where its data would not say so.
#pragma once

#include <memory>
#include <utility>

#include "schedule.hpp"

namespace comm_core {

/// Beside the operation, a token goes from every rank to the next: who only sends by what it means itself, as the root
/// of a broadcast, would otherwise not notice that others mean another root; and where all mean another one, all would
/// wait. Nobody waits for a token: one that tells of a disagreement may fail its group when the operation is over.
class Announced final : public Schedule {
 public:
  Announced(std::unique_ptr<Schedule> operation, int left, int right)
      : operation_(std::move(operation)), left_(left), right_(right) {}

  bool finished() override { return operation_->finished(); }
  bool drained() const override { return Schedule::drained() && operation_->drained(); }
  std::int64_t bytes_left() const override { return operation_->bytes_left(); }

 protected:
  void on_start() override {
    receive(left_, &heard_, 1, 0);
    send(right_, &said_, 1, SendMode::kEager, 0);
    operation_->start(transport());
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  std::unique_ptr<Schedule> operation_;
  const int left_, right_;
  const std::byte said_{1};
  std::byte heard_{};
};

}  // namespace comm_core
