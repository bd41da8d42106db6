// The calls of NCCL that we make, with its return codes as exceptions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "../cuda/cuda_driver.hpp"
#include "../cuda/shared_library.hpp"

struct ncclComm;

namespace comm_core {

using NcclComm = ncclComm*;

/// ncclUniqueId
struct UniqueId {
  char bytes[128];
};

enum class NcclType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9
};
enum class NcclOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };

/// libnccl. The device of the communicator has to be current. What fails throws NcclError.
class NcclApi {
 public:
  explicit NcclApi(const std::string& path);

  const std::string& path() const noexcept { return library_.path(); }
  /// 22907 for 2.29.7.
  int version() const noexcept { return version_; }

  UniqueId unique_id() const;
  /// Blocks until all ranks called.
  NcclComm init_rank(int size, const UniqueId& id, int rank) const;
  /// Blocks until all ranks of `comm` called; null on those without a color.
  NcclComm split(NcclComm comm, std::optional<int> color, int key) const;
  int rank(NcclComm comm) const;
  int size(NcclComm comm) const;
  /// What went wrong since the last call, as code and text; nullopt while all is well.
  std::optional<std::pair<int, std::string>> async_error(NcclComm comm) const;
  void abort(NcclComm comm) const noexcept;
  void destroy(NcclComm comm) const;

  void all_reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, NcclComm comm,
                  CudaStream stream) const;
  void reduce_scatter(const void* send, void* recv, std::size_t recv_count, NcclType type, NcclOp op, NcclComm comm,
                      CudaStream stream) const;
  void reduce(const void* send, void* recv, std::size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
              CudaStream stream) const;
  void all_gather(const void* send, void* recv, std::size_t send_count, NcclType type, NcclComm comm,
                  CudaStream stream) const;
  void broadcast(const void* send, void* recv, std::size_t count, NcclType type, int root, NcclComm comm,
                 CudaStream stream) const;
  void send(const void* data, std::size_t count, NcclType type, int peer, NcclComm comm, CudaStream stream) const;
  void receive(void* data, std::size_t count, NcclType type, int peer, NcclComm comm, CudaStream stream) const;

  /// Calls between the two are carried out together, so that none waits for another.
  void group_start() const;
  void group_end() const;

 private:
  void check(int code, const char* call, NcclComm comm = nullptr) const;
  std::string text(int code, NcclComm comm) const;

  SharedLibrary library_;
  int version_ = 0;

  const char* (*get_error_string_)(int);
  const char* (*get_last_error_)(NcclComm);
  int (*get_unique_id_)(UniqueId*);
  int (*init_rank_)(NcclComm*, int, UniqueId, int);
  int (*split_)(NcclComm, int, int, NcclComm*, void*);
  int (*user_rank_)(NcclComm, int*);
  int (*count_)(NcclComm, int*);
  int (*get_async_error_)(NcclComm, int*);
  int (*abort_)(NcclComm);
  int (*destroy_)(NcclComm);
  int (*all_reduce_)(const void*, void*, std::size_t, int, int, NcclComm, CudaStream);
  int (*reduce_scatter_)(const void*, void*, std::size_t, int, int, NcclComm, CudaStream);
  int (*reduce_)(const void*, void*, std::size_t, int, int, int, NcclComm, CudaStream);
  int (*all_gather_)(const void*, void*, std::size_t, int, NcclComm, CudaStream);
  int (*broadcast_)(const void*, void*, std::size_t, int, int, NcclComm, CudaStream);
  int (*send_)(const void*, std::size_t, int, int, NcclComm, CudaStream);
  int (*receive_)(void*, std::size_t, int, int, NcclComm, CudaStream);
  int (*group_start_)();
  int (*group_end_)();
};

}  // namespace comm_core
