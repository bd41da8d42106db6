"""The memory that this host, this process's container, or a GPU has to spare."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["available_bytes"]

_GROUP = Path("/sys/fs/cgroup")


def available_bytes(
    place: torch.device | None = None, meminfo: Path = Path("/proc/meminfo"), group: Path = _GROUP
) -> int:
    """Bytes that may be taken without swapping: the host's, or what is left of the control group's limit; or of a GPU."""
    if place is not None and place.type == "cuda":
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return int(torch.cuda.mem_get_info(place)[0]) + unused
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
