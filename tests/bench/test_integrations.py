"""Pairs of runs inside other libraries: times are medians of steps, losses are laid side by side."""

from __future__ import annotations

import importlib.util

import pytest

from bench.integrations.__main__ import WORKERS
from bench.integrations.report import of_pair, report, step_seconds

# Two steps of warm-up, then 2, 2 and 5 s.
DDP = {"loss": [3.0, 2.0, 1.5, 1.0, 0.5], "seconds": [9.0, 18.0, 20.0, 22.0, 27.0]}
DEAR = {"loss": [3.0, 2.0, 1.5, 1.0, 0.25], "seconds": [9.0, 18.0, 19.0, 20.0, 21.0]}


def test_the_first_steps_are_not_counted() -> None:
    assert step_seconds(DDP) == 2
    assert of_pair({"ddp": DDP, "dear": DEAR}) == "a step: ddp 2.000 s, dear 1.000 s; dear / ddp 0.50"


@pytest.mark.parametrize("alone", [None, DDP])
def test_losses_lie_side_by_side(alone: dict[str, list[float]] | None) -> None:
    lines = report([{"ddp": DDP, "dear": DEAR}, {"ddp": DDP, "dear": DDP}], alone).splitlines()
    assert lines[0] == "dear / ddp: median 0.75 of 2 pair(s)"
    assert lines[2].split() == ["step", "ddp", "dear", *([] if alone is None else ["one", "process"])]
    assert lines[7].split() == ["5", "0.500000", "0.250000", *([] if alone is None else ["0.500000"])]
    assert lines[-1] == "losses at the same step are at most 0.25 apart, over 5 steps"


@pytest.mark.parametrize("library", WORKERS)
def test_every_worker_is_there(library: str) -> None:
    assert importlib.util.find_spec(WORKERS[library]) is not None
