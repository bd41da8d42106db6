"""Measures what collectives take between hosts that only communicate, once for each number of hosts and rate.

Each rank of ``python -m bench.validation.probe FILE KIND`` sends operations of several sizes in a row, as buckets follow
one another; rank 0 writes FILE. They are our communicator's, gloo's as DDP and FSDP2 use it, or Horovod's. Of each
operation it tells the seconds, and the processor seconds of a rank's process, by the kernel's account of all its threads.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.emulation.cluster import ClusterError
from bench.methods.registry import method
from bench.train import launcher
from bench.train.cores import busy_share, core_ticks
from bench.train.settings import Settings
from overlap.job import session
from overlap.transport.communicator import Communicator
from overlap.transport.operation import all_reduce, barrier, broadcast, reduce_scatter

__all__ = ["FAILS", "METHODS", "measure"]

#: Whose launcher and environment a probe has, by its kind. Without fusion, Horovod sends each operation by itself.
METHODS = {"ours": "dear:threshold_mb=1", "gloo": "ddp", "horovod": "horovod:fusion_mb=0"}
FAILS = (launcher.LauncherError, ClusterError)  # what a probe raises
_SIZES = [2**power for power in (12, 15, 18, 20, 22, 24, 26, 28)]
_STREAM = 0.3  # seconds that operations are sent without a pause: what links let through at once is little then
_FEWEST, _MOST, _REPEATS = 2, 64, 3
_BUDGET = 8.0  # seconds that a size may take; larger ones are left out, as links are slow

Wait = Callable[[], object]
Issue = Callable[[int], Callable[[], Wait]]  # of a buffer of so many elements


def measure(kind: str, hosts: int, rate: str, timeout: float = 300) -> dict[str, Any]:
    """Start the ranks, and return what rank 0 found: by operation, pairs of bytes and seconds, and of bytes and processor
    seconds; and the shares of the machine's cores that were busy, and busy with the ranks' processes.

    Raises :data:`FAILS`, and ``MethodUnavailable`` where the machine has no such collectives.
    """
    spec = METHODS[kind]
    settings = Settings(method=spec, model="narrow_mlp", workers=hosts, network=rate, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "probe.json"
        chosen = method(spec)
        chosen.look()
        launcher.launch(settings, chosen, ["-m", "bench.validation.probe", str(output), kind])
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


def _gloo(comm: Communicator) -> dict[str, Issue]:
    import torch.distributed as dist

    def whole(numel: int) -> Callable[[], Wait]:
        tensor = torch.zeros(numel)

        def issue() -> Wait:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            return work.wait

        return issue

    def blocking(collective: Callable[[torch.Tensor, torch.Tensor], object]) -> Issue:
        """As FSDP2 issues it, which waits for each."""

        def made(numel: int) -> Callable[[], Wait]:
            part = torch.zeros(-(-numel // comm.size))
            whole = torch.zeros(part.numel() * comm.size)

            def issue() -> Wait:
                collective(whole, part)
                return _nothing

            return issue

        return made

    return {
        "whole": whole,
        "gather": blocking(dist.all_gather_into_tensor),
        "scatter": blocking(lambda whole, part: dist.reduce_scatter_tensor(part, whole)),
    }


def _horovod(comm: Communicator) -> dict[str, Issue]:
    hvd = importlib.import_module("horovod.torch")
    names = itertools.count()

    def whole(numel: int) -> Callable[[], Wait]:
        tensor, name = torch.zeros(numel), f"probe {next(names)}"

        def issue() -> Wait:
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            return lambda: hvd.synchronize(handle)

        return issue

    return {"whole": whole}


def _nothing() -> None:
    """The wait for what is over."""


_MADE: dict[str, Callable[[Communicator], dict[str, Issue]]] = {"ours": _ours, "gloo": _gloo, "horovod": _horovod}


def _samples(comm: Communicator, make: Issue) -> list[tuple[int, float, float]]:
    """Seconds that one operation takes among others, and processor seconds, by its bytes; medians. On every rank."""
    samples: list[tuple[int, float, float]] = []
    for nbytes in _SIZES:
        once, _ = _row(comm, [make(nbytes // 4) for _ in range(_FEWEST)])
        if samples and (1 + _REPEATS) * _FEWEST * once > _BUDGET:
            break
        issues = [make(nbytes // 4) for _ in range(min(max(int(_STREAM / once), _FEWEST), _MOST))]
        rows = [_row(comm, issues) for _ in range(_REPEATS)]
        seconds, processor = (statistics.median(each) for each in zip(*rows, strict=True))
        samples.append((nbytes, seconds, processor))
    return samples


def _row(comm: Communicator, issues: Sequence[Callable[[], Wait]]) -> tuple[float, float]:
    """Seconds, and processor seconds, of each of some operations in a row, of rank 0. On every rank."""
    comm.run(barrier())
    since, busy = time.perf_counter(), _processor_seconds()
    for wait in [issue() for issue in issues]:
        wait()
    passed = [time.perf_counter() - since, _processor_seconds() - busy]
    taken = torch.tensor(passed, dtype=torch.float64) / len(issues)
    comm.run(broadcast(taken))
    return float(taken[0]), float(taken[1])


def _processor_seconds() -> float:
    """Of all threads of this process, in its code and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    torch.set_num_threads(1)
    output, kind = Path(sys.argv[1]), sys.argv[2]
    comm = session.init().comm
    horovod = method(METHODS[kind]) if kind == "horovod" else None
    if horovod is not None:
        horovod.join(torch.device("cpu"))
    found: dict[str, Any] = {name: {} for name in ("samples", "processor", "cores_busy", "processes_busy")}
    found["workers"] = comm.size
    for name, make in _MADE[kind](comm).items():
        before, since, used = core_ticks(), time.perf_counter(), _processor_seconds()
        samples = _samples(comm, make)
        found["samples"][name] = [(nbytes, seconds) for nbytes, seconds, _ in samples]
        found["processor"][name] = [(nbytes, processor) for nbytes, _, processor in samples]
        found["cores_busy"][name] = busy_share(before, core_ticks())
        busy = comm.size * (_processor_seconds() - used) / (time.perf_counter() - since)
        found["processes_busy"][name] = busy / (os.cpu_count() or 1)
    found["goodput"] = float(os.environ[launcher.GOODPUT])
    if comm.rank == 0:
        output.write_text(json.dumps(found))
    if horovod is not None:
        horovod.leave()
    session.shutdown()


if __name__ == "__main__":
    main()
