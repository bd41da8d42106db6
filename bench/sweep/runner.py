"""Runs what is left of a sweep, one run after the other, each in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.program import ROOT
from bench.sweep.failures import Failure, Failures, reason_in
from bench.sweep.journal import Journal
from bench.train.__main__ import UNAVAILABLE, main
from bench.train.cores import STOLEN, told
from bench.train.origin import today
from bench.train.settings import Settings, to_argv

__all__ = ["attempt", "run_all"]

_PR_SET_PDEATHSIG = 1


def name_of(settings: Settings) -> str:
    """A short name for a run, which can be a file name."""
    parts = [settings.method, settings.emulate_compute or settings.model, f"bs{settings.batch_size}"]
    parts += [f"{settings.workers}x", settings.network, *([settings.launcher] if settings.launcher else [])]
    parts += [f"repeat{settings.repeat}"] if settings.repeat else []
    return re.sub(r"[^A-Za-z0-9.=@,+-]+", "-", "_".join(parts))


def attempt(settings: Settings, log: Path, outputs: Sequence[str] = ()) -> tuple[dict[str, Any] | None, str, bool]:
    """Try one run: its result with its origin or None, why there is none, and whether trying again makes sense.

    `outputs`: arguments that say what it leaves besides.
    """
    origin = today()  # of each run anew: code may change while a sweep runs
    with tempfile.TemporaryDirectory() as folder, log.open("w") as sink:
        output = Path(folder) / "result.json"
        argv = [*to_argv(settings), *outputs, "--json", str(output)]
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
    return None, reason_in(log.read_text(errors="replace")), job.exitcode != UNAVAILABLE


def _train(argv: Sequence[str], sink: int) -> None:
    """``python -m bench.train`` with these arguments and what it says in `sink`, in a process of its own."""
    # A sweep that is killed takes its run along, which removes its emulated hosts and lets go of the folder's lock.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.chdir(ROOT)
    sys.argv = ["bench.train", *argv]
    sys.exit(main())


def run_all(
    runs: Sequence[Settings],
    journal: Journal,
    failures: Failures,
    logs: Path,
    tries: int,
    attempt: Callable[[Settings, Path], tuple[dict[str, Any] | None, str, bool]] = attempt,
    look: Callable[[], float | None] = lambda: None,
) -> None:
    """Run what the journal does not have. Shows its progress.

    A run that fails is tried `tries` times, and then left out. One from which a virtual machine's host took the cores, for
    its other guests, is made as often, and the one counts from which it took least.

    Journal and failures are told of every run at once, as the sweep may be stopped before it ends. Before each run, `look`
    tells the share of cores that others keep busy; what it raises ends the sweep.
    """
    left = [run for run in runs if journal.get(run) is None]
    with tqdm(total=len(runs), initial=len(runs) - len(left), unit="run", dynamic_ncols=True) as bar:
        for run in left:
            name = name_of(run)
            bar.set_description(name)
            reason, again, count = "", True, 0
            kept: dict[str, Any] | None = None
            while again and count < tries:
                count += 1
                busy, begun = look(), time.perf_counter()
                at = datetime.now(timezone.utc).isoformat(timespec="seconds")
                result, reason, again = attempt(run, logs / f"{name}.log")
                if result is None:
                    bar.write(f"{name}: failed ({reason})")
                    continue
                stolen = result.get("cores_stolen")
                rate = f"{result['total']:.1f} +-{result['plus_minus']:.1f} {result['unit']}/sec"
                took = f"{time.perf_counter() - begun:.0f} s"
                again = (stolen or 0.0) >= STOLEN
                once_more = "; once more" * (again and count < tries)
                bar.write(f"{name}: {rate} ({took}; {told(result.get('cores_busy'), busy, stolen)}{once_more})")
                if kept is None or (stolen or 0.0) < kept["cores_stolen"]:
                    kept = {**result, "busy_before": busy, "begun": at}
            if kept is None:
                failures.add(Failure(run, reason, count))
            else:
                journal.add(kept)
                failures.succeeded(run)
            bar.update()
