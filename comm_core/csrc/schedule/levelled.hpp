// reduce_scatter, all_gather and all_reduce of ranks in groups. Pure: all ranks decide alike from what all of them
// know.
#pragma once

#include <memory>

#include "comm_core/operation.hpp"
#include "comm_core/settings.hpp"
#include "schedule.hpp"

namespace comm_core {

/// [Note: two levels] What is reduced over all ranks is reduced within every group first, each member getting a part of
/// it, and then from group to group, by as many rings as a group has members; what is gathered takes the same way back.
/// So what leaves a group is what would leave it if it were one rank. All of it goes piece by piece, and while one
/// piece is on its way between groups the next one is within them.
///
/// Both steps are operations among fewer ranks, with their schedules. An average is the average of the groups' ones,
/// which have one size: nothing overflows that an average of all would not. 16-bit floats are rounded twice.
///
/// Null where the operation has no way of its own: it is carried out as if there were no groups.
std::unique_ptr<Schedule> levelled(const Operation& operation, int rank, const Settings& settings);

}  // namespace comm_core
