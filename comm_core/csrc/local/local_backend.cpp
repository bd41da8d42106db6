// A group of one: the same validation and the same schedules as everywhere, with nobody to talk to.
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../engine/letterbox.hpp"
#include "../schedule/planner.hpp"
#include "comm_core/backend.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

class LocalBackend final : public Backend {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  std::string name() const override { return "local"; }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) override {
    if (operation.kind == OpKind::kSend || operation.kind == OpKind::kReceive) {
      return match({std::move(operation), std::move(work), std::move(memory)});
    }
    operation.narrow();
    const auto schedule = plan(operation, 0, 1, settings());
    schedule->start(nobody_);
    operation.widen();
    memory.reset();
    work->finish();
  }

  Birth split(std::optional<int> color, int, std::shared_ptr<Work> work) override {
    Birth birth{std::move(work)};
    if (color) *birth.backend = make_local_backend();
    birth.work->finish();
    return birth;
  }

  Birth part(std::vector<int>, std::string, std::shared_ptr<Work> work) override {
    return split(0, 0, std::move(work));
  }

  void post(int, std::string payload, std::shared_ptr<Work> work) override {
    letters_.put({0, std::move(payload)});
    work->finish();
  }

  std::optional<Letter> receive_post(std::chrono::duration<double> timeout,
                                     const std::function<void()>& interrupted) override {
    return letters_.take(timeout, interrupted);
  }

  void close(std::shared_ptr<Work> work) override {
    letters_.close();
    abandon(std::move(work));
  }

  void abandon(std::shared_ptr<Work> work) override {
    const std::lock_guard lock(mutex_);
    for (auto& [tag, waiting] : waiting_) {
      for (auto& message : waiting) {
        message.memory.reset();
        message.work->finish(std::make_exception_ptr(
            TransportError(message.work->describe() + ": closed before the other side of this message was issued")));
      }
    }
    waiting_.clear();
    work->finish();
  }

 private:
  struct Message {
    Operation operation;
    std::shared_ptr<Work> work;
    KeepAlive memory;
  };
  /// A group of one never posts a message to a transport.
  class Nobody final : public Transport {
    void send(int, const std::byte*, std::int64_t, SendMode, Schedule&, std::int64_t) override {}
    void receive(int, std::byte*, std::int64_t, Schedule&, std::int64_t) override {}
  };

  /// A send to oneself waits for its receive, or the other way round, in order of issue per tag.
  void match(Message message) {
    const std::lock_guard lock(mutex_);
    auto& waiting = waiting_[message.operation.tag];
    if (waiting.empty() || waiting.front().operation.kind == message.operation.kind) {
      waiting.push_back(std::move(message));
      return;
    }
    Message other = std::move(waiting.front());
    waiting.pop_front();
    const bool sends = message.operation.kind == OpKind::kSend;
    deliver(sends ? message : other, sends ? other : message);
  }

  static void deliver(Message& send, Message& receive) {
    const auto sent = send.operation.count * static_cast<std::int64_t>(item_size(send.operation.dtype));
    const auto expected = receive.operation.count * static_cast<std::int64_t>(item_size(receive.operation.dtype));
    std::exception_ptr error;
    if (sent == expected) {
      if (sent > 0) std::memmove(receive.operation.recv, send.operation.send, static_cast<std::size_t>(sent));
    } else {
      error =
          std::make_exception_ptr(TransportError(receive.work->describe() + ": rank 0 sent " + std::to_string(sent) +
                                                 " bytes but " + std::to_string(expected) + " were expected"));
    }
    send.memory.reset();
    receive.memory.reset();
    send.work->finish();
    receive.work->finish(error);
  }

  std::mutex mutex_;
  std::map<int, std::deque<Message>> waiting_;  // by tag
  Letterbox letters_;
  Nobody nobody_;
};

}  // namespace

std::unique_ptr<Backend> make_local_backend() { return std::make_unique<LocalBackend>(); }

}  // namespace comm_core
