#include "mailbox.hpp"

#include <algorithm>
#include <utility>

#include "../schedule/exchange.hpp"
#include "check.hpp"

namespace comm_core {
namespace {

constexpr int kFirstTag = 0, kRestTag = 1;

Item rest_of_letter(Lane lane) {
  return {kRestTag,
          [lane]() -> std::unique_ptr<Schedule> {
            return std::make_unique<Exchange>(std::vector<Lane>{lane},
                                              Pieces{settings().segment_bytes, settings().window});
          },
          nullptr, nullptr, nullptr};
}

}  // namespace

MpiMail::MpiMail(RequestTable& requests, MPI_Comm comm, int rank, std::shared_ptr<Letterbox> letters,
                 Strand::OnFailure on_failure, std::function<void()> on_letter)
    : requests_(requests),
      comm_(comm),
      rank_(rank),
      letters_(std::move(letters)),
      on_failure_(std::move(on_failure)),
      on_letter_(std::move(on_letter)) {}

void MpiMail::open() { listen(); }

void MpiMail::listen() {
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(first_.data(), kFirst, MPI_BYTE, MPI_ANY_SOURCE, kFirstTag, comm_, &request), "receiving letters");
  Pending pending;
  pending.owner = this;
  requests_.add(request, std::move(pending));
  receiving_ = true;
}

MpiStrand& MpiMail::strand(std::map<int, std::unique_ptr<MpiStrand>>& strands, int peer) {
  auto& found = strands[peer];
  if (!found) found = std::make_unique<MpiStrand>(requests_, comm_, Strand::Signatures::kAny, rank_, on_failure_);
  return *found;
}

void MpiMail::post(int peer, std::string payload, std::shared_ptr<Work> work) {
  const auto letter = std::make_shared<std::string>(std::move(payload));
  const auto total = static_cast<std::int64_t>(letter->size());
  const auto inside = std::min(letter->size(), kFirst - sizeof total);
  auto first = std::make_unique<First>();
  std::memcpy(first->data(), &total, sizeof total);
  std::memcpy(first->data() + sizeof total, letter->data(), inside);
  const auto bytes = static_cast<int>(sizeof total + inside);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(first->data(), bytes, MPI_BYTE, peer, kFirstTag, comm_, &request),
        [&] { return work->describe() + ": " + std::to_string(bytes) + " bytes"; });
  ++letters_under_way_;
  Pending pending;
  pending.owner = this;
  pending.transfer.is_send = true;
  pending.transfer.ticket = next_ticket_++;
  sending_.emplace(pending.transfer.ticket, std::move(first));
  requests_.add(request, std::move(pending));
  Lane rest;
  rest.peer = peer;
  rest.out = reinterpret_cast<const std::byte*>(letter->data()) + inside;
  rest.out_bytes = total - static_cast<std::int64_t>(inside);
  Item item = rest_of_letter(rest);
  item.work = std::move(work);
  item.memory = letter;
  strand(outgoing_, peer).add(std::move(item));
}

void MpiMail::accept(int source, std::int64_t bytes) {
  --letters_under_way_;
  std::int64_t total = 0;
  if (bytes < static_cast<std::int64_t>(sizeof total)) throw TransportError("a letter without a head arrived");
  std::memcpy(&total, first_.data(), sizeof total);
  const auto inside = static_cast<std::size_t>(bytes) - sizeof total;
  const auto letter = std::make_shared<Letter>(Letter{source, std::string(static_cast<std::size_t>(total), '\0')});
  std::memcpy(letter->payload.data(), first_.data() + sizeof total, inside);
  Lane rest;
  rest.peer = source;
  rest.in = reinterpret_cast<std::byte*>(letter->payload.data()) + inside;
  rest.in_bytes = total - static_cast<std::int64_t>(inside);
  Item item = rest_of_letter(rest);
  item.memory = letter;
  item.done = [letter, letters = letters_] { letters->put(std::move(*letter)); };
  strand(incoming_, source).add(std::move(item));
  on_letter_();
}

void MpiMail::complete(const Pending& request, const Ended& ended) {
  const int error = ended.error;
  if (request.transfer.is_send) {
    sending_.erase(request.transfer.ticket);
    if (error != MPI_SUCCESS) on_failure_(std::make_exception_ptr(MpiError("letter: " + mpi_error_text(error), error)));
    return;
  }
  receiving_ = false;
  try {
    check(error, "receiving letters");
    // A cancelled receive brings nothing.
    if (ended.bytes > 0) accept(ended.source, ended.bytes);
    if (!closing_) listen();
  } catch (...) {
    on_failure_(std::current_exception());
  }
}

bool MpiMail::settle() {
  bool moved = false;
  for (auto* strands : {&outgoing_, &incoming_}) {
    for (auto& [peer, strand] : *strands) moved |= strand->settle();
  }
  return moved;
}

bool MpiMail::idle() const {
  const auto is_idle = [](const auto& entry) { return entry.second->idle(); };
  return std::ranges::all_of(outgoing_, is_idle) && std::ranges::all_of(incoming_, is_idle);
}

bool MpiMail::drained() const {
  const auto is_drained = [](const auto& entry) { return entry.second->drained(); };
  return sending_.empty() && std::ranges::all_of(outgoing_, is_drained) && std::ranges::all_of(incoming_, is_drained);
}

std::int64_t MpiMail::bytes_left() const {
  std::int64_t sum = 0;
  for (const auto& [peer, strand] : incoming_) sum += strand->bytes_left();
  return sum;
}

void MpiMail::fail(std::exception_ptr error, std::exception_ptr later) {
  for (auto* strands : {&outgoing_, &incoming_}) {
    for (auto& [peer, strand] : *strands) strand->fail(error, later);
  }
  close();
}

void MpiMail::close() {
  if (closing_) return;
  closing_ = true;
  requests_.cancel_receives(*this);
}

}  // namespace comm_core
