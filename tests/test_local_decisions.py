"""What one rank alone knows decides nothing. The scripts of `tests.local_decisions`, on two ranks, over MPI and torchrun.

KNOWN are defects: those scripts are expected to fail, and a row goes when its defect is mended.
"""

from __future__ import annotations

import pytest

from tests.harness import ROOT, run_ranks
from tests.local_decisions import SCENARIOS

LAUNCHERS = ["mpi", "torchrun"]
ENV = {"PYTHONPATH": str(ROOT), "DEAR_STALL_WARN_SECONDS": "2", "DEAR_STALL_ABORT_SECONDS": "4"}
KNOWN = {
    "parameters_that_change_places": "a bucket writes to whatever its memory has become",
    "unused_gradients_that_are_never_zeroed": ".grad is left None where this rank did not use a parameter",
    "clipped_gradients_that_are_never_zeroed": ".grad is left as it was before clipping",
    "a_skip_that_sets_to_zero": "only None counts as dropped",
}


def test_what_is_known_is_a_script() -> None:
    assert KNOWN.keys() <= SCENARIOS.keys()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(reason=KNOWN[name], strict=True)] if name in KNOWN else [])
        for name in SCENARIOS
    ],
)
def test_two_ranks(name: str, launcher: str) -> None:
    result = run_ranks(2, ["-m", "tests.local_decisions", name], launcher, timeout=60, env=ENV, cwd=ROOT)
    if name == "a_cause_behind_shutdown":
        assert result.returncode != 0
        assert "LookupError: the one cause" in result.output
    else:
        assert result.check().output.count("came to the end") == 2
