"""A script of `tests.local_decisions` that ends its job; tests/spmd has the others."""

from __future__ import annotations

import pytest

from tests.harness import ROOT, run_ranks

ENV = {"DEAR_STALL_WARN_SECONDS": "2", "DEAR_STALL_ABORT_SECONDS": "4"}


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_the_cause_is_shown_behind_a_shutdown(launcher: str) -> None:
    argv = ["-m", "tests.local_decisions", "a_cause_behind_shutdown"]
    result = run_ranks(2, argv, launcher, timeout=400, env=ENV, cwd=ROOT)
    assert result.returncode != 0
    assert "LookupError: the one cause" in result.output
