"""Runs the calls of a group under one library; a call that kills the job, or never ends, costs a new start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.compare_horovod.calls.call import Group
from tests.compare_horovod.outcome import Kind, Outcome
from tests.compare_horovod.worker import STARTED
from tests.harness import ROOT

__all__ = ["JobFailed", "accounted", "answers", "command", "outcomes", "run"]

_START_SECONDS = 150.0
Tell = Callable[[str], None]
_STARTS = 2  # a job may fail to start on a busy machine, once
_END_SECONDS = 15.0


class JobFailed(RuntimeError):
    """The workers did not come as far as the first call."""


def command(ranks: int, argv: list[str]) -> list[str]:
    return [str(ROOT / "scripts" / "mpirun"), "-np", str(ranks), sys.executable, *argv]


def run(argv: list[str], seconds: float, output: Path, cwd: Path = ROOT) -> int | None:
    """The exit status of `argv`, whose output goes to the file `output`; None where it had to be ended."""
    # Both sides get the same: no thread beside the one that computes, and nothing of a launcher around this process.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1"}
    with output.open("ab") as sink:
        job = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment, cwd=cwd)
        try:
            return job.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:
                job.terminate()  # mpirun then ends its workers
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_END_SECONDS)
                job.kill()
                job.wait()


def outcomes(folder: Path, ranks: int) -> list[list[Outcome]]:
    """What every rank has written so far, rank by rank."""
    read = []
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        read.append([Outcome.from_json(json.loads(line)) for line in lines])
    return read


def answers(library: str, group: Group, ranks: int, seconds: float, tell: Tell) -> dict[str, list[Outcome]]:
    """The outcome of each call on each rank; a call that takes longer than `seconds` has hung.

    `tell` hears of each call that stopped a job.

    Raises :class:`JobFailed` where the workers do not start.
    """
    with tempfile.TemporaryDirectory(prefix="dear-compare-") as name:
        folder = Path(name)
        calls = len(group.calls)
        done = failures = 0
        while done < calls:
            for leftover in (STARTED, "progress"):
                (folder / leftover).unlink(missing_ok=True)
            options = ["--skip", str(done), "--seconds", str(seconds)]
            argv = ["-m", "tests.compare_horovod.worker", library, group.name, str(folder), *options]
            limit = _START_SECONDS + seconds * (calls - done)
            ended = run(command(ranks, argv), limit, folder / "output")
            if not (folder / STARTED).exists():
                failures += 1
                if failures < _STARTS:
                    continue
                text = (folder / "output").read_text(errors="replace")
                raise JobFailed(f"{library}, {group.name}, {ranks} rank(s) did not start:\n{text[-3000:]}")
            begun = done
            done, missing = accounted(outcomes(folder, ranks), begun, calls, ended is not None)
            for rank, kind in missing.items():
                with (folder / f"{rank}.jsonl").open("a") as log:
                    log.write(json.dumps(Outcome(kind).to_json()) + "\n")
            if begun < done < calls:
                tell(f"{library} stopped at {[*group.calls][done - 1]!r}")
        by_rank = outcomes(folder, ranks)
        return {call: [rank[index] for rank in by_rank] for index, call in enumerate(group.calls)}


def accounted(
    written: Sequence[Sequence[Outcome]], before: int, calls: int, ended: bool
) -> tuple[int, dict[int, Kind]]:
    """How many calls are done when a job is over, and what to write for ranks that have not said what the last came to.

    `written`: the outcomes of each rank; `before`: how many each had when the job began; `ended`: it ended by itself.
    """
    least = min(map(len, written))
    if least > before and any(rank[least - 1].kind is Kind.HUNG for rank in written):
        return least, {}  # every rank has noticed
    if least == calls:
        return calls, {}
    hung = not ended or any(len(rank) > least and rank[least].kind is Kind.HUNG for rank in written)
    kind = Kind.HUNG if hung else Kind.CRASHED
    return least + 1, {rank: kind for rank, made in enumerate(written) if len(made) == least}
