// What the engine, its schedules and a communicator owe to whoever waits when something throws, forks or ends, and when
// a peer means what nobody knows.
//
//     engine_test CASE
#include "engine/engine.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "comm_core/communicator.hpp"
#include "comm_core/errors.hpp"
#include "schedule/message.hpp"
#include "signature.hpp"

using namespace comm_core;

namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

class Idle : public NappingDriver {
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

/// Loads a library that makes its thread count in another way.
class Careless final : public Idle {
 public:
  void open() override { std::fesetround(FE_UPWARD); }
};

void what_opens_does_not_change_how_sums_are_rounded() {
  Engine engine(std::make_unique<Careless>());
  std::promise<int> mode;
  engine.post([&] { mode.set_value(std::fegetround()); });
  expect(mode.get_future().get() == FE_TONEAREST, "sums would differ between ranks");
  expect(engine.stop(std::chrono::seconds(5)), "the engine should have stopped");
}

/// abort() asks for it while another thread may be inside finalize().
void whose_thread_it_is_can_be_asked_while_it_ends() {
  for (int round = 0; round < 100; ++round) {
    Engine engine(std::make_unique<Idle>());
    std::promise<bool> inside;
    engine.post([&] { inside.set_value(engine.on_engine_thread()); });
    expect(inside.get_future().get(), "a task runs on the engine's thread");
    std::atomic<bool> asks{false}, stopped{false}, found{false};
    std::thread other([&] {
      while (!stopped) {
        if (engine.on_engine_thread()) found = true;
        asks = true;
      }
    });
    while (!asks) std::this_thread::yield();
    engine.stop(std::chrono::seconds(5));
    stopped = true;
    other.join();
    expect(!found, "this is another thread");
  }
}

/// A peer whose messages begin with a header that no operation has.
class Foreign final : public Transport {
 public:
  void send(int, const std::byte*, std::int64_t, SendMode, Schedule&, std::int64_t) override {}
  void receive(int, std::byte* data, std::int64_t bytes, Schedule&, std::int64_t ticket) override {
    constexpr std::int64_t kHeader[] = {8, 0x1234'5678'9abc'def9};
    if (bytes != sizeof kHeader) return;
    std::memcpy(data, kHeader, sizeof kHeader);
    header = ticket;
  }
  std::int64_t header = 0;
};

void a_peer_that_means_nothing_known_is_described() {
  std::byte data[8];
  Message message(Message::Direction::kReceive, {0, nullptr, 0, data, sizeof data}, {1024, 4}, 6);
  Foreign transport;
  message.start(transport);
  try {
    message.received(transport.header);
    expect(false, "the header is another one");
  } catch (const TransportError& error) {
    expect(std::string(error.what()).find("the peer's is a something else but a") != std::string::npos, error.what());
  }
  for (std::int64_t signature = -5; signature < 1 << 16; ++signature) {
    expect(!describe_signature(signature).empty(), "every number is something");
  }
  for (const auto signature : {std::int64_t{9}, std::int64_t{10 << 4}, std::int64_t{5 << 8 | 2}, std::int64_t{-1},
                               std::numeric_limits<std::int64_t>::min()}) {
    expect(describe_signature(signature) == "something else", "no operation has it");
  }
}

void sixteen_roots_are_told_apart() {
  constexpr int kLeast = 32767;  // of any MPI's tags
  Operation operation;
  operation.kind = OpKind::kReduce;
  operation.dtype = DType::kBool;
  operation.reduce = ReduceOp::kProd;
  std::map<int, int> roots;
  for (operation.peer = 0; operation.peer < 16; ++operation.peer) {
    const int signature = signature_of(operation, kLeast);
    expect(0 <= signature && signature <= kLeast, "it is too large for a tag");
    expect(roots.emplace(signature, operation.peer).second, "two roots look the same");
    const std::string root = ", root " + std::to_string(operation.peer);
    expect(describe_signature(signature) == "reduce of bool, op prod" + root, "it is called something else");
  }
  expect(signature_of(operation, std::numeric_limits<int>::max()) > kLeast, "more are where there is room");
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

void a_window_grows_with_what_a_message_takes() {
  Settings settings;
  expect(window_over(0, settings) == 12, "nothing");
  expect(window_over(100e-6, settings) == 12, "an Ethernet");
  expect(window_over(500e-6, settings) == 21, "half a millisecond");
  expect(window_over(20e-3, settings) == 64, "a country");
  expect(window_over(std::numeric_limits<double>::infinity(), settings) == 64, "for ever");
  settings.window_is_given = true;
  settings.window = 7;
  expect(window_over(20e-3, settings) == 7, "given");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> cases = {
      {"task throws", a_task_that_throws_fails_its_work},
      {"rounding", what_opens_does_not_change_how_sums_are_rounded},
      {"end", whose_thread_it_is_can_be_asked_while_it_ends},
      {"unknown", a_peer_that_means_nothing_known_is_described},
      {"roots", sixteen_roots_are_told_apart},
      {"message refused", a_message_that_was_refused_is_not_waited_for},
      {"window", a_window_grows_with_what_a_message_takes},
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
