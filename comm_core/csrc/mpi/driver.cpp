#include "driver.hpp"

#include <algorithm>
#include <utility>

#include "check.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {

/// Waits politely until all processes want the new communicator: MPI_Comm_dup itself would spin, and hold up every
/// other communicator, until the last of them comes.
class MpiDriver::Connector final : public RequestOwner {
 public:
  Connector(MpiDriver& driver, MPI_Comm comm, std::shared_ptr<Work> work,
            std::function<void(std::shared_ptr<MpiGroup>)> hand_over)
      : driver_(driver), comm_(comm), work_(std::move(work)), hand_over_(std::move(hand_over)) {}

  void start() {
    int is_inter = 0;
    check(MPI_Comm_test_inter(comm_, &is_inter), "MPI_Comm_test_inter");
    if (is_inter != 0) throw Unsupported("an intercommunicator has no ranks of its own to connect");
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ibarrier(comm_, &request), "MPI_Ibarrier");
    Pending pending;
    pending.owner = this;
    pending.is_send = true;
    driver_.requests().add(request, std::move(pending));
  }

  void complete(const Pending&, int error, int, std::int64_t) override {
    try {
      check(error, "MPI_Ibarrier");
      MPI_Comm comm = MPI_COMM_NULL;
      check(MPI_Comm_dup(comm_, &comm), "MPI_Comm_dup");
      auto group = MpiGroup::make(driver_.requests(), comm);
      driver_.adopt(group);
      hand_over_(std::move(group));
      work_->finish();
    } catch (...) {
      work_->finish(std::current_exception());
    }
  }

  bool over() const { return work_->done(); }

 private:
  MpiDriver& driver_;
  MPI_Comm comm_;
  std::shared_ptr<Work> work_;
  std::function<void(std::shared_ptr<MpiGroup>)> hand_over_;
};

MpiDriver::MpiDriver(std::function<void()> on_foreign_finalize)
    : on_foreign_finalize_(std::move(on_foreign_finalize)), pace_(settings()) {}

MpiDriver::~MpiDriver() = default;

void MpiDriver::open() { session_ = std::make_unique<MpiSession>(on_foreign_finalize_); }

void MpiDriver::connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work,
                        std::function<void(std::shared_ptr<MpiGroup>)> hand_over) {
  try {
    const MPI_Comm comm = handle ? MPI_Comm_f2c(static_cast<MPI_Fint>(*handle)) : MPI_COMM_WORLD;
    if (comm == MPI_COMM_NULL) throw InvalidUsage("the communicator is MPI_COMM_NULL: this rank is not a member");
    auto connector = std::make_unique<Connector>(*this, comm, work, std::move(hand_over));
    connector->start();
    connectors_.push_back(std::move(connector));
  } catch (...) {
    work->finish(std::current_exception());
  }
}

void MpiDriver::adopt(std::shared_ptr<MpiGroup> group) { groups_.push_back(std::move(group)); }

bool MpiDriver::progress() {
  bool moved = false;
  try {
    moved = requests_.progress();
    for (auto& group : groups_) moved |= group->settle();
  } catch (...) {
    fail(std::current_exception());
  }
  std::erase_if(connectors_, [](const auto& connector) { return connector->over(); });
  std::erase_if(groups_, [](const auto& group) { return group->over(); });
  if (moved) pace_.note(Pace::Clock::now(), requests_.bytes_received());
  return moved;
}

std::chrono::microseconds MpiDriver::nap() {
  const auto now = Pace::Clock::now();
  std::int64_t bytes_left = 0;
  bool busy = !connectors_.empty();
  for (const auto& group : groups_) {
    if (group->closed()) continue;
    busy |= !group->idle() || group->leaving();
    bytes_left += group->bytes_left();
  }
  if (busy) return pace_.nap(now, bytes_left);
  // Nobody waits for what a closed group could not deliver.
  const bool delivering =
      std::ranges::any_of(groups_, [](const auto& group) { return !group->closed() && !group->delivered(); });
  if (delivering) return pace_.drain_nap(now);
  const bool awaited = std::ranges::any_of(groups_, [](const auto& group) { return group->letters()->awaited(); });
  return awaited ? std::min(pace_.idle_nap(), Pace::Micros(1000)) : pace_.idle_nap();
}

void MpiDriver::fail(std::exception_ptr error) {
  // MPI itself failed, so nothing on it can be trusted.
  for (auto& group : groups_) group->fail(error);
}

bool MpiDriver::drained() {
  return connectors_.empty() && std::ranges::all_of(groups_, [](const auto& group) { return group->closed(); });
}

void MpiDriver::close_groups() {
  for (auto& group : groups_) {
    if (!group->closed() && !group->closing()) group->close(std::make_shared<Work>("close", "", "", 0));
  }
}

void MpiDriver::close() { session_->close(); }

}  // namespace comm_core
