// What all ranks of an operation have to mean alike beside its sizes, in a number that is small enough for a tag of
// MPI.
#pragma once

#include <cstdint>
#include <string>

#include "comm_core/operation.hpp"

namespace comm_core {

/// Kind, dtype, reduction and root. `largest` is the largest number allowed, at least 32767; roots are told apart as
/// far as it leaves room for them, which is 16 ranks at least.
int signature_of(const Operation& operation, int largest);
/// That of a split, which is no Operation.
int split_signature() noexcept;
/// That of a message by which a rank says that the group has failed on it.
int failure_signature() noexcept;
/// What a peer meant: "all_reduce of float32, op sum"; "something else" where no operation has that number.
std::string describe_signature(std::int64_t signature);

}  // namespace comm_core
