// What we take NCCL's functions and numbers for, against its header. Compiled, never run.
#include <nccl.h>

#include "../../../comm_core/csrc/nccl/nccl_api.cpp"
#include "matches.hpp"

using Ours = comm_core::NcclApi;
#define CHECK(member, function) static_assert(matches<decltype(Ours::member), decltype(&function)>, #function)

CHECK(get_error_string_, ncclGetErrorString);
CHECK(get_last_error_, ncclGetLastError);
CHECK(get_unique_id_, ncclGetUniqueId);
CHECK(init_rank_, ncclCommInitRank);
CHECK(split_, ncclCommSplit);
CHECK(user_rank_, ncclCommUserRank);
CHECK(count_, ncclCommCount);
CHECK(get_async_error_, ncclCommGetAsyncError);
CHECK(abort_, ncclCommAbort);
CHECK(destroy_, ncclCommDestroy);
CHECK(all_reduce_, ncclAllReduce);
CHECK(reduce_scatter_, ncclReduceScatter);
CHECK(reduce_, ncclReduce);
CHECK(all_gather_, ncclAllGather);
CHECK(broadcast_, ncclBroadcast);
CHECK(send_, ncclSend);
CHECK(receive_, ncclRecv);
CHECK(group_start_, ncclGroupStart);
CHECK(group_end_, ncclGroupEnd);
static_assert(matches<int (*)(int*), decltype(&ncclGetVersion)>);

namespace comm_core {
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(kSuccess == ncclSuccess && kInProgress == ncclInProgress && kNoColor == NCCL_SPLIT_NOCOLOR);
static_assert(int(NcclType::kInt8) == ncclInt8 && int(NcclType::kUInt8) == ncclUint8 &&
              int(NcclType::kInt32) == ncclInt32 && int(NcclType::kInt64) == ncclInt64 &&
              int(NcclType::kFloat16) == ncclFloat16 && int(NcclType::kFloat32) == ncclFloat32 &&
              int(NcclType::kFloat64) == ncclFloat64 && int(NcclType::kBFloat16) == ncclBfloat16);
static_assert(int(NcclOp::kSum) == ncclSum && int(NcclOp::kProd) == ncclProd && int(NcclOp::kMax) == ncclMax &&
              int(NcclOp::kMin) == ncclMin);
}  // namespace comm_core
