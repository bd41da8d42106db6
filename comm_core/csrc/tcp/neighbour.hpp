// Memory of another process of this machine, which the kernel copies from where it lies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace comm_core {

/// Where a process is, for others of its machine.
struct Residence {
  std::array<char, 80> machine{};  ///< the same for processes that share their numbers and their network
  std::int64_t pid = 0;
  std::uint64_t sample = 0;  ///< the address of bytes by which it is known
};

/// Of this process.
Residence residence(const void* sample);

bool same_machine(const Residence& a, const Residence& b) noexcept;
/// Copies `bytes` from `address` there. False where the kernel does not allow it, or the process is gone.
bool read_memory(std::int64_t pid, std::uint64_t address, std::byte* into, std::size_t bytes) noexcept;

}  // namespace comm_core
