// What a caller may ask for. Every check throws, naming the operation and both values that do not fit.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "comm_core/communicator.hpp"
#include "comm_core/operation.hpp"
#include "comm_core/types.hpp"
#include "layout.hpp"

namespace comm_core {

struct Checks {
  std::string_view op;
  int rank;
  int size;
  std::optional<int> device = std::nullopt;
  std::string_view owner = "rank";  ///< what a chunk belongs to

  /// In the memory that the backend moves: the host's, or its device's.
  void placed(const Buffer& buffer, std::string_view name) const;
  void same_dtype(const Buffer& send, const Buffer& recv) const;
  void same_count(const Buffer& send, const Buffer& recv) const;
  void writable(const Buffer& buffer, std::string_view name) const;
  void supports(DType dtype, ReduceOp reduce) const;
  void peer(int peer, std::string_view name) const;
  void tag(int tag) const;

  /// The given chunk sizes, which must add up to `total`, or the balanced split.
  CountList chunks(const std::optional<CountList>& given, std::int64_t total, std::string_view name,
                   std::string_view whole) const;
  /// The same, but without given sizes `total` must divide by the number of ranks.
  CountList parts(const std::optional<CountList>& given, std::int64_t total, std::string_view name,
                  std::string_view whole) const;
  /// `buffer` holds exactly this rank's chunk.
  void chunk_fits(const Buffer& buffer, const CountList& counts, std::string_view name) const;

  void disjoint(const Buffer& send, const Buffer& recv) const;
  void same_or_disjoint(const Buffer& send, const Buffer& recv) const;
  void own_chunk_or_disjoint(const Buffer& send, const Buffer& recv, const CountList& counts) const;

  /// fp32, as many elements as `send` and `recv`, which have 16 bits, and apart from both and from each other.
  Wide wide(const WideBuffers& wide, const Buffer& send, const Buffer& recv) const;

 private:
  void wide_beside(const Buffer& wide, std::string_view name, const Buffer& narrow, std::string_view what) const;
  void apart(const Buffer& wide, std::string_view name, const Buffer& other, std::string_view what) const;
  [[noreturn]] void fail(const std::string& why) const;
};

}  // namespace comm_core
