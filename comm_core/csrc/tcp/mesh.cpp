#include "mesh.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "comm_core/deadline.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

using Clock = std::chrono::steady_clock;

/// The first bytes in both directions of a connection.
struct Hello {
  std::array<char, 8> magic{'c', 'o', 'm', 'm', '_', 't', 'c', '1'};
  Secret secret{};
  std::int64_t rank = 0;
  Residence residence{};
};

/// Kept until the process ends: peers look at it whenever they come to it.
const void* kept(const Secret& secret) { return new Secret(secret); }

bool same(const Secret& a, const Secret& b) {
  auto difference = std::byte{0};  // all of it is looked at: how long that takes tells nothing
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

/// A connection that is being made.
struct Candidate {
  enum class State { kConnecting, kAwaitingHello, kReady, kOver };
  Socket socket;
  int peer = -1;  // not known yet
  bool accepted = false;
  State state = State::kConnecting;
  Hello heard{};
  std::size_t received = 0;
};

class Meeting {
 public:
  Meeting(const Socket& listener, int rank, std::vector<Endpoint> endpoints, const Secret& secret)
      : listener_(listener), secret_(secret), here_(residence(kept(secret))) {
    mesh_.rank = rank;
    for (auto& endpoint : endpoints) mesh_.peers.push_back({std::move(endpoint), Socket()});
    mesh_.peers[static_cast<std::size_t>(rank)].beside = true;
    missing_ = size() - 1;
  }

  Mesh run(std::chrono::duration<double> timeout, const std::function<void()>& interrupted) {
    constexpr auto kAttention = std::chrono::milliseconds(50);
    const auto deadline = deadline_after(timeout, "connect");
    for (int peer = 0; peer < mesh_.rank; ++peer) {
      Candidate candidate;
      candidate.peer = peer;
      const Endpoint& there = endpoint(peer);
      try {
        candidate.socket = begin_connect(endpoint(mesh_.rank).host, there.host, there.port);
      } catch (const TransportError& error) {
        throw TransportError(name(peer) + " cannot be reached: " + error.what());
      }
      candidates_.push_back(std::move(candidate));
    }
    while (missing_ > 0) {
      if (Clock::now() > deadline) {
        throw TransportError("rank " + std::to_string(mesh_.rank) + " waited " + std::to_string(timeout.count()) +
                             " s and is not connected with " + absent());
      }
      look(kAttention);
      if (interrupted) interrupted();
    }
    return std::move(mesh_);
  }

 private:
  int size() const { return static_cast<int>(mesh_.peers.size()); }
  const Endpoint& endpoint(int peer) const { return mesh_.peers[static_cast<std::size_t>(peer)].endpoint; }
  std::string name(int peer) const {
    return "rank " + std::to_string(peer) + " at " + endpoint(peer).host + " port " +
           std::to_string(endpoint(peer).port);
  }

  std::string absent() const {
    std::string text;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == mesh_.rank || mesh_.peers[static_cast<std::size_t>(peer)].socket) continue;
      text += (text.empty() ? "" : ", ") + name(peer);
    }
    return text;
  }

  void look(std::chrono::milliseconds longest) {
    std::vector<pollfd> polled{{listener_.fd(), POLLIN, 0}};
    for (const auto& candidate : candidates_) {
      const bool connecting = candidate.state == Candidate::State::kConnecting;
      polled.push_back({candidate.socket.fd(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
    }
    if (::poll(polled.data(), polled.size(), static_cast<int>(longest.count())) <= 0) return;
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) go_on(candidates_[i - 1]);
    }
    std::erase_if(candidates_, [](const Candidate& c) { return c.state == Candidate::State::kOver; });
    while (auto socket = accept_from(listener_)) {
      Candidate candidate;
      candidate.socket = std::move(*socket);
      candidate.accepted = true;
      candidate.state = Candidate::State::kAwaitingHello;
      candidates_.push_back(std::move(candidate));
    }
  }

  void go_on(Candidate& candidate) {
    if (candidate.state == Candidate::State::kConnecting) {
      const int error = connect_error(candidate.socket);
      if (error != 0) throw TransportError(name(candidate.peer) + " cannot be reached: " + error_text(error));
      introduce(candidate);
      candidate.state = Candidate::State::kAwaitingHello;
      return;
    }
    auto* const into = reinterpret_cast<std::byte*>(&candidate.heard) + candidate.received;
    const auto got = ::recv(candidate.socket.fd(), into, sizeof(Hello) - candidate.received, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return leave(candidate, got < 0 ? error_text(errno) : "it closed the connection");
    candidate.received += static_cast<std::size_t>(got);
    if (candidate.received == sizeof(Hello)) meet(candidate);
  }

  void introduce(const Candidate& candidate) const {
    Hello own;
    own.secret = secret_;
    own.rank = mesh_.rank;
    own.residence = here_;
    // The first bytes of a connection always fit into the kernel's buffer.
    if (::send(candidate.socket.fd(), &own, sizeof own, MSG_NOSIGNAL) != sizeof own) {
      throw TransportError("a new connection takes no bytes: " + error_text(errno));
    }
  }

  void meet(Candidate& candidate) {
    const Hello& heard = candidate.heard;
    const bool is_rank =
        heard.magic == Hello{}.magic && same(heard.secret, secret_) &&
        (candidate.accepted ? mesh_.rank < heard.rank && heard.rank < size() : heard.rank == candidate.peer);
    if (!is_rank) return leave(candidate, "another program answers there");
    Peer& peer = mesh_.peers[static_cast<std::size_t>(heard.rank)];
    if (peer.socket) return leave(candidate, "it connected twice");
    if (candidate.accepted) introduce(candidate);
    peer.socket = std::move(candidate.socket);
    peer.beside = same_machine(here_, heard.residence);
    Secret sample{};
    if (peer.beside && read_memory(heard.residence.pid, heard.residence.sample, sample.data(), sample.size()) &&
        same(sample, secret_)) {
      peer.readable = heard.residence.pid;
    }
    candidate.state = Candidate::State::kOver;
    --missing_;
  }

  /// A stranger may come and go. Whoever was connected to is a rank, and will not come another time.
  void leave(Candidate& candidate, const std::string& why) {
    if (!candidate.accepted) throw TransportError(name(candidate.peer) + " cannot be reached: " + why);
    candidate.state = Candidate::State::kOver;
  }

  const Socket& listener_;
  const Secret secret_;
  const Residence here_;
  Mesh mesh_;
  std::vector<Candidate> candidates_;
  int missing_ = 0;
};

}  // namespace

Mesh connect_mesh(const Socket& listener, int rank, std::vector<Endpoint> endpoints, const Secret& secret,
                  std::chrono::duration<double> timeout, std::optional<std::chrono::milliseconds> silence,
                  const std::function<void()>& interrupted) {
  Mesh mesh = Meeting(listener, rank, std::move(endpoints), secret).run(timeout, interrupted);
  for (const auto& peer : mesh.peers) {
    if (peer.socket) prepare(peer.socket, silence);
  }
  return mesh;
}

}  // namespace comm_core
