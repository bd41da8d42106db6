// Which algorithm carries out an operation. Pure: all ranks decide alike from what all of them know.
#pragma once

#include <memory>

#include "comm_core/operation.hpp"
#include "comm_core/settings.hpp"
#include "schedule.hpp"

namespace comm_core {

std::unique_ptr<Schedule> plan(const Operation& operation, int rank, int size, const Settings& settings);

}  // namespace comm_core
