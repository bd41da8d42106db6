"""The memory that this host, this process's container, or a GPU has to spare, and the most that this process has taken
there."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["Peak", "available_bytes", "resident_bytes"]

_GROUP = Path("/sys/fs/cgroup")
# Of both versions of control groups: the controller's folder, the limit, and what is used of it.
_VERSIONS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_bytes(
    place: torch.device | None = None,
    meminfo: Path = Path("/proc/meminfo"),
    group: Path = _GROUP,
    own: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes that may be taken without swapping: the host's, or what limits leave (control groups, ``ulimit -v``); or of a
    GPU.
    """
    if place is not None and place.type == "cuda":
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return int(torch.cuda.mem_get_info(place)[0]) + unused
    found = [0]
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]
    for limit, used in _limits(group, own):
        found.append(max(0, limit - used))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        found.append(max(0, most - pages * resource.getpagesize()))
    return min(found)


def _limits(group: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Of this process's control group, and of those around it: the limit in bytes, and what is used of it."""
    paths = {}
    try:
        for line in own.read_text().splitlines():  # a number, controllers, and the path
            _, controllers, path = line.split(":", 2)
            paths.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    except (OSError, ValueError):
        pass
    for controller, limit, used in _VERSIONS:
        inner = Path(paths.get(controller, ""))
        for folder in (inner, *inner.parents):
            place = group / controller / folder
            try:
                yield int((place / limit).read_text()), int((place / used).read_text())
            except (OSError, ValueError):  # the other version, another host's path, or "max"
                continue


_PROCESS = Path("/proc/self")


def resident_bytes(process: Path = _PROCESS, place: torch.device | None = None) -> int:
    """Bytes of this process that are in memory now; those of its tensors, in a GPU's."""
    if place is not None and place.type == "cuda":
        return int(torch.cuda.memory_allocated(place))
    return _status("VmRSS", process)


def _status(name: str, process: Path) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{process}/status has no {name}")
    return int(found[1]) * 1024


class Peak:
    """The most bytes of this process that were in memory at a time, since :meth:`reset`.

    Linux counts them; in a GPU's memory, torch those of tensors. Raises ``OSError`` where Linux does not let a process
    begin anew, as in some containers.
    """

    def __init__(self, process: Path = _PROCESS, place: torch.device | None = None) -> None:
        self._process, self._place = process, place if place is not None and place.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        if self._place is not None:
            torch.cuda.reset_peak_memory_stats(self._place)
            return
        (self._process / "clear_refs").write_text("5")

    def read(self) -> int:
        if self._place is not None:
            return int(torch.cuda.max_memory_allocated(self._place))
        return _status("VmHWM", self._process)
