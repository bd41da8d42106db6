// A TCP socket that this process owns.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace comm_core {

/// Closed at its end, in the children of a fork, and where another program is started: a peer learns of the end of this
/// process although others live on that came from it.
class Socket {
 public:
  Socket() = default;
  /// Takes `fd` over.
  explicit Socket(int fd);
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket();

  int fd() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void close() noexcept { *this = Socket(); }

 private:
  int fd_ = -1;
};

/// The text for an errno.
std::string error_text(int error);

/// A nonblocking socket that listens on `host`, an address of this machine as text, at a port that the kernel chooses.
/// Throws TransportError.
Socket listen_on(const std::string& host, int backlog);
int port_of(const Socket& socket);
/// A nonblocking socket that connects from `from` (a port that the kernel chooses) to `to`. Throws TransportError where
/// that fails at once; else it is connected, or has failed, when it becomes writable.
Socket begin_connect(const std::string& from, const std::string& to, int port);
/// Why the connection could not be made; 0: it is there.
int connect_error(const Socket& socket);
/// The next connection of a listening socket, nonblocking; none: nobody is there. Throws TransportError where this
/// process may have no more files.
std::optional<Socket> accept_from(const Socket& listener);

/// Has `poll`, an epoll instance, tell of `events`, with a pointer to `what`; and of nothing more.
void watch(const Socket& poll, int fd, std::uint32_t events, void* what);
void unwatch(const Socket& poll, int fd) noexcept;

/// Small messages leave at once; and where the peer's machine is silent for `silence` while something is to come from
/// it or has not been acknowledged, the connection ends with ETIMEDOUT.
void prepare(const Socket& socket, std::optional<std::chrono::milliseconds> silence);

}  // namespace comm_core
