// The engine's side of one communicator over MPI.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <string>

#include "../../engine/group.hpp"
#include "../context.hpp"
#include "../mailbox.hpp"

namespace comm_core {

class MpiGroup final : public Group {
 public:
  /// Takes `comm` over and duplicates it for what is not a collective, and drives the group until nothing of it is
  /// left. Collective, with the same `settings` on all ranks.
  static std::shared_ptr<MpiGroup> make(MpiContext& context, MPI_Comm comm, const TurnLock::Holder& turn,
                                        const Settings& settings);
  /// Takes both communicators over.
  MpiGroup(MpiContext& context, MPI_Comm comm, MPI_Comm beside, const Settings& settings);

 protected:
  std::unique_ptr<Strand> make_message_strand(int peer, int tag, bool sends) override;
  /// Nobody blocks long in MPI_Comm_split: see [Note: nothing blocks alone].
  Item split_item(std::optional<int> color, int key, HandOver hand_over) override;
  std::unique_ptr<Abandonment> make_abandonment(std::shared_ptr<Work> work) override;
  void tell(const std::string& reason) override;
  void retire(bool clean) override;

 private:
  MpiContext& context_;
  MPI_Comm comm_, beside_;        // of collectives; of letters and messages
  int before_ = -1, after_ = -1;  // see Turn
  MpiMail* mail_ = nullptr;
};

}  // namespace comm_core
