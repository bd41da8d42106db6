// How the ranks of a job come to their connections with each other.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "neighbour.hpp"
#include "socket.hpp"

namespace comm_core {

/// What all ranks of a job know, and nobody else.
using Secret = std::array<std::byte, 32>;

/// Where a rank can be reached.
struct Endpoint {
  std::string host;  ///< an address as text
  int port = 0;
};

/// What a rank knows of another one, or of itself.
struct Peer {
  std::vector<Endpoint> endpoints;  ///< one for each of its interfaces
  std::vector<Socket> sockets;      ///< of every connection with it; not open for this rank
  bool beside = false;              ///< on the same machine
  std::int64_t readable = 0;        ///< the number of the process, whose memory may be read; 0: it may not
};

struct Mesh {
  int rank = 0;
  std::vector<Peer> peers;  ///< by rank
};

/// A rank connects to those before it, `num_sockets` times, and is connected to by those behind. Connections take turns
/// among the `endpoints` of a rank, at which `listeners` listen for this one. Both sides show the `secret`; whoever
/// shows something else, or nothing, is not a rank: that connection is closed, and nothing else happens. Collective and
/// blocking. `apart`: this process counts as a machine of its own.
///
/// Throws TransportError, with the ranks that are not there, when `timeout` has passed, and at once where a rank
/// refuses or has given up itself. `interrupted` is called now and then, and may throw.
Mesh connect_mesh(const std::vector<const Socket*>& listeners, int rank, std::vector<std::vector<Endpoint>> endpoints,
                  int num_sockets, bool apart, const Secret& secret, std::chrono::duration<double> timeout,
                  std::optional<std::chrono::milliseconds> silence, const std::function<void()>& interrupted);

}  // namespace comm_core
