"""One rank of a comparison: makes the calls of a group, in order, and writes down what each came to.

Ranks wait for one another between calls through a file, so that what is compared is not also what keeps them together.
A call without an answer is written down as such and ends this rank, and with it the job; who started it goes on behind it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import struct
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.compare_horovod.calls import GROUPS
from tests.compare_horovod.calls.call import Call
from tests.compare_horovod.outcome import Kind, Outcome

__all__ = ["HUNG", "STARTED", "main"]

STARTED = "started"  # exists once every rank can be asked
HUNG = 3  # exit status
_COUNT = struct.Struct("<q")
_POLL_SECONDS = 0.001
_START_PATIENCE = 10.0


class Guard:
    """Ends the process when what it watches takes longer than `seconds`; a thread, as C++ code does not hear signals."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = float("inf")
        self._at_end: Outcome | None = None
        self._log: Any = None
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, log: Any = None, at_end: Outcome | None = None, patience: float = 1.0) -> None:
        """Give what comes next `patience` times the limit; when it is over `at_end` is written to `log`."""
        self._log, self._at_end = log, at_end
        self._deadline = time.monotonic() + patience * self._seconds

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(0.05)
        if self._at_end is not None:
            _write(self._log, self._at_end)
        os._exit(HUNG)


def _write(log: Any, outcome: Outcome) -> None:
    log.write(json.dumps(outcome.to_json()) + "\n")
    log.flush()


def answer(call: Call, hvd: Any, rank: int, size: int) -> Outcome:
    """What `call` comes to on this rank."""
    try:
        return Outcome.of_value(call(hvd, rank, size))
    except Exception as error:
        return Outcome.of_exception(error)


def _wait_for_all(progress: int, rank: int, size: int, count: int) -> None:
    """Wait until every rank has made `count` calls."""
    os.pwrite(progress, _COUNT.pack(count), rank * _COUNT.size)
    while True:
        counts = os.pread(progress, size * _COUNT.size, 0)
        if len(counts) == size * _COUNT.size and all(made >= count for (made,) in _COUNT.iter_unpack(counts)):
            return
        time.sleep(_POLL_SECONDS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("group")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="calls that an earlier job has made")
    parser.add_argument("--seconds", type=float, default=10, help="time limit of a call")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    group = GROUPS[args.group]
    hvd = importlib.import_module(args.library)
    guard = Guard(args.seconds)
    guard.start(patience=_START_PATIENCE)
    # The first optimizer of a process imports for seconds; no call's time.
    torch.optim.SGD([torch.zeros(1)], lr=1.0).step()
    hvd.init(process_sets="dynamic")
    rank, size = hvd.rank(), hvd.size()
    progress = os.open(args.folder / "progress", os.O_RDWR | os.O_CREAT)
    _wait_for_all(progress, rank, size, 1)
    (args.folder / STARTED).touch()
    if group.after_shutdown:
        hvd.shutdown()
        _wait_for_all(progress, rank, size, 2)
    with (args.folder / f"{rank}.jsonl").open("a") as log:
        for count, call in enumerate([*group.calls.values()][args.skip :], 3):
            guard.start(log, Outcome(Kind.HUNG))
            outcome = answer(call, hvd, rank, size)
            guard.start(patience=1.5)
            _write(log, outcome)
            _wait_for_all(progress, rank, size, count)
        guard.start(patience=1.0)
    os._exit(0)  # what a call has left behind may keep an orderly end from coming


if __name__ == "__main__":
    main()
