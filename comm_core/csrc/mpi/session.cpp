#include "session.hpp"

#include <mpi.h>

#include <utility>

#include "check.hpp"
#include "comm_core/process.hpp"

namespace comm_core {

MpiSession::MpiSession(std::function<void()> on_foreign_finalize)
    : on_foreign_finalize_(std::move(on_foreign_finalize)), keyval_(MPI_KEYVAL_INVALID) {
  int finalized = 0;
  check(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) throw Unsupported("MPI was finalized before; it cannot be started a second time in one process");
  int initialized = 0;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  int level = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    ours_ = true;
  }
  if (level < (ours_ ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE)) {
    if (!ours_) {
      throw Unsupported(
          "MPI was initialised without the thread support that a thread of comm_core's own needs, which calls it "
          "beside yours: ask MPI_Init_thread for MPI_THREAD_MULTIPLE, or leave the initialisation to comm_core");
    }
    MPI_Finalize();
    throw Unsupported("this MPI has no thread support (at least MPI_THREAD_SERIALIZED is needed)");
  }
  check(MPI_Comm_create_keyval(
            MPI_COMM_NULL_COPY_FN,
            [](MPI_Comm, int, void* self, void*) {
              auto* const session = static_cast<MpiSession*>(self);
              if (session->closing_ || in_forked_child()) return MPI_SUCCESS;
              session->foreign_ = true;
              session->on_foreign_finalize_();
              return MPI_SUCCESS;
            },
            &keyval_, nullptr),
        "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, keyval_, this), "MPI_Comm_set_attr");
}

void MpiSession::close() {
  closing_ = true;
  if (ours_ && !foreign_) check(MPI_Finalize(), "MPI_Finalize");
}

}  // namespace comm_core
