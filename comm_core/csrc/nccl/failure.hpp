// How errors of NCCL and of the device are told to those who wait.
#pragma once

#include <exception>
#include <string>

namespace comm_core {

/// The same error with `who` in front of its text, its type and code kept.
std::exception_ptr attributed(const std::exception_ptr& cause, const std::string& who);
std::string text_of(const std::exception_ptr& error);

}  // namespace comm_core
