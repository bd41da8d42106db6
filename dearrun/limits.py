"""How many processes this machine can start, by each limit that can be read."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["of_processes"]

_WORKER = 10 * 2**20  # bytes; a Python that has imported nothing takes so many
_FILES = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max")


def of_processes() -> dict[str, int]:
    """The limits on the number of processes, by name. mpirun holds two pipes at least for each worker."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {f"{memory / 2**30:.0f} GB of memory, of which a worker takes 10 MB at least": memory // _WORKER}
    for path in _FILES:
        try:
            found[path] = int(Path(path).read_text())
        except (OSError, ValueError):  # it is not there, or says "max"
            continue
    own = {"ulimit -n, of which a worker takes two": (resource.RLIMIT_NOFILE, 2)}
    if os.geteuid() != 0:  # whom the number of processes does not bind
        own["ulimit -u"] = (resource.RLIMIT_NPROC, 1)
    for name, (limit, each) in own.items():
        most = resource.getrlimit(limit)[1]
        if most != resource.RLIM_INFINITY:
            found[name] = most // each
    return found
