// What the engine does with MPI, step by step in one process, over an MPI that counts communicators.
//
//     mpi_test CASE
#include <mpi.h>

#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "mpi/driver.hpp"

using namespace comm_core;

namespace {

int num_comms = 0;

}  // namespace

extern "C" {

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made) {
  ++num_comms;
  return PMPI_Comm_dup(comm, made);
}
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
  ++num_comms;
  return PMPI_Comm_split(comm, color, key, part);
}
int MPI_Comm_free(MPI_Comm* comm) {
  --num_comms;
  return PMPI_Comm_free(comm);
}

}  // extern "C"

namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

std::shared_ptr<Work> new_work() { return std::make_shared<Work>("test", "", "", 0); }

/// A driver of its own, with the group of this one process.
class Rig {
 public:
  Rig() : driver_([] {}) {
    driver_.open();
    const auto work = new_work();
    driver_.connect(std::nullopt, work, [this](std::shared_ptr<MpiGroup> made) { group = std::move(made); });
    until([&] { return work->done(); });
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;
  ~Rig() {
    driver_.close_groups();
    until([this] { return driver_.drained(); });
    driver_.close();
  }

  void until(const std::function<bool()>& holds) {
    for (int i = 0; i < 1'000'000 && !holds(); ++i) driver_.progress();
    expect(holds(), "it did not come about");
  }

  std::shared_ptr<MpiGroup> group;

 private:
  MpiDriver driver_;
};

void a_closed_group_is_forgotten() {
  Rig rig;
  const auto work = new_work();
  rig.group->close(work);
  rig.until([&] { return work->done(); });
  expect(num_comms == 0, "a communicator was left behind");
  const std::weak_ptr<MpiGroup> forgotten = rig.group;
  rig.group.reset();
  expect(forgotten.expired(), "every look at what is under way still visits it");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> cases = {
      {"closed group", a_closed_group_is_forgotten},
  };
  try {
    cases.at(argc > 1 ? argv[1] : "")();
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  return 0;
}
