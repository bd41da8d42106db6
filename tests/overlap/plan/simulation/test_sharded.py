"""The simulated schedule of sharded models against what can be said about it with a pencil."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.sharded import awaited, sharded
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload

COUNT, SIZE = 10, 1000
BUCKETS = [Bucket(number, number, SIZE, 1) for number in range(COUNT)]


def _step(forward: float, backward: float, network: Fitted, **options: Any) -> float:
    work = Workload(
        tuple(Layer(str(n), forward, backward, (SIZE,)) for n in range(COUNT)), options.pop("costs", Costs())
    )
    return sharded(work, network, BUCKETS, **{"room": SIZE, **options}).step


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kept", [0, 4, COUNT])
@pytest.mark.parametrize("how", ["stay", "keep"])
def test_where_only_the_wire_takes_time_its_bytes_do(how: str, kept: int, passes: int) -> None:
    """Nothing stays by itself: half of the room holds no bucket. Reductions have a lane of their own, and one wire."""
    gathers = (COUNT - kept) * 2 * passes + kept * (passes if how == "stay" else 1)
    network = Fitted(2, 0.0, 1 / SIZE, 1 / SIZE)
    assert _step(0.0, 0.0, network, passes=passes, **{how: range(kept)}) == pytest.approx(gathers + COUNT)


def test_where_only_the_model_takes_time_that_counts() -> None:
    costs = Costs(per_tensor=0.01, per_bucket=0.02, update=1 / SIZE)
    free = Fitted(2, 0.0, 0.0, 0.0)
    assert _step(1.0, 2.0, free) == pytest.approx(3 * COUNT)
    assert _step(1.0, 2.0, free, passes=2) == pytest.approx(6 * COUNT)
    assert _step(1.0, 2.0, free, costs=costs) == pytest.approx(COUNT * (3 + 0.01 + 0.02 + 0.5))


def test_what_is_gathered_ahead_is_hidden() -> None:
    """Of a wire that is faster than the model, the first gather of a step shows, and the last reduction."""
    network = Fitted(2, 0.0, 0.1 / SIZE, 0.1 / SIZE)
    assert _step(1.0, 1.0, network, room=4 * SIZE) == pytest.approx(2 * COUNT + 0.2, abs=0.11)


def test_more_that_is_kept_is_never_slower() -> None:
    for wire in (1e-5, 1e-4, 3e-4, 1e-3):
        network = Fitted(2, 1e-3, wire, wire)
        steps = [_step(0.1, 0.2, network, room=4 * SIZE, stay=range(COUNT - kept, COUNT)) for kept in range(COUNT + 1)]
        assert all(later <= before * (1 + 1e-9) for before, later in pairwise(steps))


@pytest.mark.parametrize("reshard", [True, False])
def test_where_each_collective_is_awaited_everything_adds_up(reshard: bool) -> None:
    work = Workload(
        tuple(Layer(str(n), 0.1, 0.2, (SIZE,)) for n in range(COUNT)), Costs(per_tensor=0.01, update=0.1 / SIZE)
    )
    network = Fitted(2, 0.5, 3 / SIZE, 2 / SIZE)
    pairs = [Bucket(first, first + 1, 2 * SIZE, 2) for first in range(0, COUNT, 2)]
    gathers = len(pairs) * (2 if reshard else 1)
    wire = gathers * (0.5 + 2 * 2) + len(pairs) * (0.5 + 2 * 3)
    found = awaited(work, network, pairs, reshard=reshard)
    assert found.step == pytest.approx(COUNT * (0.1 + 0.2 + 0.01 + 0.1 / 2) + wire)
    assert found.waited == pytest.approx(wire)
