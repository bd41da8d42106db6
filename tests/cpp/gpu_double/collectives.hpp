// What NCCL does once it is its turn in the streams.
#pragma once

#include "world.hpp"

namespace {

template <class T>
void combine(char* out, const char* in, std::size_t count, int op) {
  for (std::size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, out + i * sizeof(T), sizeof(T));
    std::memcpy(&b, in + i * sizeof(T), sizeof(T));
    const T c = op == 0   ? static_cast<T>(a + b)
                : op == 1 ? static_cast<T>(a * b)
                : op == 2 ? (a > b ? a : b)
                          : (a < b ? a : b);
    std::memcpy(out + i * sizeof(T), &c, sizeof(T));
  }
}

std::size_t size_of(int type) { return type <= 1 ? 1 : type <= 3 || type == 7 ? 4 : type == 6 || type == 9 ? 2 : 8; }

void combine(int type, char* out, const char* in, std::size_t count, int op) {
  switch (type) {
    case 0:
      return combine<std::int8_t>(out, in, count, op);
    case 1:
      return combine<std::uint8_t>(out, in, count, op);
    case 2:
      return combine<std::int32_t>(out, in, count, op);
    case 4:
      return combine<std::int64_t>(out, in, count, op);
    case 7:
      return combine<float>(out, in, count, op);
    case 8:
      return combine<double>(out, in, count, op);
    default:
      world().log.push_back("unexpected type");
  }
}

void carry_out(const Meeting& meeting) {
  const Call& first = meeting.calls.front();
  for (const auto& call : meeting.calls) {
    if (call.name != first.name || call.count != first.count || call.type != first.type || call.op != first.op ||
        call.root != first.root)
      world().log.push_back("mismatch of " + call.name + " and " + first.name);
  }
  const std::size_t item = size_of(first.type), ranks = meeting.calls.size(), bytes = first.count * item;
  std::vector<const char*> sends(ranks);
  std::vector<char*> recvs(ranks);
  for (const auto& call : meeting.calls) {
    sends[static_cast<std::size_t>(call.rank)] = call.send;
    recvs[static_cast<std::size_t>(call.rank)] = call.recv;
  }
  const auto root = static_cast<std::size_t>(first.root);
  const auto reduced = [&](std::size_t offset, std::size_t count) {
    std::vector<char> sum(sends[0] + offset, sends[0] + offset + count * item);
    for (std::size_t r = 1; r < ranks; ++r) combine(first.type, sum.data(), sends[r] + offset, count, first.op);
    return sum;
  };
  if (first.name == "all_gather") {
    std::vector<char> all;
    for (const char* from : sends) all.insert(all.end(), from, from + bytes);
    for (char* to : recvs) std::memcpy(to, all.data(), all.size());
  } else if (first.name == "broadcast") {
    const std::vector<char> data(sends[root], sends[root] + bytes);
    for (char* to : recvs) std::memcpy(to, data.data(), bytes);
  } else if (first.name == "reduce") {
    std::memcpy(recvs[root], reduced(0, first.count).data(), bytes);
  } else if (first.name == "reduce_scatter") {
    std::vector<std::vector<char>> chunks;
    for (std::size_t r = 0; r < ranks; ++r) chunks.push_back(reduced(r * bytes, first.count));
    for (std::size_t r = 0; r < ranks; ++r) std::memcpy(recvs[r], chunks[r].data(), bytes);
  } else {
    const auto sum = reduced(0, first.count);
    for (char* to : recvs) std::memcpy(to, sum.data(), bytes);
  }
}

Step collective(Comm comm, Call call) {
  const int position = comm->num_issued++;
  call.rank = comm->rank;
  return [comm, call, position, clique = comm->clique, arrived = false]() mutable {
    if (comm->aborted) return true;
    auto& meeting = clique->meetings[position];
    if (!arrived) meeting.calls.push_back(call);
    arrived = true;
    if (static_cast<int>(meeting.calls.size()) == clique->size && !meeting.over) {
      carry_out(meeting);
      meeting.over = true;
    }
    return meeting.over;
  };
}

Step sending(Comm comm, const char* data, std::size_t bytes, int peer) {
  const auto taken = std::make_shared<bool>(false);
  return [comm, data, bytes, peer, taken, arrived = false]() mutable {
    if (comm->aborted) return true;
    if (!arrived) comm->clique->mail[{comm->rank, peer}].push_back({data, bytes, taken});
    arrived = true;
    return *taken;
  };
}

Step receiving(Comm comm, char* data, std::size_t bytes, int peer) {
  return [comm, data, bytes, peer] {
    if (comm->aborted) return true;
    auto& waiting = comm->clique->mail[{peer, comm->rank}];
    if (waiting.empty()) return false;
    if (waiting.front().bytes != bytes) world().log.push_back("mismatch of message sizes");
    std::memcpy(data, waiting.front().data, bytes);
    *waiting.front().taken = true;
    waiting.pop_front();
    return true;
  };
}

/// Steps of a group go on side by side; the next task of the stream begins when all are over.
Step together(std::vector<Step> steps) {
  std::vector<bool> over(steps.size(), false);
  return [steps = std::move(steps), over]() mutable {
    bool all = true;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (!over[i]) over[i] = steps[i]();
      all = all && over[i];
    }
    return all;
  };
}

void put(Stream stream, Step step) {
  if (depth > 0) {
    grouped.emplace_back(stream, std::move(step));
  } else {
    stream->tasks.push_back(std::move(step));
  }
}

int nccl_call(const char* function, Comm comm, Stream stream, Call call) {
  for (;;) {
    {
      const Lock lock(world().mutex);
      if (world().hanging.count(function) == 0) break;
      if (comm->aborted) return world().hanging.erase(function), 3;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Lock lock(world().mutex);
  const int status = called(function, text("%s c%d s%d count=%zu type=%d op=%d root=%d", call.name.c_str(),
                                           comm->number, stream->number, call.count, call.type, call.op, call.root));
  if (status != 0) return status;
  const std::size_t bytes = call.count * size_of(call.type);
  if (call.name == "send") {
    put(stream, sending(comm, call.send, bytes, call.root));
  } else if (call.name == "recv") {
    put(stream, receiving(comm, call.recv, bytes, call.root));
  } else {
    put(stream, collective(comm, std::move(call)));
  }
  return 0;
}

Comm new_comm(std::shared_ptr<Clique> clique, int rank) {
  const auto comm = new ncclComm;
  comm->number = world().num_comms++;
  comm->rank = rank;
  comm->clique = std::move(clique);
  world().comms.insert(comm);
  return comm;
}

const char* chars(const void* p) { return static_cast<const char*>(p); }
char* chars(void* p) { return static_cast<char*>(p); }

}  // namespace
