"""How much memory this host, or the container that this process is in, has to spare."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

_GROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = _GROUP) -> int:
    """Bytes that may be taken without swapping: the host's, or what is left of the control group's limit."""
    found = [0]
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # another version of control groups, or none
        pass
    return min(found)
