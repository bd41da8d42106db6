// What a fork leaves behind: memory, but no engine.
#pragma once

namespace [[gnu::visibility("default")]] comm_core {

/// Installs the fork handler; called once by whoever starts using the library.
void watch_forks() noexcept;
/// True in the child of a fork: the engine's thread does not exist here and its locks may be held for ever.
bool in_forked_child() noexcept;
/// Closes `fd` in the children that are forked from here on, until keep_in_children() is told of it.
void close_in_children(int fd);
void keep_in_children(int fd) noexcept;
/// Throws Error in the child of a fork.
void require_parent_process();

}  // namespace comm_core
