"""What one rank alone knows decides nothing. The scripts of `tests.local_decisions`, on two ranks, over MPI and torchrun.

Each row is a defect that is known: it is expected to fail, and the row goes when it is mended.
"""

from __future__ import annotations

import pytest

from tests.harness import ROOT, run_ranks
from tests.local_decisions import SCENARIOS

LAUNCHERS = ["mpi", "torchrun"]
ENV = {"PYTHONPATH": str(ROOT), "DEAR_STALL_WARN_SECONDS": "2", "DEAR_STALL_ABORT_SECONDS": "4"}
KNOWN = {
    "synchronize_without_a_batch": "whether a rank takes part hangs on whether it happened to see a forward",
    "frozen_differently_at_wrapping": "requires_grad is in no signature",
    "frozen_differently_later": "each rank makes buckets for what it has thawed itself",
    "writing_through_state_dict": "entries are clones",
    "tied_weights_are_saved_once": "entries are clones",
    "gradients_that_no_hook_saw": "synchronize() looks at who fired, not at .grad",
    "a_question_before_its_reader_is_there": "letters without a reader are dropped",
    "a_group_added_before_accumulation": "a gradient without a bucket is noted once and then forgotten",
    "strides_that_differ": "strides are in no signature",
    "thawed_and_frozen_again": "strategies differ in who takes part in a step",
    "a_cause_behind_shutdown": "shutdown() waits before the exception is shown",
    "parameters_that_change_places": "a bucket writes to whatever its memory has become",
    "unused_gradients_that_are_never_zeroed": ".grad is left None where this rank did not use a parameter",
    "clipped_gradients_that_are_never_zeroed": ".grad is left as it was before clipping",
    "a_skip_that_sets_to_zero": "only None counts as dropped",
    "a_closure_with_earlier_gradients_on_one_rank": "each rank decides by its own gradients what it reduces",
}


def test_every_script_is_a_row() -> None:
    assert KNOWN.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xfail(reason=why, strict=True)) for name, why in KNOWN.items()]
)
def test_two_ranks(name: str, launcher: str) -> None:
    result = run_ranks(2, ["-m", "tests.local_decisions", name], launcher, timeout=60, env=ENV, cwd=ROOT)
    if name == "a_cause_behind_shutdown":
        assert result.returncode != 0
        assert "LookupError: the one cause" in result.output
    else:
        assert result.check().output.count("came to the end") == 2
