"""One rank of the collectives benchmark: times ours, gloo's and plain TCP in turn, in the same processes."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.collectives.operations import OPERATIONS, Call
from bench.collectives.plain import ROUNDS, PlainRing
from bench.program import sent_bytes
from bench.train.cores import Ticks, busy_share, core_ticks
from overlap.job import session
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.operation import all_reduce, barrier

SECONDS_PER_CASE = 3.0


def _gloo(comm: Communicator) -> dist.ProcessGroup:
    """torch.distributed over gloo between the same ranks; under torchrun it is there already."""
    if not dist.is_initialized():
        path = os.environ["DEAR_BENCH_STORE"]
        store = dist.FileStore(path, comm.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=timedelta(seconds=300)
        )
    group = dist.group.WORLD
    assert group is not None
    return group


@functools.cache
def _backend(comm: Communicator) -> dist.ProcessGroup:
    """torch.distributed over our backend between the same ranks."""
    importlib.import_module("dear.backend")
    _gloo(comm)
    return dist.new_group(backend="dear")


def _time(comm: Communicator, call: Call) -> tuple[float, float]:
    """Seconds until the slowest rank was done, and CPU seconds of all ranks."""
    comm.run(barrier())
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - wall], dtype=torch.float64)
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    comm.run(all_reduce(taken, taken, ReduceOp.MAX))
    comm.run(all_reduce(used, used, ReduceOp.SUM))
    return float(taken), float(used)


def _iterations(comm: Communicator, calls: list[Call], wanted: int) -> int:
    """As many as asked for, fewer where they would take too long; at least six, so that ratios have an interval."""
    once = sum(_time(comm, call)[0] for call in calls)
    return max(6, min(wanted, int(SECONDS_PER_CASE / max(once, 1e-6))))


def _supported(call: Call) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def measure(
    comm: Communicator,
    name: str,
    nbytes: int,
    iterations: int,
    report: Callable[[str], None],
    ring: PlainRing | None = None,
    through_torch: bool = False,
) -> dict[str, Any]:
    """Interleaved samples of one operation at one size; where it is a ring, also of plain TCP in the same pattern.

    Ours are `through_torch` where its backend dear is measured.
    """
    ours, theirs = OPERATIONS[name].make(comm, _gloo(comm), max(1, nbytes // 4))
    if through_torch:
        ours = OPERATIONS[name].make(comm, _backend(comm), max(1, nbytes // 4))[1]
    calls = {"ours": ours}
    ours()
    if ring is not None and name in ROUNDS:
        calls["plain"] = functools.partial(ring.pass_on, nbytes, ROUNDS[name])
        calls["plain"]()
    if _supported(theirs):
        calls["gloo"] = theirs
    count = _iterations(comm, list(calls.values()), iterations)
    samples: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    busy = {who: Ticks(0, 0, 0) for who in calls}
    for number in range(count):
        for who in sorted(calls, reverse=bool(number % 2)):  # nobody always goes first
            before = core_ticks()
            samples[who].append(_time(comm, calls[who]))
            after = core_ticks()
            if before is not None and after is not None:
                busy[who] = Ticks(*(total + b - a for total, a, b in zip(busy[who], before, after, strict=True)))
    report(f"{name} {nbytes} bytes: {count} pairs")
    return {
        "operation": name,
        "bytes": nbytes,
        "ranks": comm.size,
        "wire_share": OPERATIONS[name].wire(comm.size),
        "seconds": {who: [wall for wall, _ in values] for who, values in samples.items()},
        "cores_busy": busy_share(Ticks(0, 0, 0), busy["ours"]),
        "cpu_seconds": {who: [cpu for _, cpu in values] for who, values in samples.items()},
    }


def _sending(comm: Communicator, call: Call) -> tuple[float, float]:
    """Seconds until the slowest rank was done, and the bytes that the busiest host has sent meanwhile."""
    comm.run(barrier())
    sent, wall = sent_bytes(), time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - wall], dtype=torch.float64)
    comm.run(all_reduce(taken, taken, ReduceOp.MAX))
    crossed = torch.tensor([sent_bytes() - sent], dtype=torch.float64)
    comm.run(all_reduce(crossed, crossed, ReduceOp.MAX))
    return float(taken), float(crossed)


def measure_levels(
    comm: Communicator, name: str, nbytes: int, iterations: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Interleaved samples of one operation at one size: in two levels, in one ring, and among one rank of each host."""
    hosts = session.current().hosts
    leads = comm.rank in [ranks[0] for ranks in hosts]
    among = {"levels": comm.two_level(hosts), "flat": comm.split(0), "hosts": comm.split(0 if leads else None)}
    calls: dict[str, Call] = {}
    for who, one in among.items():
        # Gloo's call is made, too, and not called.
        ours = (
            None if one is None else OPERATIONS[name].make(one, cast(dist.ProcessGroup, None), max(1, nbytes // 4))[0]
        )
        calls[who] = (lambda: None) if ours is None else ours
    for call in calls.values():
        _sending(comm, call)  # connects
    count = _iterations(comm, list(calls.values()), iterations)
    samples: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    for number in range(count):
        for who in sorted(calls, reverse=bool(number % 2)):  # nobody always goes first
            samples[who].append(_sending(comm, calls[who]))
    for one in among.values():
        if one is not None:
            one.close()
    report(f"{name} {nbytes} bytes: {count} times")
    return {
        "operation": name,
        "bytes": nbytes,
        "seconds": {who: [wall for wall, _ in values] for who, values in samples.items()},
        "sent": {who: [sent for _, sent in values] for who, values in samples.items()},
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    comm = session.init().comm

    def report(text: str) -> None:
        if comm.rank == 0:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    one_case: Callable[..., dict[str, Any]] = measure_levels
    ring = None
    if settings["ranks_per_host"] == 1:
        ring = PlainRing(comm, settings["meet"], settings["connections"]) if comm.size > 1 else None
        one_case = functools.partial(measure, ring=ring, through_torch=settings["backend"])
    results = [
        one_case(comm, name, nbytes, settings["iterations"], report)
        for name in settings["operations"]
        for nbytes in (settings["sizes"] if name != "barrier" else [0])
    ]
    if ring is not None:
        ring.close()
    if settings["backend"]:
        dist.destroy_process_group(_backend(comm))
    if comm.rank == 0:
        sys.stderr.write("\r\033[K")
        name = "dear" if settings["backend"] else comm.backend
        Path(settings["output"]).write_text(json.dumps({"backend": name, "results": results}))
    session.shutdown()


if __name__ == "__main__":
    main()
