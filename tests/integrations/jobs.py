"""Jobs whose every rank runs pytest on a file of this folder, or a script in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness import ROOT, Result, run_ranks, run_suite

__all__ = ["compare", "in_ranks"]


def in_ranks(
    files: Sequence[str], launcher: str, size: int = 2, *, chosen: str = "", env: Mapping[str, str] | None = None
) -> None:
    """Run the tests in `files` that ``-k`` `chosen` takes, all of them on every rank. Raises where one fails."""
    plugins = ("tests.spmd_plugin", "no:cacheprovider", "no:logging")
    options = ["-q", *(word for name in plugins for word in ("-p", name)), "--color", "no"]
    options += ["--timeout", "300", "--timeout-method", "thread"]
    select = ["-k", chosen] if chosen else []
    argv = ["-m", "pytest", *options, *select, *(f"tests/integrations/{file}" for file in files)]
    environ = {"DEAR_SPMD_SUITE": "integrations", "DEAR_SPMD_PART": "all", **(env or {})}
    results: list[Result] = run_suite(size, argv, launcher, timeout=850, env=environ)
    failures = [result for result in results if result.returncode or result.timed_out]
    for result in failures:
        result.check()
    assert " passed" in results[-1].output, results[-1].output[-4000:]


def compare(module: str, launcher: str, folder: Path, *names: str) -> None:
    """Let `module` train what `names` say, on two ranks or in one process. Raises unless it says that each is the same."""
    ranks = 1 if launcher == "single" else 2
    argv = ["-m", f"tests.integrations.{module}", str(folder), *names]
    result = run_ranks(ranks, argv, launcher, timeout=600, cwd=ROOT).check()
    for name in names:
        assert name == "mistakes" or result.output.count(f"({name}) the same") == 1
