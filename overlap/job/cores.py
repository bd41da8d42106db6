"""The number of cores for each rank of a host: those it may run on, without hyperthreads, within its quota.

As a program, with no packages around it, it says how many threads one of several workers takes; dearrun starts it beside
each: ``python cores.py WORKERS SHELL``. It says nothing where the launcher has given workers cores of their own: where the
process SHELL may run elsewhere than the one that started it. :func:`overlap.job.session.init` then looks at all of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["among", "cores", "limit", "limit_in", "quota"]

_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")


def among(mine: Collection[int], everyones: Sequence[Collection[int]], limit: float) -> int:
    """A rank's share of the cores `mine`, at least 1 (pure).

    Args:
        mine: the cores it may run on.
        everyones: those of each rank of the host, this one included.
        limit: of all of them together, in cores.
    """
    portions = sum(1 / sum(core in others for others in everyones) for core in mine)
    return max(1, int(min(portions, limit / len(everyones)) + 1e-9))


def cores(process: int = 0) -> tuple[int, ...]:
    """The cores that a process may run on (0: this one), each as the lowest number of its hyperthreads."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted({_lowest_sibling(cpu) for cpu in os.sched_getaffinity(process)}))


def _lowest_sibling(cpu: int) -> int:
    try:
        siblings = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return cpu
    return int(re.split("[-,]", siblings.strip())[0] or cpu)


def limit() -> float:
    """How much processor time per time the container gives this process, in cores; infinite where it sets no limit."""
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return math.inf
    return limit_in(groups, _GROUPS)


def limit_in(groups: str, mounted: Path) -> float:
    """The cores that a process in these control `groups` (of /proc/self/cgroup) may use; infinite without a limit."""
    found = math.inf
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        second = not controllers  # version 2, in which one group has every controller
        if not second and "cpu" not in controllers.split(","):
            continue
        root = mounted if second else mounted / "cpu"
        names = ["cpu.max"] if second else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        group = root / path.lstrip("/")
        while group.is_relative_to(root):  # a group is bounded by those above it
            with contextlib.suppress(OSError):
                found = min(found, quota(" ".join((group / name).read_text().strip() for name in names)))
            group = group.parent
    return found


def quota(text: str) -> float:
    """The cores that a quota grants: "150000 100000", microseconds of each period, is 1.5; infinite if none (pure)."""
    allowed, period = text.split()
    return math.inf if allowed in ("max", "-1") else int(allowed) / int(period)


def _main(workers: int, shell: int) -> None:
    mine = cores()
    launcher = int(Path(f"/proc/{shell}/stat").read_text().rpartition(")")[2].split()[1])
    if mine == cores(launcher):
        sys.stdout.write(f"{among(mine, [mine] * workers, limit())}\n")


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
