"""What computation costs on cores that also move bytes."""

from __future__ import annotations

import pytest

from overlap.plan.simulation.cores import Cores


def test_processor_seconds_are_taken_from_those_who_compute() -> None:
    assert Cores(2, 2).stretched(0.0) == 1.0
    assert Cores(2, 2).stretched(0.2) == pytest.approx(1 / 0.8)
    # Four ranks on two cores: each computes on half a core, and all four take from it.
    assert Cores(2, 4).stretched(0.1) == pytest.approx(2 / (2 - 0.4))
    assert Cores(8, 2, threads=4).stretched(0.4) == pytest.approx(8 / (8 - 0.8))


def test_idle_cores_move_bytes_first() -> None:
    assert Cores(4, 2).stretched(0.9) == 1.0
    assert Cores(3, 2).stretched(0.6) == pytest.approx(2 / (2 - 0.2))


def test_computation_keeps_half_of_its_cores() -> None:
    assert Cores(2, 2).stretched(1.0) == 2.0
    assert Cores(2, 2).stretched(3.0) == 2.0


def test_there_are_cores_and_ranks() -> None:
    with pytest.raises(ValueError, match="ranks of cores should be at least 1 and is 0"):
        Cores(2, 0)
