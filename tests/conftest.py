"""What all tests share: conditions for markers, poisoned parameters, and the table of multi-rank suites at the end."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# A missed wait then shows as NaN instead of as an old value.
os.environ.setdefault("DEAR_POISON", "1")

# These suites run inside every rank of a job that tests/test_spmd.py starts.
if "DEAR_SPMD_SUITE" not in os.environ:
    collect_ignore = ["comm_core", "spmd"]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


CONDITIONS = {
    "needs_root": (lambda: os.geteuid() == 0, "needs root"),
    "needs_gpu": (_has_gpu, "needs a CUDA device"),
    "needs_horovod": (lambda: importlib.util.find_spec("horovod") is not None, "needs Horovod"),
    "slow": (lambda: os.environ.get("DEAR_SLOW_TESTS") == "1", "slow; set DEAR_SLOW_TESTS=1"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (holds, reason) in CONDITIONS.items():
        if item.get_closest_marker(name) is not None and not holds():
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    """A test in this process that leaves a session open makes others fail that happen to run after it."""
    yield
    session = sys.modules.get("overlap.session")
    if session is not None and session.is_initialized() and "DEAR_SPMD_SUITE" not in os.environ:
        session.shutdown()
        pytest.fail("the test left its session open")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: several processes then end at about the same time."""
    items.sort(key=lambda item: item.path.name != "test_spmd.py")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [str(value) for report in terminalreporter.getreports("passed") for value in _suite_results(report)]
    if lines:
        terminalreporter.section("suites that ran inside every rank")
        for line in sorted(lines):
            terminalreporter.write_line(line)


def _suite_results(report: pytest.TestReport) -> list[object]:
    return [value for name, value in report.user_properties if name == "suite"]
