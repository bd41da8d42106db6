// Letters of one group, whatever carries them.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "comm_core/work.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// Sends letters, and puts those that arrive into the group's Letterbox. On the engine's thread.
class Mail {
 public:
  virtual ~Mail() = default;
  virtual void post(int peer, std::string payload, std::shared_ptr<Work> work) = 0;
  /// Goes on; true if something changed.
  virtual bool settle() = 0;
  /// No letter of this rank waits to be sent.
  virtual bool idle() const = 0;
  /// Nor is any still on its way to a peer.
  virtual bool drained() const = 0;
  /// Bytes of letters that have begun to arrive.
  virtual std::int64_t bytes_left() const = 0;
  virtual void fail(std::exception_ptr error, std::exception_ptr later) = 0;
  /// No letters from here on; done once closed() holds.
  virtual void close() = 0;
  virtual bool closed() const = 0;
};

}  // namespace comm_core
