"""One rank of the collectives benchmark: times ours and gloo's in turn, in the same processes, on the same tensors."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.collectives.operations import OPERATIONS, Call
from bench.train.cores import busy_share, core_ticks
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
    """As many as asked for, fewer where they would take too long; at least 5."""
    once = sum(_time(comm, call)[0] for call in calls)
    return max(5, min(wanted, int(SECONDS_PER_CASE / max(once, 1e-6))))


def _supported(call: Call) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def measure(
    comm: Communicator, name: str, nbytes: int, iterations: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Interleaved samples of one operation at one size."""
    ours, theirs = OPERATIONS[name].make(comm, _gloo(comm), max(1, nbytes // 4))
    calls = {"ours": ours}
    ours()
    if _supported(theirs):
        calls["gloo"] = theirs
    count = _iterations(comm, list(calls.values()), iterations)
    samples: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    busy = {who: [0, 0] for who in calls}
    for number in range(count):
        for who in sorted(calls, reverse=bool(number % 2)):  # nobody always goes first
            before = core_ticks()
            samples[who].append(_time(comm, calls[who]))
            after = core_ticks()
            if before is not None and after is not None:
                busy[who] = [total + b - a for total, a, b in zip(busy[who], before, after, strict=True)]
    report(f"{name} {nbytes} bytes: {count} pairs")
    return {
        "operation": name,
        "bytes": nbytes,
        "ranks": comm.size,
        "wire_share": OPERATIONS[name].wire(comm.size),
        "seconds": {who: [wall for wall, _ in values] for who, values in samples.items()},
        "cores_busy": busy_share((0, 0), (busy["ours"][0], busy["ours"][1])),
        "cpu_seconds": {who: [cpu for _, cpu in values] for who, values in samples.items()},
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    comm = session.init().comm

    def report(text: str) -> None:
        if comm.rank == 0:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    results = [
        measure(comm, name, nbytes, settings["iterations"], report)
        for name in settings["operations"]
        for nbytes in (settings["sizes"] if name != "barrier" else [0])
    ]
    if comm.rank == 0:
        sys.stderr.write("\r\033[K")
        Path(settings["output"]).write_text(json.dumps({"backend": comm.backend, "results": results}))
    session.shutdown()


if __name__ == "__main__":
    main()
