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
  std::array<char, 8> magic{'c', 'o', 'm', 'm', '_', 't', 'c', '2'};
  Secret secret{};
  std::int32_t rank = 0, number = 0;  // of the connection, among those of both ranks
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
  int peer = -1, number = 0;  // not known yet
  bool accepted = false;
  State state = State::kConnecting;
  Hello heard{};
  std::size_t received = 0;
};

class Meeting {
 public:
  Meeting(const std::vector<const Socket*>& listeners, int rank, std::vector<std::vector<Endpoint>> endpoints,
          int num_sockets, bool apart, const Secret& secret)
      : listeners_(listeners),
        num_sockets_(num_sockets),
        secret_(secret),
        here_(apart ? Residence() : residence(kept(secret))) {
    mesh_.rank = rank;
    for (auto& of_rank : endpoints) {
      mesh_.peers.push_back({std::move(of_rank), std::vector<Socket>(static_cast<std::size_t>(num_sockets))});
    }
    mesh_.peers[static_cast<std::size_t>(rank)].beside = true;
    missing_ = (size() - 1) * num_sockets;
  }

  Mesh run(std::chrono::duration<double> timeout, const std::function<void()>& interrupted) {
    constexpr auto kAttention = std::chrono::milliseconds(50);
    const auto deadline = deadline_after(timeout, "connect");
    for (int peer = 0; peer < mesh_.rank; ++peer) {
      for (int number = 0; number < num_sockets_; ++number) begin(peer, number);
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
  const Peer& known(int peer) const { return mesh_.peers[static_cast<std::size_t>(peer)]; }
  const Endpoint& endpoint(int peer, int number) const {
    const auto& all = known(peer).endpoints;
    return all[static_cast<std::size_t>(number) % all.size()];
  }
  std::string name(int peer, int number) const {
    const Endpoint& at = endpoint(peer, number);
    return "rank " + std::to_string(peer) + " at " + at.host + " port " + std::to_string(at.port);
  }

  void begin(int peer, int number) {
    Candidate candidate;
    candidate.peer = peer;
    candidate.number = number;
    const Endpoint& there = endpoint(peer, number);
    try {
      candidate.socket = begin_connect(endpoint(mesh_.rank, number).host, there.host, there.port);
    } catch (const TransportError& error) {
      throw TransportError(name(peer, number) + " cannot be reached: " + error.what());
    }
    candidates_.push_back(std::move(candidate));
  }

  std::string absent() const {
    std::string text;
    for (int peer = 0; peer < size(); ++peer) {
      const auto& sockets = known(peer).sockets;
      const auto gap = std::ranges::find_if(sockets, [](const Socket& socket) { return !socket; });
      if (peer == mesh_.rank || gap == sockets.end()) continue;
      text += (text.empty() ? "" : ", ") + name(peer, static_cast<int>(gap - sockets.begin()));
    }
    return text;
  }

  void look(std::chrono::milliseconds longest) {
    std::vector<pollfd> polled;
    for (const auto& candidate : candidates_) {
      const bool connecting = candidate.state == Candidate::State::kConnecting;
      polled.push_back({candidate.socket.fd(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
    }
    for (const auto* listener : listeners_) polled.push_back({listener->fd(), POLLIN, 0});
    if (::poll(polled.data(), polled.size(), static_cast<int>(longest.count())) <= 0) return;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (polled[i].revents != 0) go_on(candidates_[i]);
    }
    std::erase_if(candidates_, [](const Candidate& c) { return c.state == Candidate::State::kOver; });
    for (const auto* listener : listeners_) {
      while (auto socket = accept_from(*listener)) {
        Candidate candidate;
        candidate.socket = std::move(*socket);
        candidate.accepted = true;
        candidate.state = Candidate::State::kAwaitingHello;
        candidates_.push_back(std::move(candidate));
      }
    }
  }

  void go_on(Candidate& candidate) {
    if (candidate.state == Candidate::State::kConnecting) {
      const int error = connect_error(candidate.socket);
      if (error != 0) {
        throw TransportError(name(candidate.peer, candidate.number) + " cannot be reached: " + error_text(error));
      }
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
    own.number = candidate.accepted ? candidate.heard.number : candidate.number;
    own.residence = here_;
    // The first bytes of a connection always fit into the kernel's buffer.
    if (::send(candidate.socket.fd(), &own, sizeof own, MSG_NOSIGNAL) != sizeof own) {
      throw TransportError("a new connection takes no bytes: " + error_text(errno));
    }
  }

  void meet(Candidate& candidate) {
    const Hello& heard = candidate.heard;
    const bool is_rank =
        heard.magic == Hello{}.magic && same(heard.secret, secret_) && 0 <= heard.number &&
        heard.number < num_sockets_ &&
        (candidate.accepted ? mesh_.rank < heard.rank && heard.rank < size() : heard.rank == candidate.peer);
    if (!is_rank) return leave(candidate, "another program answers there");
    Peer& peer = mesh_.peers[static_cast<std::size_t>(heard.rank)];
    Socket& socket = peer.sockets[static_cast<std::size_t>(heard.number)];
    if (socket) return leave(candidate, "it connected twice");
    if (candidate.accepted) introduce(candidate);
    socket = std::move(candidate.socket);
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
    if (!candidate.accepted) {
      throw TransportError(name(candidate.peer, candidate.number) + " cannot be reached: " + why);
    }
    candidate.state = Candidate::State::kOver;
  }

  const std::vector<const Socket*> listeners_;
  const int num_sockets_;
  const Secret secret_;
  const Residence here_;
  Mesh mesh_;
  std::vector<Candidate> candidates_;
  int missing_ = 0;
};

}  // namespace

Mesh connect_mesh(const std::vector<const Socket*>& listeners, int rank, std::vector<std::vector<Endpoint>> endpoints,
                  int num_sockets, bool apart, const Secret& secret, std::chrono::duration<double> timeout,
                  std::optional<std::chrono::milliseconds> silence, const std::function<void()>& interrupted) {
  Mesh mesh = Meeting(listeners, rank, std::move(endpoints), num_sockets, apart, secret).run(timeout, interrupted);
  for (const auto& peer : mesh.peers) {
    for (const auto& socket : peer.sockets) {
      if (socket) prepare(socket, silence);
    }
  }
  return mesh;
}

}  // namespace comm_core
