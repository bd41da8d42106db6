"""Runs inside every rank: only rank 0 talks, and the first failing test ends the whole job with its traceback.

A test that takes too long ends it with the stacks of this rank's threads; those that the launcher ends then show theirs.
Ranks would not be at the same place after a failed test; so another job goes on behind it (`tests.harness.run_suite`).
A rank that ends without a word has noted in which test it was.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.notes import erase, write

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", os.environ.get("RANK", "0"))))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", "1"))))
_OTHERS_SECONDS = 2.0
_AFTER = os.environ.get("DEAR_SPMD_AFTER", "")
_NOTES = os.environ.get("DEAR_SPMD_NOTES", "")  # the folder of `tests.notes`
_order: dict[str, int] = {}  # tests, also those that come not behind the one in which the last job failed
_tests = 0  # that have run: objects are frozen again after so many
_MANY = 4
_limit = 0.0  # of the test that runs, in seconds; 0: none
OVER_MPI = "TORCHELASTIC_RUN_ID" not in os.environ  # a process without a launcher counts as such

# At import, which `-p` does before pytest keeps a copy of stdout for itself.
_stderr = os.fdopen(os.dup(2), "w")
if RANK > 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
faulthandler.register(signal.SIGTERM, _stderr, chain=True)


def _tell(record: logging.LogRecord) -> bool:
    """Say why a job is aborted: what pytest has captured ends with the process."""
    if record.levelno >= logging.ERROR:
        print(record.getMessage(), file=_stderr, flush=True)
    return True


logging.getLogger("dear").addFilter(_tell)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same on all ranks."""
    import dear  # comm_core's suite does without torch

    return Path(dear.broadcast_object(str(tmp_path)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only what comes behind the test named in ``DEAR_SPMD_AFTER``."""
    names = [item.nodeid for item in items]
    _order.update((name, number) for number, name in enumerate(names))
    if _AFTER:
        behind = names.index(_AFTER) + 1
        config.hook.pytest_deselected(items=items[:behind])
        del items[:behind]


def pytest_runtest_logstart(nodeid: str) -> None:
    if _NOTES:
        write(_NOTES, RANK, _order[nodeid], _limit, nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing is left behind the last test: that is no failure."""
    if _NOTES:
        erase(_NOTES, RANK)
    if _AFTER and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Torch and pytest are a million objects that stay: nobody has to look through them again, neither the garbage
    collector nor who looks for the modules of a parameter, which tests make later. A third of a suite's time.
    """
    if os.environ.get("DEAR_SPMD_SUITE") == "spmd":  # comm_core's does without torch
        importlib.import_module("torch._dynamo")  # as torch does with the first optimizer

        holders: Any = importlib.import_module("overlap.core.gates.holders")
        holders._tracked = gc.get_objects
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """The same of what tests import, and of what pytest keeps of them."""
    global _tests
    _tests += 1
    if _tests % _MANY == 0:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _die(f"{report.nodeid} ({report.when})\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _die(f"collection of {report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """In place of pytest-timeout's own, which shows one rank, and of it mostly pytest."""
    global _limit
    _limit = settings.timeout
    timer = item.dear_timer = threading.Timer(settings.timeout, _out_of_time, [item.nodeid, settings.timeout])
    timer.daemon = True
    timer.start()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: Any) -> bool:
    global _limit
    _limit = 0.0
    if hasattr(item, "dear_timer"):  # not a module that could not be imported
        item.dear_timer.cancel()
    return True


def _out_of_time(test: str, seconds: float) -> None:
    stacks: dict[str, list[str]] = {}  # by names of the threads that are there: dozens may wait at one place
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0)
        if thread is not threading.current_thread():
            frames = traceback.extract_stack(frame)
            ours = [f for f in frames if not any(f"/{name}/" in f.filename for name in ("_pytest", "pluggy", "pytest"))]
            stacks.setdefault("".join(traceback.format_list(ours)), []).append(thread.name)
    told = (f"{names[0]}{f' ({len(names)} threads)' if names[1:] else ''}:\n{stack}" for stack, names in stacks.items())
    _say(f"{test} is not over after {seconds:g} s\n{''.join(told)}")
    time.sleep(
        _OTHERS_SECONDS
    )  # who began it with this rank shows its own: what it writes when it is ended may be lost
    os._exit(1)


def _say(what: str) -> None:
    _stderr.write(f"rank {RANK} of {SIZE} failed: {what}\n")
    _stderr.flush()
    sys.stdout.flush()


def _die(what: str) -> None:
    _say(what)
    os._exit(1)  # the launcher ends the other ranks, which may wait for this one
