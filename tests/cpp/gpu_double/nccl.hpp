// NCCL: its functions that comm_core calls.
#pragma once

#include "collectives.hpp"

extern "C" {

struct UniqueId {
  char bytes[128];
};

int ncclGetVersion(int* version) { return *version = 22907, 0; }
const char* ncclGetErrorString(int code) { return code == 2 ? "system error" : "error"; }
const char* ncclGetLastError(Comm comm) { return comm != nullptr && comm->trouble == 2 ? "the cable is out" : ""; }
int ncclGetUniqueId(UniqueId* id) {
  const Lock lock(world().mutex);
  *id = {};
  std::snprintf(id->bytes, sizeof id->bytes, "id %d", ++world().num_ids);
  return called("ncclGetUniqueId", "unique id");
}
int ncclCommInitRank(Comm* comm, int size, UniqueId id, int rank) {
  const Lock lock(world().mutex);
  const int status = called("ncclCommInitRank", text("init rank %d of %d", rank, size));
  if (status != 0) return status;
  auto& clique = world().cliques[id.bytes];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = size;
  return *comm = new_comm(clique, rank), 0;
}
/// double_colors() said before what all ranks pass.
int ncclCommSplit(Comm comm, int color, int, Comm* part, void*) {
  const Lock lock(world().mutex);
  const int status = called("ncclCommSplit", text("split c%d color=%d", comm->number, color));
  if (status != 0) return status;
  const int number = comm->num_splits++;
  const auto& colors = world().colors;
  if (color < 0) return *part = nullptr, 0;
  auto& clique = comm->clique->parts[{number, color}];
  if (!clique) clique = std::make_shared<Clique>();
  int rank = 0;
  clique->size = 0;
  for (int r = 0; r < static_cast<int>(colors.size()); ++r) {
    if (colors[static_cast<std::size_t>(r)] != color) continue;
    if (r < comm->rank) ++rank;
    ++clique->size;
  }
  return *part = new_comm(clique, rank), 0;
}
int ncclCommUserRank(Comm comm, int* rank) { return *rank = comm->rank, 0; }
int ncclCommCount(Comm comm, int* size) { return *size = comm->clique->size, 0; }
int ncclCommGetAsyncError(Comm comm, int* state) {
  if (comm->held) {
    ++world().num_held;
    while (comm->held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --world().num_held;
  }
  const Lock lock(world().mutex);
  return *state = comm->trouble, 0;
}
int ncclCommAbort(Comm comm) {
  const Lock lock(world().mutex);
  comm->aborted = true;
  world().comms.erase(comm);
  return called("ncclCommAbort", text("abort c%d", comm->number));
}
int ncclCommDestroy(Comm comm) {
  const Lock lock(world().mutex);
  world().comms.erase(comm);
  return called("ncclCommDestroy", text("destroy c%d", comm->number));
}
int ncclAllReduce(const void* send, void* recv, std::size_t count, int type, int op, Comm comm, Stream stream) {
  return nccl_call("ncclAllReduce", comm, stream, {"all_reduce", chars(send), chars(recv), count, type, op});
}
int ncclReduceScatter(const void* send, void* recv, std::size_t count, int type, int op, Comm comm, Stream stream) {
  return nccl_call("ncclReduceScatter", comm, stream, {"reduce_scatter", chars(send), chars(recv), count, type, op});
}
int ncclReduce(const void* send, void* recv, std::size_t count, int type, int op, int root, Comm comm, Stream stream) {
  return nccl_call("ncclReduce", comm, stream, {"reduce", chars(send), chars(recv), count, type, op, root});
}
int ncclAllGather(const void* send, void* recv, std::size_t count, int type, Comm comm, Stream stream) {
  return nccl_call("ncclAllGather", comm, stream, {"all_gather", chars(send), chars(recv), count, type});
}
int ncclBroadcast(const void* send, void* recv, std::size_t count, int type, int root, Comm comm, Stream stream) {
  return nccl_call("ncclBroadcast", comm, stream, {"broadcast", chars(send), chars(recv), count, type, 0, root});
}
int ncclSend(const void* data, std::size_t count, int type, int peer, Comm comm, Stream stream) {
  return nccl_call("ncclSend", comm, stream, {"send", chars(data), nullptr, count, type, 0, peer});
}
int ncclRecv(void* data, std::size_t count, int type, int peer, Comm comm, Stream stream) {
  return nccl_call("ncclRecv", comm, stream, {"recv", nullptr, chars(data), count, type, 0, peer});
}
int ncclGroupStart() { return ++depth, 0; }
int ncclGroupEnd() {
  const Lock lock(world().mutex);
  if (--depth > 0) return 0;
  std::map<Stream, std::vector<Step>> by_stream;
  for (auto& [stream, step] : grouped) by_stream[stream].push_back(std::move(step));
  grouped.clear();
  for (auto& [stream, steps] : by_stream) stream->tasks.push_back(together(std::move(steps)));
  return called("ncclGroupEnd", "end of group");
}

}  // extern "C"
