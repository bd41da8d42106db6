"""Jobs whose every rank runs pytest on a file of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.harness import Result, run_suite

__all__ = ["in_ranks"]


def in_ranks(
    files: Sequence[str], launcher: str, size: int = 2, *, chosen: str = "", env: Mapping[str, str] | None = None
) -> None:
    """Run the tests in `files` that ``-k`` `chosen` takes, all of them on every rank. Raises where one fails."""
    plugins = ("tests.spmd_plugin", "no:cacheprovider", "no:logging")
    options = ["-q", *(word for name in plugins for word in ("-p", name)), "--timeout", "150", "--color", "no"]
    select = ["-k", chosen] if chosen else []
    argv = [
        "-m",
        "pytest",
        *options,
        "--timeout-method",
        "thread",
        *select,
        *(f"tests/integrations/{f}" for f in files),
    ]
    environ = {"DEAR_SPMD_SUITE": "integrations", "DEAR_SPMD_PART": "all", **(env or {})}
    results: list[Result] = run_suite(size, argv, launcher, timeout=420, env=environ)
    failures = [result for result in results if result.returncode or result.timed_out]
    for result in failures:
        result.check()
    assert " passed" in results[-1].output, results[-1].output[-4000:]
