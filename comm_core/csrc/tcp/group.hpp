// The engine's side of one communicator over TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../engine/group.hpp"
#include "world.hpp"

namespace comm_core {

class TcpGroup final : public Group {
 public:
  /// The group of `members`, ranks of the world, of which this process is one. All of them give the same `id`, and no
  /// other group of the world has it.
  static std::shared_ptr<TcpGroup> make(Groups& groups, std::shared_ptr<World> world, GroupId id,
                                        std::vector<int> members, const Settings& settings);
  TcpGroup(Groups& groups, std::shared_ptr<World> world, GroupId id, std::vector<int> members,
           const Settings& settings);

  GroupId id() const noexcept { return id_; }
  World& world() const noexcept { return *world_; }
  std::shared_ptr<Group> part(const std::vector<int>& ranks, const std::string& name) override;
  /// Ranks of the world, by those of the group.
  const std::vector<int>& members() const noexcept { return members_; }
  bool has(int world_rank) const;
  bool has_failed() const noexcept { return failed(); }

  void take_letter(int world_rank, std::string letter);
  /// Nothing comes from there any more, and nothing gets there.
  void lose(int world_rank, const std::string& why);

 protected:
  std::unique_ptr<Strand> make_message_strand(int peer, int tag, bool sends) override;
  Item split_item(std::optional<int> color, int key, HandOver hand_over) override;
  std::unique_ptr<Abandonment> make_abandonment(std::shared_ptr<Work> work) override;
  void tell(const std::string& reason) override;
  void retire(bool clean) override;

 private:
  std::unique_ptr<Strand> make_strand(Strand::Signatures signatures, Stream stream);
  int rank_of(int world_rank) const;

  const std::shared_ptr<World> world_;
  const GroupId id_;
  const std::vector<int> members_;
  std::uint64_t num_splits_ = 0;
};

}  // namespace comm_core
