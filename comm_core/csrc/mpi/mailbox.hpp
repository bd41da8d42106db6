// Letters between ranks, beside the collectives and at any time.
#pragma once

#include <mpi.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "../engine/letterbox.hpp"
#include "../engine/mail.hpp"
#include "comm_core/settings.hpp"
#include "strand.hpp"

namespace comm_core {

/// One receive from anybody is always posted for a letter's first kilobytes (tag 0); the rest of a long letter follows
/// in segments (tag 1). Letters of one sender keep their order. Other tags of the communicator are free: kNumTags.
class MpiMail final : public Mail, public RequestOwner {
 public:
  static constexpr int kNumTags = 2;

  MpiMail(RequestTable& requests, MPI_Comm comm, int rank, std::shared_ptr<Letterbox> letters,
          Strand::OnFailure on_failure, std::function<void()> on_letter);

  void open();
  void post(int peer, std::string payload, std::shared_ptr<Work> work) override;
  bool settle() override;
  bool idle() const override;
  bool drained() const override;
  std::int64_t bytes_left() const override;
  void fail(std::exception_ptr error, std::exception_ptr later) override;
  void close() override;
  bool closed() const override { return !receiving_; }
  /// Posted here, less those that began to arrive here: over all ranks, what is on its way.
  std::int64_t letters_under_way() const { return letters_under_way_; }

  void complete(const Pending& request, const Ended& ended) override;

 private:
  static constexpr std::size_t kFirst = 4096;
  using First = std::array<char, kFirst>;

  void listen();
  void accept(int source, std::int64_t bytes);
  MpiStrand& strand(std::map<int, std::unique_ptr<MpiStrand>>& strands, int peer);

  RequestTable& requests_;
  MPI_Comm comm_;
  int rank_;
  std::shared_ptr<Letterbox> letters_;
  Strand::OnFailure on_failure_;
  std::function<void()> on_letter_;  // called when one begins to arrive
  First first_{};
  bool receiving_ = false, closing_ = false;
  std::map<std::int64_t, std::unique_ptr<First>> sending_;  // by ticket
  std::int64_t next_ticket_ = 0, letters_under_way_ = 0;
  std::map<int, std::unique_ptr<MpiStrand>> outgoing_, incoming_;  // by peer
};

}  // namespace comm_core
