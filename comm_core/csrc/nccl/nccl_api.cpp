#include "nccl_api.hpp"

#include <utility>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

constexpr int kSuccess = 0, kInProgress = 7, kNoColor = -1;

int code_of(NcclType type) { return static_cast<int>(type); }
int code_of(NcclOp op) { return static_cast<int>(op); }

}  // namespace

NcclApi::NcclApi(const std::string& path) : library_(path) {
  int (*get_version)(int*) = nullptr;
  library_.bind(get_version, "ncclGetVersion");
  library_.bind(get_error_string_, "ncclGetErrorString");
  library_.bind(get_last_error_, "ncclGetLastError");
  library_.bind(get_unique_id_, "ncclGetUniqueId");
  library_.bind(init_rank_, "ncclCommInitRank");
  library_.bind(split_, "ncclCommSplit");
  library_.bind(user_rank_, "ncclCommUserRank");
  library_.bind(count_, "ncclCommCount");
  library_.bind(get_async_error_, "ncclCommGetAsyncError");
  library_.bind(abort_, "ncclCommAbort");
  library_.bind(destroy_, "ncclCommDestroy");
  library_.bind(all_reduce_, "ncclAllReduce");
  library_.bind(reduce_scatter_, "ncclReduceScatter");
  library_.bind(reduce_, "ncclReduce");
  library_.bind(all_gather_, "ncclAllGather");
  library_.bind(broadcast_, "ncclBroadcast");
  library_.bind(send_, "ncclSend");
  library_.bind(receive_, "ncclRecv");
  library_.bind(group_start_, "ncclGroupStart");
  library_.bind(group_end_, "ncclGroupEnd");
  check(get_version(&version_), "ncclGetVersion");
}

UniqueId NcclApi::unique_id() const {
  UniqueId id{};
  check(get_unique_id_(&id), "ncclGetUniqueId");
  return id;
}

NcclComm NcclApi::init_rank(int size, const UniqueId& id, int rank) const {
  NcclComm comm = nullptr;
  check(init_rank_(&comm, size, id, rank), "ncclCommInitRank");
  return comm;
}

NcclComm NcclApi::split(NcclComm comm, std::optional<int> color, int key) const {
  NcclComm part = nullptr;
  check(split_(comm, color.value_or(kNoColor), key, &part, nullptr), "ncclCommSplit", comm);
  return part;
}

int NcclApi::rank(NcclComm comm) const {
  int rank = 0;
  check(user_rank_(comm, &rank), "ncclCommUserRank", comm);
  return rank;
}

int NcclApi::size(NcclComm comm) const {
  int size = 0;
  check(count_(comm, &size), "ncclCommCount", comm);
  return size;
}

std::optional<std::pair<int, std::string>> NcclApi::async_error(NcclComm comm) const {
  int state = kSuccess;
  const int status = get_async_error_(comm, &state);
  const int code = status == kSuccess ? state : status;
  if (code == kSuccess || code == kInProgress) return std::nullopt;
  return std::pair{code, text(code, comm)};
}

void NcclApi::abort(NcclComm comm) const noexcept { static_cast<void>(abort_(comm)); }

void NcclApi::destroy(NcclComm comm) const { check(destroy_(comm), "ncclCommDestroy"); }

void NcclApi::all_reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, NcclComm comm,
                         CudaStream stream) const {
  check(all_reduce_(send, recv, count, code_of(type), code_of(op), comm, stream), "ncclAllReduce", comm);
}

void NcclApi::reduce_scatter(const void* send, void* recv, std::size_t recv_count, NcclType type, NcclOp op,
                             NcclComm comm, CudaStream stream) const {
  check(reduce_scatter_(send, recv, recv_count, code_of(type), code_of(op), comm, stream), "ncclReduceScatter", comm);
}

void NcclApi::reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
                     CudaStream stream) const {
  check(reduce_(send, recv, count, code_of(type), code_of(op), root, comm, stream), "ncclReduce", comm);
}

void NcclApi::all_gather(const void* send, void* recv, std::size_t send_count, NcclType type, NcclComm comm,
                         CudaStream stream) const {
  check(all_gather_(send, recv, send_count, code_of(type), comm, stream), "ncclAllGather", comm);
}

void NcclApi::broadcast(const void* send, void* recv, std::size_t count, NcclType type, int root, NcclComm comm,
                        CudaStream stream) const {
  check(broadcast_(send, recv, count, code_of(type), root, comm, stream), "ncclBroadcast", comm);
}

void NcclApi::send(const void* data, std::size_t count, NcclType type, int peer, NcclComm comm,
                   CudaStream stream) const {
  check(send_(data, count, code_of(type), peer, comm, stream), "ncclSend", comm);
}

void NcclApi::receive(void* data, std::size_t count, NcclType type, int peer, NcclComm comm, CudaStream stream) const {
  check(receive_(data, count, code_of(type), peer, comm, stream), "ncclRecv", comm);
}

void NcclApi::group_start() const { check(group_start_(), "ncclGroupStart"); }

void NcclApi::group_end() const { check(group_end_(), "ncclGroupEnd"); }

void NcclApi::check(int code, const char* call, NcclComm comm) const {
  if (code != kSuccess) throw NcclError(std::string(call) + ": " + text(code, comm), code);
}

std::string NcclApi::text(int code, NcclComm comm) const {
  const char* const what = get_error_string_(code);
  const char* const details = get_last_error_(comm);
  std::string said = (what != nullptr ? what : "unknown error") + (" (NCCL code " + std::to_string(code)) + ")";
  if (details != nullptr && *details != '\0') said += std::string(", ") + details;
  return said;
}

}  // namespace comm_core
