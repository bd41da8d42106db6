"""Measures what collectives take between hosts that only communicate, once for each number of hosts and rate.

Each rank of ``python -m bench.validation.probe FILE`` sends operations of several sizes in a row, as buckets follow one
another; rank 0 writes FILE. Under mpirun it is our communicator's, under torchrun gloo's, as DDP uses it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.methods.registry import method
from bench.train import launcher
from bench.train.cores import busy_share, core_ticks
from bench.train.settings import Settings
from overlap.job import session
from overlap.job.launch import Launcher, detect
from overlap.transport.communicator import Communicator
from overlap.transport.operation import all_reduce, barrier, broadcast, reduce_scatter

__all__ = ["METHODS", "measure"]

METHODS = {"ours": "dear:threshold_mb=1", "gloo": "ddp"}  # whose launcher and environment a probe has, by its kind
_SIZES = [2**power for power in (12, 15, 18, 20, 22, 24, 26, 28)]
_STREAM = 0.3  # seconds that operations are sent without a pause: what links let through at once is little then
_FEWEST, _MOST, _REPEATS = 2, 64, 3
_BUDGET = 8.0  # seconds that a size may take; larger ones are left out, as links are slow

Wait = Callable[[], object]
Issue = Callable[[int], Callable[[], Wait]]  # of a buffer of so many elements


def measure(kind: str, hosts: int, rate: str, timeout: float = 300) -> dict[str, Any]:
    """Start the ranks, and return what rank 0 found: by operation, pairs of bytes and seconds; and how busy cores were.

    Raises what :func:`bench.train.launcher.launch` raises.
    """
    spec = METHODS[kind]
    settings = Settings(method=spec, model="narrow_mlp", workers=hosts, network=rate, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "probe.json"
        launcher.launch(settings, method(spec), ["-m", "bench.validation.probe", str(output)])
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def _ours(comm: Communicator) -> dict[str, Issue]:
    def half(numel: int) -> Callable[[], Wait]:
        whole = torch.zeros(-(-numel // comm.size) * comm.size)
        part = torch.zeros(whole.numel() // comm.size)
        return lambda: comm.start(reduce_scatter(whole, part)).wait

    def whole(numel: int) -> Callable[[], Wait]:
        tensor = torch.zeros(numel)
        return lambda: comm.start(all_reduce(tensor, tensor)).wait

    return {"half": half, "whole": whole}


def _gloo() -> dict[str, Issue]:
    import torch.distributed as dist

    def whole(numel: int) -> Callable[[], Wait]:
        tensor = torch.zeros(numel)

        def issue() -> Wait:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            return work.wait

        return issue

    return {"whole": whole}


def _samples(comm: Communicator, make: Issue) -> list[tuple[int, float]]:
    """Seconds that one operation takes among others, by its bytes; medians. On every rank."""
    samples: list[tuple[int, float]] = []
    for nbytes in _SIZES:
        once = _row(comm, [make(nbytes // 4)] * _FEWEST)
        if samples and (1 + _REPEATS) * _FEWEST * once > _BUDGET:
            break
        issues = [make(nbytes // 4) for _ in range(min(max(int(_STREAM / once), _FEWEST), _MOST))]
        samples.append((nbytes, statistics.median(_row(comm, issues) for _ in range(_REPEATS))))
    return samples


def _row(comm: Communicator, issues: Sequence[Callable[[], Wait]]) -> float:
    """Seconds of each of some operations in a row, by rank 0's clock. On every rank."""
    comm.run(barrier())
    since = time.perf_counter()
    for wait in [issue() for issue in issues]:
        wait()
    taken = torch.tensor([(time.perf_counter() - since) / len(issues)], dtype=torch.float64)
    comm.run(broadcast(taken))
    return float(taken)


def main() -> None:
    torch.set_num_threads(1)
    comm = session.init().comm
    gloo = detect(os.environ).launcher is Launcher.TORCHRUN
    found: dict[str, Any] = {"workers": comm.size, "samples": {}, "cores_busy": {}}
    for name, make in (_gloo() if gloo else _ours(comm)).items():
        before = core_ticks()
        found["samples"][name] = _samples(comm, make)
        found["cores_busy"][name] = busy_share(before, core_ticks())
    found["goodput"] = float(os.environ[launcher.GOODPUT])
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    session.shutdown()


if __name__ == "__main__":
    main()
