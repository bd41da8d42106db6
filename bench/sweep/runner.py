"""Runs what is left of a sweep, one run after the other, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.cluster import ROOT
from bench.settings import Settings, to_argv
from bench.sweep.journal import Journal
from bench.sweep.origin import today
from bench.train import UNAVAILABLE, main

__all__ = ["Failure", "attempt", "run_all"]


@dataclass(frozen=True)
class Failure:
    """A run without a result: what it said last, and how often it was tried."""

    settings: Settings
    reason: str
    tries: int


def name_of(settings: Settings) -> str:
    """Short, and good as a file name."""
    parts = [settings.method, settings.emulate_compute or settings.model, f"bs{settings.batch_size}"]
    parts += [f"{settings.workers}x", settings.network]
    return re.sub(r"[^A-Za-z0-9.=@,+-]+", "-", "_".join(parts))


def _last_words(log: Path) -> str:
    """The last line that explains something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|bench\.train:|failed", line, re.IGNORECASE)]
    return (telling or lines or ["it said nothing"])[-1][:300]


def attempt(settings: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
    """One run: its result with its origin or None, why there is none, and whether trying again makes sense."""
    origin = today()  # of each run anew: code may change while a sweep runs
    with tempfile.TemporaryDirectory() as folder, log.open("w") as sink:
        output = Path(folder) / "result.json"
        argv = [*to_argv(settings), "--json", str(output)]
        sink.write(" ".join(["-m", "bench.train", *argv]) + "\n")
        sink.flush()
        # Forked: this process has imported torch already, which takes seconds each time.
        job = get_context("fork").Process(target=_train, args=(argv, sink.fileno()))
        job.start()
        try:
            job.join(settings.timeout + 60)  # it ends by itself before that
        finally:
            if job.is_alive():
                job.terminate()  # it removes its emulated hosts
                job.join()
        if job.exitcode == 0 and output.exists():
            return {**json.loads(output.read_text()), "origin": origin.to_dict()}, "", False
    return None, _last_words(log), job.exitcode != UNAVAILABLE


def _train(argv: Sequence[str], sink: int) -> None:
    """``python -m bench.train`` with these arguments and what it says in `sink`, in a process of its own."""
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.chdir(ROOT)
    sys.argv = ["bench.train", *argv]
    sys.exit(main())


def run_all(
    runs: Sequence[Settings],
    journal: Journal,
    logs: Path,
    tries: int,
    attempt: Callable[[Settings, Path], tuple[dict[str, Any] | None, str, bool]] = attempt,
) -> list[Failure]:
    """Run what the journal does not have; a failed run is tried `tries` times and left out. Shows its progress."""
    failures = []
    left = [run for run in runs if journal.get(run) is None]
    with tqdm(total=len(runs), initial=len(runs) - len(left), unit="run", dynamic_ncols=True) as bar:
        for run in left:
            name = name_of(run)
            bar.set_description(name)
            reason, again, count = "", True, 0
            while again and count < tries:
                count += 1
                begun = time.perf_counter()
                result, reason, again = attempt(run, logs / f"{name}.log")
                if result is not None:
                    journal.add(result)
                    rate = f"{result['total']:.1f} +-{result['plus_minus']:.1f} {result['unit']}/sec"
                    bar.write(f"{name}: {rate} ({time.perf_counter() - begun:.0f} s)")
                    break
                bar.write(f"{name}: failed ({reason})")
            else:
                failures.append(Failure(run, reason, count))
            bar.update()
    return failures
