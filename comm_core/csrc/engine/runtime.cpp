#include "runtime.hpp"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {
namespace {

class GroupBackend final : public Backend {
 public:
  GroupBackend(Runtime& runtime, std::shared_ptr<Group> group, const char* name)
      : runtime_(runtime),
        group_(std::move(group)),
        name_(name),
        rank_(group_->rank()),
        size_(group_->size()),
        letters_(group_->letters()) {}
  GroupBackend(const GroupBackend&) = delete;
  GroupBackend& operator=(const GroupBackend&) = delete;
  /// Whoever dropped it cannot close it any more: what was submitted goes on, and then the group is over.
  ~GroupBackend() override {
    if (closed_ || in_forked_child()) return;
    try {
      runtime_.post([group = group_] { group->close(std::make_shared<Work>("close", "", "", 0)); });
    } catch (...) {
      // finalize() closes everything.
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string name() const override { return name_; }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) override {
    runtime_.post(
        [group = group_, operation = std::move(operation), work, memory = std::move(memory)]() mutable {
          group->submit(std::move(operation), std::move(work), std::move(memory));
        },
        work);
  }

  Birth split(std::optional<int> color, int key, std::shared_ptr<Work> work) override {
    Birth birth{work};
    const auto hand_over = [&runtime = runtime_, name = name_, slot = birth.backend](std::shared_ptr<Group> group) {
      if (group) *slot = runtime.backend_of(std::move(group), name);
    };
    runtime_.post([=, group = group_] { group->split(color, key, work, hand_over); }, work);
    return birth;
  }

  Birth part(std::vector<int> ranks, std::string name, std::shared_ptr<Work> work) override {
    Birth birth{work};
    const auto make = [&runtime = runtime_, group = group_, kind = name_, slot = birth.backend,
                       ranks = std::move(ranks), name = std::move(name), work] {
      std::exception_ptr error;
      try {
        *slot = runtime.backend_of(group->part(ranks, name), kind);
      } catch (...) {
        error = std::current_exception();  // of this group, and not of the engine
      }
      work->finish(error);
    };
    runtime_.post(make, work);
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
  Runtime& runtime_;
  const std::shared_ptr<Group> group_;
  const char* const name_;
  const int rank_, size_;
  std::shared_ptr<Letterbox> letters_;
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Backend> Runtime::backend_of(std::shared_ptr<Group> group, const char* name) {
  return std::make_unique<GroupBackend>(*this, std::move(group), name);
}

void Runtime::start() {
  const std::lock_guard lock(mutex_);
  require_parent_process();
  if (stopped_) throw Unsupported("comm_core was finalized; it cannot be started a second time in one process");
  if (engine_) return;
  owned_ = std::make_unique<Engine>(make_driver());
  engine_ = owned_.get();
}

void Runtime::post(Engine::Task task, std::shared_ptr<Work> work) {
  Engine* const engine = engine_;
  if (!engine || stopped_) throw Error("comm_core was finalized");
  engine->post(std::move(task), std::move(work));
}

bool Runtime::stop() {
  const std::lock_guard lock(mutex_);
  Engine* const engine = engine_;
  if (!engine || engine->on_engine_thread() || in_forked_child()) return true;
  if (!stopped_.exchange(true)) engine->post([this] { close_groups(); });
  return engine->stop(settings().exit_patience);
}

void Runtime::finalize() {
  if (stop()) return;
  throw TimeoutError("operations that no peer answers were still unfinished " +
                     std::to_string(settings().exit_patience.count()) +
                     " s after shutdown began (COMM_CORE_EXIT_SECONDS)");
}

}  // namespace comm_core
