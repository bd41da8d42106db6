#include "socket.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"

namespace comm_core {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// `host` is an address as text, so nobody is asked.
Addresses address_of(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) throw TransportError("'" + host + "' is no address: " + gai_strerror(error));
  return Addresses(found, &freeaddrinfo);
}

[[noreturn]] void fail(const std::string& doing, int error) { throw TransportError(doing + ": " + error_text(error)); }

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> IN_CLASSA_NSHIFT == IN_LOOPBACKNET;
}

void set(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.fd(), level, option, &value, sizeof value);
}

Socket new_socket(int family) {
  const int fd = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  if (fd < 0) fail("a socket", errno);
  return Socket(fd);
}

}  // namespace

Socket::Socket(int fd) : fd_(fd) { close_in_children(fd_); }

Socket::~Socket() {
  if (fd_ < 0) return;
  keep_in_children(fd_);
  if (!in_forked_child()) ::close(fd_);
}

std::string error_text(int error) { return std::generic_category().message(error); }

Socket listen_on(const std::string& host, int backlog) {
  const auto address = address_of(host, 0);
  Socket socket = new_socket(address->ai_family);
  const std::string doing = "listening on " + host;
  if (::bind(socket.fd(), address->ai_addr, address->ai_addrlen) != 0) fail(doing, errno);
  if (::listen(socket.fd(), backlog) != 0) fail(doing, errno);
  return socket;
}

int port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) fail("getsockname", errno);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Socket begin_connect(const std::string& from, const std::string& to, int port) {
  const auto target = address_of(to, port), source = address_of(from, 0);
  Socket socket = new_socket(target->ai_family);
  // From a loopback address no other host is reached: the kernel chooses.
  if (is_loopback(*source->ai_addr) == is_loopback(*target->ai_addr)) {
    if (::bind(socket.fd(), source->ai_addr, source->ai_addrlen) != 0) fail("connecting from " + from, errno);
  }
  if (::connect(socket.fd(), target->ai_addr, target->ai_addrlen) != 0 && errno != EINPROGRESS) {
    fail("connecting to " + to + " port " + std::to_string(port), errno);
  }
  return socket;
}

int connect_error(const Socket& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

std::optional<Socket> accept_from(const Socket& listener) {
  const int fd = ::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) return Socket(fd);
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) fail("accepting a connection", errno);
  return std::nullopt;
}

void watch(const Socket& poll, int fd, std::uint32_t events, void* what) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = what;
  if (epoll_ctl(poll.fd(), EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl", errno);
}

void unwatch(const Socket& poll, int fd) noexcept { epoll_ctl(poll.fd(), EPOLL_CTL_DEL, fd, nullptr); }

void prepare(const Socket& socket, std::optional<std::chrono::milliseconds> silence) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (!silence) return;
  constexpr int kProbes = 3;
  const int seconds = static_cast<int>(std::max<std::int64_t>(silence->count() / 1000, 2));
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence->count()));
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 2));
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 2 / kProbes));
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

}  // namespace comm_core
