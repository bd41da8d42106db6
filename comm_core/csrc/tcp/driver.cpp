#include "driver.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {
namespace {

constexpr int kLook = 20;  // ms, while peers are waited for that may never come

}  // namespace

void TcpDriver::open() {
  poll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  event_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!poll_ || !event_) throw TransportError("epoll or eventfd: " + error_text(errno));
  watch(poll_, event_.fd(), EPOLLIN, nullptr);
}

void TcpDriver::wake() noexcept {
  if (woken_.exchange(true)) return;
  const std::uint64_t one = 1;
  static_cast<void>(::write(event_.fd(), &one, sizeof one));
}

std::shared_ptr<Group> TcpDriver::connect(Mesh mesh) {
  const Settings& own = settings();  // throws where the environment is wrong: first
  const auto world = std::make_shared<World>(std::move(mesh), poll_);
  worlds_.push_back(world);
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  std::iota(members.begin(), members.end(), 0);
  constexpr GroupId kAll = 0;
  return TcpGroup::make(groups_, world, kAll, std::move(members), own);
}

bool TcpDriver::progress() {
  bool moved = false;
  for (const auto& world : worlds_) moved |= world->receive();
  moved |= groups_.settle();
  for (const auto& world : worlds_) moved |= world->flush();
  moved |= std::erase_if(worlds_, [](const auto& world) { return world->over(); }) > 0;
  return moved;
}

bool TcpDriver::waits_for_peers() const {
  return std::ranges::any_of(groups_.awake(), [](const Group* group) { return group->leaving(); }) ||
         std::ranges::any_of(worlds_, [](const auto& world) { return world->waits_for_ends(); });
}

void TcpDriver::wait() {
  std::array<epoll_event, 64> events;
  const int found = epoll_wait(poll_.fd(), events.data(), events.size(), waits_for_peers() ? kLook : -1);
  for (int i = 0; i < found; ++i) {
    const auto& event = events[static_cast<std::size_t>(i)];
    if (event.data.ptr == nullptr) {
      std::uint64_t count = 0;
      static_cast<void>(::read(event_.fd(), &count, sizeof count));
      woken_ = false;
      continue;
    }
    auto& connection = *static_cast<Connection*>(event.data.ptr);
    const bool ended = (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    connection.hear({ended || (event.events & EPOLLIN) != 0, (event.events & EPOLLOUT) != 0, ended});
  }
}

}  // namespace comm_core
