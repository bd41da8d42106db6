// What the engine, its schedules and a communicator owe to whoever waits when something throws, or forks.
//
//     engine_test CASE
#include "engine/engine.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "comm_core/communicator.hpp"
#include "comm_core/errors.hpp"
#include "schedule/schedule.hpp"

using namespace comm_core;

namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

class Idle final : public Driver {
 public:
  void open() override {}
  bool progress() override { return false; }
  std::chrono::microseconds nap() override { return std::chrono::milliseconds(1); }
  void fail(std::exception_ptr) override {}
  bool drained() override { return true; }
  void close() override {}
};

void a_task_that_throws_fails_its_work() {
  Engine engine(std::make_unique<Idle>());
  const auto work = std::make_shared<Work>("test", "", "", 0);
  engine.post([] { throw TransportError("no memory"); }, work);
  try {
    work->wait(Work::Seconds(5), [] {});
    expect(false, "the work should have failed");
  } catch (const TransportError& error) {
    expect(std::string(error.what()) == "no memory", "the error should be the task's");
  }
  expect(engine.stop(std::chrono::seconds(5)), "the engine should have stopped");
}

class Refusing final : public Transport {
 public:
  void send(int, const std::byte*, std::int64_t, SendMode, Schedule&, std::int64_t) override { refuse(); }
  void receive(int, std::byte*, std::int64_t, Schedule&, std::int64_t) override { refuse(); }

 private:
  static void refuse() { throw TransportError("refused"); }
};

class OneMessage final : public Schedule {
 public:
  explicit OneMessage(bool sends) : sends_(sends) {}
  bool finished() override { return true; }
  std::int64_t bytes_left() const override { return 0; }

 protected:
  void on_start() override { sends_ ? send(0, &byte_, 1, SendMode::kEager, 0) : receive(0, &byte_, 1, 0); }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  const bool sends_;
  std::byte byte_{1};
};

void a_message_that_was_refused_is_not_waited_for() {
  Refusing transport;
  for (const bool sends : {true, false}) {
    OneMessage schedule(sends);
    try {
      schedule.start(transport);
      expect(false, "the transport refuses");
    } catch (const TransportError&) {
      expect(schedule.drained(), "the schedule waits for a message that was never posted");
    }
  }
}

/// Holds its caller, and with it the communicator's lock, inside submit().
class Holding final : public Backend {
 public:
  std::promise<void> inside, go_on;

  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  std::string name() const override { return "holding"; }
  void submit(Operation, std::shared_ptr<Work> work, KeepAlive) override {
    inside.set_value();
    go_on.get_future().wait();
    work->finish();
  }
  Birth split(std::optional<int>, int, std::shared_ptr<Work>) override { return {}; }
  void post(int, std::string, std::shared_ptr<Work>) override {}
  std::optional<Letter> receive_post(std::chrono::duration<double>, const std::function<void()>&) override {
    return std::nullopt;
  }
  void abandon(std::shared_ptr<Work>) override {}
  void close(std::shared_ptr<Work>) override {}
};

void a_forked_child_does_not_wait_for_a_lock_of_its_parents() {
  auto owned = std::make_unique<Holding>();
  auto* const backend = owned.get();
  const auto communicator = std::make_shared<Communicator>(std::move(owned), "test");
  std::thread other([&] { communicator->barrier(""); });
  backend->inside.get_future().wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    try {
      communicator->receive_post(std::chrono::seconds(0), [] {});
    } catch (const Error&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  backend->go_on.set_value();
  other.join();
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "receive_post() should raise in the child, at once");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> cases = {
      {"task throws", a_task_that_throws_fails_its_work},
      {"message refused", a_message_that_was_refused_is_not_waited_for},
      {"fork", a_forked_child_does_not_wait_for_a_lock_of_its_parents},
  };
  try {
    cases.at(argc > 1 ? argv[1] : "")();
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  return 0;
}
