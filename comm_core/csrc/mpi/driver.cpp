#include "driver.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "../engine/group.hpp"
#include "comm_core/errors.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {

namespace {

/// How long ranks that have not come to the end are waited for there, and then in MPI_Finalize: they are no error, so
/// this is over before the patience of whoever stops the engine.
std::chrono::milliseconds patience() { return std::chrono::milliseconds(settings().exit_patience) * 3 / 4; }

}  // namespace

MpiDriver::MpiDriver(std::function<void()> on_foreign_finalize)
    : on_foreign_finalize_(std::move(on_foreign_finalize)), pace_(settings()) {}

MpiDriver::~MpiDriver() = default;

void MpiDriver::open() { session_ = std::make_unique<MpiSession>(on_foreign_finalize_); }

void MpiDriver::connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work,
                        Connector::HandOver hand_over) {
  const MPI_Comm comm = handle ? MPI_Comm_f2c(static_cast<MPI_Fint>(*handle)) : MPI_COMM_WORLD;
  if (comm == MPI_COMM_NULL) {
    const InvalidUsage error("the communicator is MPI_COMM_NULL: this rank is not a member");
    return work->finish(std::make_exception_ptr(error));
  }
  connectors_.push_back(std::make_unique<Connector>(context_, comm, std::move(work), std::move(hand_over)));
}

bool MpiDriver::settle_connectors() {
  bool moved = false;
  // Collectives of one communicator match by their order, so of those that connect the same one only the first goes on.
  std::vector<MPI_Comm> taken;
  for (auto& connector : connectors_) {
    if (std::ranges::find(taken, connector->comm()) != taken.end()) continue;
    taken.push_back(connector->comm());
    moved |= connector->settle();
  }
  std::erase_if(connectors_, [](const auto& connector) { return connector->over(); });
  return moved;
}

bool MpiDriver::progress() {
  bool moved = false;
  try {
    moved = context_.requests.progress();
    moved |= settle_connectors();
    moved |= context_.groups.settle();
  } catch (...) {
    fail(std::current_exception());
  }
  if (moved) pace_.note(Pace::Clock::now(), context_.requests.bytes_received());
  return moved;
}

std::chrono::microseconds MpiDriver::nap() {
  const auto now = Pace::Clock::now();
  std::int64_t bytes_left = 0;
  bool busy = !connectors_.empty() || (context_.groups.closing() && context_.retired.waiting());
  bool delivering = false;
  for (const Group* group : context_.groups.awake()) {
    // Nobody waits for what a closed group could not deliver.
    if (group->closed()) continue;
    busy |= !group->idle() || group->leaving();
    delivering |= !group->delivered();
    bytes_left += group->bytes_left();
  }
  if (busy) return pace_.nap(now, bytes_left);
  if (delivering) return pace_.drain_nap(now);
  return *context_.groups.readers() > 0 ? std::min(pace_.idle_nap(), Pace::Micros(1000)) : pace_.idle_nap();
}

void MpiDriver::fail(std::exception_ptr error) {
  // MPI itself failed, so nothing on it can be trusted.
  context_.groups.fail(error);
}

bool MpiDriver::drained() {
  if (!connectors_.empty() || !context_.groups.closed()) return false;
  // MPI may not be finalized while a nonblocking collective is under way.
  return !context_.retired.waiting() || std::chrono::steady_clock::now() - closing_since_ > patience();
}

void MpiDriver::close_groups() {
  closing_since_ = std::chrono::steady_clock::now();
  context_.groups.close();
}

void MpiDriver::close() { session_->close(); }

}  // namespace comm_core
