// What the engine does with MPI, step by step in one process, over an MPI that counts communicators and can be told to
// make no more of them, and what other ranks do.
//
//     mpi_test CASE
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm_core/errors.hpp"
#include "mpi/driver.hpp"
#include "mpi/groups/blocking.hpp"
#include "mpi/groups/group.hpp"
#include "mpi/groups/job_order.hpp"

using namespace comm_core;

namespace {

int num_comms = 0;
bool refuses_to_dup = false;
bool peers_are_late = false;  // to the collectives that begin now; held ones are theirs
MPI_Request held = MPI_REQUEST_NULL;
std::vector<int> places;  // where the ranks of a communicator are in MPI_COMM_WORLD; none: as it is

/// Memory of a segment's size. What comes before main(), and after it, asks too.
std::set<void*>& segments() {
  static auto* const all = new std::set<void*>;
  return *all;
}

}  // namespace

void* operator new[](std::size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  if (size == static_cast<std::size_t>(Settings{}.segment_bytes)) segments().insert(memory);
  return memory;
}
void operator delete[](void* memory) noexcept {
  segments().erase(memory);
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept { operator delete[](memory); }

extern "C" {

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made) {
  if (refuses_to_dup) return MPI_ERR_INTERN;
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
int MPI_Iallreduce(const void* send, void* recv, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request* request) {
  if (!peers_are_late) return PMPI_Iallreduce(send, recv, count, type, op, comm, request);
  const auto nothing = [](void*) { return MPI_SUCCESS; };
  const int code = MPI_Grequest_start([](void*, MPI_Status*) { return MPI_SUCCESS; }, nothing,
                                      [](void*, int) { return MPI_SUCCESS; }, nullptr, request);
  held = *request;
  return code;
}
int MPI_Comm_size(MPI_Comm comm, int* size) {
  if (places.empty()) return PMPI_Comm_size(comm, size);
  *size = static_cast<int>(places.size());
  return MPI_SUCCESS;
}
int MPI_Group_translate_ranks(MPI_Group from, int count, const int* ranks, MPI_Group to, int* translated) {
  if (places.empty()) return PMPI_Group_translate_ranks(from, count, ranks, to, translated);
  std::ranges::copy(places, translated);
  return MPI_SUCCESS;
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
    driver_.connect(std::nullopt, work, [this](std::shared_ptr<Group> made) { group = std::move(made); });
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

  void look_often() {
    for (int i = 0; i < 10'000; ++i) driver_.progress();
  }
  MpiDriver& driver() { return driver_; }

  std::shared_ptr<Group> group;

 private:
  MpiDriver driver_;
};

/// Is finished at once, while the message it sent has still to be taken.
class Sender final : public Schedule {
 public:
  explicit Sender(bool& is_gone) : is_gone_(is_gone) {}
  ~Sender() override { is_gone_ = true; }
  bool finished() override { return true; }
  std::int64_t bytes_left() const override { return 0; }

 protected:
  void on_start() override { send(0, &byte_, 1, SendMode::kMatched, 0); }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  bool& is_gone_;
  std::byte byte_{7};
};

void a_step_that_fails_leaves_the_schedule_to_its_messages() {
  constexpr int kTag = 5;
  Rig rig;
  RequestTable requests;
  MpiStrand* itself = nullptr;
  MpiStrand strand(requests, MPI_COMM_WORLD, Strand::Signatures::kAny, 0,
                   [&](std::exception_ptr error) { itself->fail(error, error); });
  itself = &strand;
  bool is_gone = false;
  const auto work = new_work();
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> held = memory;
  strand.add({kTag, [&] { return std::make_unique<Sender>(is_gone); }, work, std::move(memory),
              [] { throw MpiError("no more communicators", MPI_ERR_INTERN); }});
  strand.settle();
  expect(work->done() && work->error(), "the operation should have failed");
  expect(held.expired(), "the caller's memory is not needed any more");
  expect(!is_gone, "MPI will report the message to a schedule that is gone");
  expect(!strand.drained(), "the message was not taken yet");
  char byte = 0;
  MPI_Recv(&byte, 1, MPI_BYTE, 0, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  rig.until([&] { return requests.progress(), is_gone; });
  expect(strand.drained(), "nothing is left to wait for");
}

void a_split_that_fails_gives_its_communicator_back() {
  Rig rig;
  const int before = num_comms;
  const auto work = new_work();
  refuses_to_dup = true;
  rig.group->split(0, 0, work, [](std::shared_ptr<Group>) {});
  rig.until([&] { return work->done(); });
  refuses_to_dup = false;
  expect(work->error() != nullptr, "the split should have failed");
  expect(num_comms == before, "a communicator was left behind");
}

void a_closed_group_is_forgotten() {
  Rig rig;
  const auto work = new_work();
  rig.group->close(work);
  rig.until([&] { return work->done(); });
  rig.until([] { return num_comms == 0; });
  const std::weak_ptr<Group> forgotten = rig.group;
  rig.group.reset();
  expect(forgotten.expired(), "every look at what is under way still visits it");
}

void a_failed_group_keeps_its_number() {
  Rig rig;
  const auto work = new_work();
  rig.group->fail(std::make_exception_ptr(TransportError("a test")));
  rig.group->close(work);
  rig.until([&] { return work->done(); });
  rig.look_often();
  expect(num_comms == 2, "peers may still send to it, and the next communicator would get that");
  const std::weak_ptr<Group> forgotten = rig.group;
  rig.group.reset();
  expect(forgotten.expired(), "every look at what is under way still visits it");
}

void letters_that_were_taken_keep_no_number() {
  Rig rig;
  for (const std::size_t size : {1, 100'000}) rig.group->post(0, std::string(size, 'x'), new_work());
  rig.group->close(new_work());
  rig.until([] { return num_comms == 0; });
}

void the_end_waits_for_ranks_that_are_late() {
  Rig rig;
  peers_are_late = true;
  rig.driver().close_groups();
  const auto later = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  while (std::chrono::steady_clock::now() < later) {
    rig.driver().progress();
    expect(!rig.driver().drained(), "MPI would be finalized while a collective is under way");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  peers_are_late = false;
  MPI_Grequest_complete(held);
  rig.until([&] { return rig.driver().drained(); });
  expect(num_comms == 0, "a communicator was left behind");
}

void what_comes_after_the_end_is_refused() {
  Rig rig;
  rig.driver().close_groups();
  rig.until([] { return num_comms == 0; });
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 4; ++i) works.push_back(new_work());
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> held_memory = memory;
  rig.group->submit(Operation{}, works[0], std::move(memory));
  rig.group->split(0, 0, works[1], [](std::shared_ptr<Group>) {});
  rig.group->post(0, "letter", works[2]);
  rig.group->abandon(works[3]);
  for (const auto& work : works) expect(work->done() && work->error(), "it was neither carried out nor refused");
  expect(held_memory.expired(), "the caller's memory is kept");
  rig.group.reset();
  rig.look_often();  // at nothing that is gone
}

/// Finished at once, as a root is, while a byte has still to come.
class Token final : public Schedule {
 public:
  explicit Token(int& num_begun) : num_begun_(num_begun) {}
  bool finished() override { return true; }
  std::int64_t bytes_left() const override { return 0; }

 protected:
  void on_start() override {
    ++num_begun_;
    receive(0, &heard_, 1, 0);
  }
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  int& num_begun_;
  std::byte heard_{};
};

void a_rank_that_is_far_ahead_waits() {
  constexpr int kTag = 5, kMany = 1000;
  Rig rig;
  RequestTable requests;
  MpiStrand strand(requests, MPI_COMM_WORLD, Strand::Signatures::kOperation, 0, [](std::exception_ptr) {});
  int num_begun = 0;
  const auto last = new_work();
  for (int i = 0; i < kMany; ++i) {
    strand.add({kTag, [&] { return std::make_unique<Token>(num_begun); }, i + 1 < kMany ? new_work() : last, nullptr,
                nullptr});
  }
  while (strand.settle()) {
  }
  expect(0 < num_begun && num_begun < 100, "it holds memory for all that it is ahead");
  const std::byte token{1};
  for (int sent = 0; !last->done() || !strand.drained();) {
    if (sent < num_begun) {
      MPI_Send(&token, 1, MPI_BYTE, 0, kTag, MPI_COMM_WORLD);
      ++sent;
    }
    requests.progress();
    strand.settle();
  }
  expect(num_begun == kMany, "it should have caught up");
  expect(segments().size() < 50, "memory that was needed once is kept for ever");
}

void ranks_of_two_worlds_have_one_order() {
  Rig rig;
  const auto order = [](std::vector<int> where) {
    places = std::move(where);
    const auto found = in_job_order(MPI_COMM_WORLD);
    places.clear();
    return found;
  };
  using Ranks = std::vector<int>;
  expect(order({2, 0, 1}) == Ranks({1, 2, 0}), "that of the job");
  constexpr int kOther = MPI_UNDEFINED;
  expect(order({1, 0, kOther, kOther}) == order({kOther, kOther, 0, 1}), "whichever world sees it");
}

void what_blocks_needs_the_turn() {
  Rig rig;
  TurnLock lock;
  TurnLock::Holder turn(lock);
  const auto refused = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  expect(refused([&] { duplicate(MPI_COMM_WORLD, turn); }), "MPI_Comm_dup would block the engine");
  expect(refused([&] { divide(MPI_COMM_WORLD, 0, 0, turn); }), "MPI_Comm_split would block the engine");
  expect(turn.take(), "nobody has the turn");
  MPI_Comm comm = duplicate(MPI_COMM_WORLD, turn);
  MPI_Comm_free(&comm);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> cases = {
      {"failed step", a_step_that_fails_leaves_the_schedule_to_its_messages},
      {"failed split", a_split_that_fails_gives_its_communicator_back},
      {"closed group", a_closed_group_is_forgotten},
      {"no turn", what_blocks_needs_the_turn},
      {"failed group", a_failed_group_keeps_its_number},
      {"letters", letters_that_were_taken_keep_no_number},
      {"late ranks", the_end_waits_for_ranks_that_are_late},
      {"after the end", what_comes_after_the_end_is_refused},
      {"far ahead", a_rank_that_is_far_ahead_waits},
      {"two worlds", ranks_of_two_worlds_have_one_order},
  };
  try {
    cases.at(argc > 1 ? argv[1] : "")();
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  return 0;
}
