"""What one rank alone knows decides nothing: the scripts of `tests.local_decisions`, over MPI and torchrun."""

from __future__ import annotations

import pytest

from tests.harness import ROOT, run_ranks
from tests.local_decisions import SCENARIOS

LAUNCHERS = ["mpi", "torchrun"]
ENV = {"PYTHONPATH": str(ROOT), "DEAR_STALL_WARN_SECONDS": "2", "DEAR_STALL_ABORT_SECONDS": "4"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(name: str, launcher: str) -> None:
    result = run_ranks(2, ["-m", "tests.local_decisions", name], launcher, timeout=60, env=ENV, cwd=ROOT)
    if name == "a_cause_behind_shutdown":
        assert result.returncode != 0
        assert "LookupError: the one cause" in result.output
    else:
        assert result.check().output.count("came to the end") == 2
