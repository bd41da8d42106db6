"""How long all ranks wait for rank 0's search."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from overlap.optimizer import decision


@pytest.mark.parametrize(("step", "limit"), [(0.1, 0.3), (2.0, 2.0)])
def test_a_search_may_take_as_long_as_a_step_and_a_third_of_a_second(
    step: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(decision, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    enough = decision._patience(step)
    clock.now += 0.99 * limit
    assert not enough()
    clock.now += 0.02 * limit
    assert enough()
