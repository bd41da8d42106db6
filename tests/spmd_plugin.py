"""Runs inside every rank: only rank 0 talks, and the first failing test ends the whole job with its traceback."""

from __future__ import annotations

import gc
import importlib
import os
import sys

import pytest

from overlap import owners

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", os.environ.get("RANK", "0"))))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", "1"))))
OVER_MPI = "TORCHELASTIC_RUN_ID" not in os.environ  # a process without a launcher counts as such

# At import, which `-p` does before pytest keeps a copy of stdout for itself.
_stderr = os.fdopen(os.dup(2), "w")
if RANK > 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Torch and pytest are a million objects that stay: nobody has to look through them again, neither the garbage
    collector nor who looks for the modules of a parameter, which tests make later. A third of a suite's time.
    """
    if os.environ.get("DEAR_SPMD_SUITE") == "spmd":
        importlib.import_module("torch._dynamo")  # as torch does with the first optimizer

        owners._tracked = gc.get_objects
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


def _die(what: str) -> None:
    _stderr.write(f"rank {RANK} of {SIZE} failed: {what}\n")
    _stderr.flush()
    sys.stdout.flush()
    os._exit(1)  # the launcher ends the other ranks, which may wait for this one
