#include "validation.hpp"

#include <numeric>
#include <string>

#include "comm_core/errors.hpp"
#include "comm_core/operation.hpp"

namespace comm_core {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::string place(const std::optional<int>& device) {
  return device ? "on CUDA device " + std::to_string(*device) : std::string("in host memory");
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.count > 0 && b.count > 0 && a.data < b.end() && b.data < a.end();
}

}  // namespace

void Checks::fail(const std::string& why) const { throw InvalidUsage(std::string(op) + ": " + why); }

void Checks::placed(const Buffer& buffer, std::string_view name) const {
  if (buffer.device == device || buffer.count == 0) return;
  fail(std::string(name) + " is " + place(buffer.device) + " but this communicator moves what is " + place(device));
}

void Checks::same_dtype(const Buffer& send, const Buffer& recv) const {
  if (send.dtype == recv.dtype) return;
  fail("send is " + std::string(name_of(send.dtype)) + " but recv is " + std::string(name_of(recv.dtype)));
}

void Checks::same_count(const Buffer& send, const Buffer& recv) const {
  if (send.count == recv.count) return;
  fail("send has " + text(send.count) + " elements but recv has " + text(recv.count));
}

void Checks::writable(const Buffer& buffer, std::string_view name) const {
  if (buffer.readonly) fail(std::string(name) + " is read-only but would be written");
}

void Checks::supports(DType dtype, ReduceOp reduce) const {
  if (is_supported(dtype, reduce)) return;
  throw Unsupported(std::string(op) + ": " + std::string(name_of(reduce)) + " of " + std::string(name_of(dtype)) +
                    " is not defined; reduce with sum and divide as you see fit");
}

void Checks::peer(int peer, std::string_view name) const {
  if (peer < 0 || peer >= size) fail(std::string(name) + " " + text(peer) + " is not a rank of 0.." + text(size - 1));
}

void Checks::tag(int tag) const {
  if (tag < 0 || tag >= kUserTags) fail("tag " + text(tag) + " is not in 0.." + text(kUserTags - 1));
}

CountList Checks::chunks(const std::optional<CountList>& given, std::int64_t total, std::string_view name,
                         std::string_view whole) const {
  if (!given) return balanced_counts(total, size);
  if (given->size() != static_cast<std::size_t>(size)) {
    fail(std::string(name) + " has " + std::to_string(given->size()) + " entries but there are " + text(size) + " " +
         std::string(owner) + "s");
  }
  std::int64_t sum = 0;
  for (const auto count : *given) {
    if (count < 0) fail(std::string(name) + " has the negative entry " + text(count));
    if (count > total - sum) {
      fail(std::string(name) + " add up to more than the " + text(total) + " elements of " + std::string(whole));
    }
    sum += count;
  }
  if (sum != total) {
    fail(std::string(name) + " add up to " + text(sum) + " but " + std::string(whole) + " has " + text(total) +
         " elements");
  }
  return *given;
}

CountList Checks::parts(const std::optional<CountList>& given, std::int64_t total, std::string_view name,
                        std::string_view whole) const {
  if (!given && total % size != 0) {
    fail(std::string(whole) + " has " + text(total) + " elements, which do not divide into " + text(size) +
         " equal parts; pass " + std::string(name));
  }
  return chunks(given, total, name, whole);
}

void Checks::chunk_fits(const Buffer& buffer, const CountList& counts, std::string_view name) const {
  const auto expected = counts[static_cast<std::size_t>(rank)];
  if (buffer.count == expected) return;
  fail(std::string(name) + " has " + text(buffer.count) + " elements but " + std::string(owner) + " " + text(rank) +
       "'s chunk has " + text(expected));
}

void Checks::disjoint(const Buffer& send, const Buffer& recv) const {
  if (overlap(send, recv)) fail("send and recv share memory, but send must survive unchanged");
}

void Checks::same_or_disjoint(const Buffer& send, const Buffer& recv) const {
  if (overlap(send, recv) && send.data != recv.data)
    fail("send and recv overlap in part; they may be the same or apart");
}

void Checks::own_chunk_or_disjoint(const Buffer& send, const Buffer& recv, const CountList& counts) const {
  if (!overlap(send, recv)) return;
  const auto before = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  if (send.data == recv.data + before * static_cast<std::int64_t>(item_size(recv.dtype))) return;
  fail("send overlaps recv elsewhere than at rank " + text(rank) + "'s own chunk, element " + text(before));
}

void Checks::wide_beside(const Buffer& wide, std::string_view name, const Buffer& narrow, std::string_view what) const {
  if (device) throw Unsupported(std::string(op) + ": " + std::string(name) + " is for host memory");
  placed(wide, name);
  if (!is_half(narrow.dtype) || wide.dtype != DType::kFloat32) {
    fail(std::string(name) + " is " + std::string(name_of(wide.dtype)) + " and " + std::string(what) + " is " +
         std::string(name_of(narrow.dtype)) + "; float32 stands beside float16 or bfloat16");
  }
  if (wide.count != narrow.count) {
    fail(std::string(name) + " has " + text(wide.count) + " elements but " + std::string(what) + " has " +
         text(narrow.count));
  }
}

void Checks::apart(const Buffer& wide, std::string_view name, const Buffer& other, std::string_view what) const {
  if (overlap(wide, other)) fail(std::string(name) + " shares memory with " + std::string(what));
}

Wide Checks::wide(const WideBuffers& wide, const Buffer& send, const Buffer& recv) const {
  Wide found;
  if (wide.send) {
    wide_beside(*wide.send, "wide_send", send, "send");
    writable(send, "send");
    apart(*wide.send, "wide_send", send, "send");
    apart(*wide.send, "wide_send", recv, "recv");
    found.from = reinterpret_cast<const float*>(wide.send->data);
    found.send = send.data;
    found.num_sent = send.count;
  }
  if (wide.recv) {
    wide_beside(*wide.recv, "wide_recv", recv, "recv");
    writable(*wide.recv, "wide_recv");
    apart(*wide.recv, "wide_recv", send, "send");
    apart(*wide.recv, "wide_recv", recv, "recv");
    if (wide.send) apart(*wide.recv, "wide_recv", *wide.send, "wide_send");
    found.to = reinterpret_cast<float*>(wide.recv->data);
    found.num_received = recv.count;
  }
  return found;
}

}  // namespace comm_core
