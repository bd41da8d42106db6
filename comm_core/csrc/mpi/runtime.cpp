#include "runtime.hpp"

#include <mpi.h>

#include <array>
#include <cstdio>
#include <thread>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "comm_core/settings.hpp"
#include "groups/group.hpp"

namespace comm_core {
namespace {

/// The calling threads' side of a group, of which they touch nothing: all of it happens in tasks for the engine.
class MpiBackend final : public Backend {
 public:
  MpiBackend(MpiRuntime& runtime, std::shared_ptr<MpiGroup> group)
      : runtime_(runtime),
        group_(std::move(group)),
        rank_(group_->rank()),
        size_(group_->size()),
        letters_(group_->letters()) {}
  MpiBackend(const MpiBackend&) = delete;
  MpiBackend& operator=(const MpiBackend&) = delete;
  /// Whoever dropped it cannot close it any more: what was submitted goes on, and then the group is over.
  ~MpiBackend() override {
    if (closed_ || in_forked_child()) return;
    try {
      runtime_.post([group = group_] { group->close(std::make_shared<Work>("close", "", "", 0)); });
    } catch (...) {
      // finalize() closes everything.
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string name() const override { return "mpi"; }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) override {
    runtime_.post(
        [group = group_, operation = std::move(operation), work, memory = std::move(memory)]() mutable {
          group->submit(std::move(operation), std::move(work), std::move(memory));
        },
        work);
  }

  Birth split(std::optional<int> color, int key, std::shared_ptr<Work> work) override {
    Birth birth{work};
    const auto hand_over = [&runtime = runtime_, slot = birth.backend](std::shared_ptr<MpiGroup> group) {
      if (!group) return;
      *slot = std::make_unique<MpiBackend>(runtime, std::move(group));
    };
    runtime_.post([=, group = group_] { group->split(color, key, work, hand_over); }, work);
    return birth;
  }

  void post(int peer, std::string payload, std::shared_ptr<Work> work) override {
    runtime_.post(
        [=, group = group_, payload = std::move(payload)]() mutable { group->post(peer, std::move(payload), work); },
        work);
  }

  std::optional<Letter> receive_post(std::chrono::duration<double> timeout,
                                     const std::function<void()>& interrupted) override {
    // The engine may be in the middle of a long idle nap.
    runtime_.post([] {});
    return letters_->take(timeout, interrupted);
  }

  void abandon(std::shared_ptr<Work> work) override {
    runtime_.post([group = group_, work] { group->abandon(work); }, work);
  }

  void close(std::shared_ptr<Work> work) override {
    closed_ = true;
    try {
      runtime_.post([group = group_, work] { group->close(work); }, work);
    } catch (const Error&) {
      work->finish();  // finalize() closed everything
    }
  }

 private:
  MpiRuntime& runtime_;
  const std::shared_ptr<MpiGroup> group_;
  const int rank_, size_;
  std::shared_ptr<Letterbox> letters_;
  bool closed_ = false;
};

}  // namespace

void MpiRuntime::start() {
  const std::lock_guard lock(mutex_);
  require_parent_process();
  if (stopped_) throw Unsupported("comm_core was finalized; it cannot be started a second time in one process");
  if (engine_) return;
  auto driver = std::make_unique<MpiDriver>([this] { foreign_finalize(); });
  driver_ = driver.get();
  owned_ = std::make_unique<Engine>(std::move(driver));
  engine_ = owned_.get();
}

Birth MpiRuntime::connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) {
  start();
  Birth birth{work};
  post(
      [this, handle, work, slot = birth.backend] {
        driver_->connect(handle, work, [this, slot](std::shared_ptr<MpiGroup> group) {
          *slot = std::make_unique<MpiBackend>(*this, std::move(group));
        });
      },
      work);
  return birth;
}

void MpiRuntime::post(Engine::Task task, std::shared_ptr<Work> work) {
  Engine* const engine = engine_;
  if (!engine || stopped_) throw Error("comm_core was finalized");
  engine->post(std::move(task), std::move(work));
}

bool MpiRuntime::stop() {
  const std::lock_guard lock(mutex_);
  Engine* const engine = engine_;
  if (!engine || engine->on_engine_thread() || in_forked_child()) return true;
  if (!stopped_.exchange(true)) engine->post([this] { driver_->close_groups(); });
  return engine->stop(settings().exit_patience);
}

void MpiRuntime::finalize() {
  if (stop()) return;
  throw TimeoutError("operations that no peer answers were still unfinished " +
                     std::to_string(settings().exit_patience.count()) +
                     " s after shutdown began (COMM_CORE_EXIT_SECONDS)");
}

void MpiRuntime::foreign_finalize() noexcept {
  RetiredComms::keep();  // MPI holds its attributes locked while it calls us
  try {
    if (stop()) return;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "comm_core: while MPI was finalized: %s\n", e.what());
    return;
  }
  std::fprintf(stderr, "comm_core: MPI is being finalized but operations are unfinished that no peer answers\n");
  MPI_Abort(MPI_COMM_WORLD, 1);
}

bool MpiRuntime::abort(int code) noexcept {
  Engine* const engine = engine_;
  if (!engine || in_forked_child()) return false;
  RetiredComms::keep();
  const bool running = !stopped_;
  try {
    if (running && !engine->on_engine_thread()) {
      engine->post([code] { MPI_Abort(MPI_COMM_WORLD, code); });
      // MPI_Abort does not return; an engine that is stuck inside MPI never gets to it.
      std::this_thread::sleep_for(std::chrono::seconds(2));
    }
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Abort(MPI_COMM_WORLD, code);
  } catch (...) {
    return false;
  }
  return true;
}

std::map<std::string, std::string> MpiRuntime::describe() const {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return {{"mpi_library", text.data()},
          {"mpi_compiler", COMM_CORE_MPI_COMPILER},
          {"mpi_standard", std::to_string(MPI_VERSION) + "." + std::to_string(MPI_SUBVERSION)}};
}

}  // namespace comm_core
