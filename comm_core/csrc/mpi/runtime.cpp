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

std::unique_ptr<Driver> MpiRuntime::make_driver() {
  auto driver = std::make_unique<MpiDriver>([this] { foreign_finalize(); });
  driver_ = driver.get();
  return driver;
}

Birth MpiRuntime::connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) {
  start();
  Birth birth{work};
  post(
      [this, handle, work, slot = birth.backend] {
        driver_->connect(handle, work,
                         [this, slot](std::shared_ptr<Group> group) { *slot = backend_of(std::move(group), "mpi"); });
      },
      work);
  return birth;
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
  Engine* const running = engine();
  if (!running || in_forked_child()) return false;
  RetiredComms::keep();
  try {
    if (!stopped() && !running->on_engine_thread()) {
      running->post([code] { MPI_Abort(MPI_COMM_WORLD, code); });
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
