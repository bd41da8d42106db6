"""Which reductions a step takes before it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.core.bucket import Phase
from overlap.core.window import GradientWindow


def _bucket(phase: Phase, done: bool | None) -> Any:
    bucket = SimpleNamespace(phase=phase, meets=True, work=None if done is None else SimpleNamespace(done=lambda: done))
    bucket.advance = lambda to: setattr(bucket, "phase", to)
    return bucket


def _window(order: list[Any], settled: list[Any]) -> GradientWindow:
    def nothing(*_: object) -> None: ...

    return GradientWindow(
        [],
        order,
        passes=1,
        hold_last=True,
        launch=nothing,
        settle=settled.append,
        arrive=nothing,
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(Phase.REDUCING, True), (Phase.REDUCING, True), (Phase.REDUCING, False)], [0, 1]),
        ([(Phase.REDUCING, True), (Phase.REDUCING, False), (Phase.REDUCING, True)], [0]),
        ([(Phase.GATHERING, None), (Phase.REDUCED, None), (Phase.REDUCING, True)], [2]),  # some were updated early
        ([(Phase.REDUCING, None), (Phase.REDUCING, True)], []),  # nothing on the wire that could be asked
    ],
)
def test_only_what_is_reduced_is_settled_in_order_of_issue(
    states: list[tuple[Phase, bool | None]], expected: list[int]
) -> None:
    order, settled = [_bucket(*state) for state in states], []
    _window(order, settled).settle_done()
    assert [order.index(bucket) for bucket in settled] == expected
    assert [order[number].phase for number in expected] == [Phase.REDUCED] * len(expected)
