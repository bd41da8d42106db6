// Waiting for a Work from Python.
#pragma once

#include <optional>

#include "comm_core/work.hpp"

namespace comm_core::bindings {

/// Releases the GIL; Ctrl-C works.
void wait_for(const Work& work, std::optional<double> timeout);

}  // namespace comm_core::bindings
