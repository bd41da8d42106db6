"""The course of a tuning: what is measured in which order, and who wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from overlap.plan.tuning.campaign import Campaign, Decision, table
from overlap.plan.tuning.space import Setting


class Listed:
    """Proposes what it was given; remembers what it was told."""

    def __init__(self, *values: float) -> None:
        self._values: Iterator[float] = iter(values)
        self.told: list[tuple[float, float]] = []

    def ask(self) -> dict[str, float]:
        return {"mb": next(self._values)}

    def tell(self, setting: Setting, seconds: float) -> None:
        self.told.append((setting["mb"], seconds))


def _run(campaign: Campaign, cost: Callable[[float, int], float]) -> tuple[list[float], Decision]:
    measured, now = [25.0], 25.0
    while True:
        decision = campaign.next(cost(now, len(measured) - 1))
        now = decision.setting["mb"]
        if decision.result is not None:
            return measured, decision
        measured.append(now)


def test_the_best_is_measured_against_the_start_and_stays() -> None:
    search = Listed(1, 8, 64)
    campaign = Campaign(search, {"mb": 25.0}, trials=4, pairs=3)
    measured, decision = _run(campaign, lambda mb, _: abs(mb - 10) + 1)
    assert measured == [25, 1, 8, 64, 25, 8, 8, 25, 25, 8]
    assert search.told == [(25, 16), (1, 10), (8, 3), (64, 55)]
    assert decision.setting == {"mb": 8}
    assert decision.result is not None
    assert not decision.result.reverted
    assert decision.result.ratio == pytest.approx(3 / 16)
    text = table(campaign.log, decision.result)
    assert len(text.splitlines()) == 12
    assert "mb=8 stays: measured again, it took 0.188 of the start's time" in text


def test_a_lucky_trial_is_found_out() -> None:
    campaign = Campaign(Listed(1, 8), {"mb": 25.0}, trials=3, pairs=3)
    _, decision = _run(campaign, lambda mb, number: 0.5 if number == 2 else 2.0 if mb == 8 else 1.0)
    assert decision.setting == {"mb": 25}
    assert decision.result is not None
    assert decision.result.reverted
    assert "the start stays: measured again, the best trial took 2.000 of its time" in table(
        campaign.log, decision.result
    )


def test_equal_is_not_better() -> None:
    campaign = Campaign(Listed(1), {"mb": 25.0}, trials=2, pairs=1)
    _, decision = _run(campaign, lambda _mb, number: 0.5 if number == 1 else 1.0)
    assert decision.setting == {"mb": 25}


def test_nothing_is_repeated_where_no_trial_was_faster() -> None:
    campaign = Campaign(Listed(1, 8), {"mb": 25.0}, trials=3, pairs=3)
    measured, decision = _run(campaign, lambda mb, _: 1.0 if mb == 25 else 2.0)
    assert measured == [25, 1, 8]
    assert decision.setting == {"mb": 25}
    assert decision.result is not None
    assert "no trial was faster" in table(campaign.log, decision.result)


def test_settings_with_the_same_buckets_are_measured_once() -> None:
    search = Listed(30, 31, 4, *range(30, 99))
    campaign = Campaign(search, {"mb": 25.0}, trials=20, pairs=1, same=lambda setting: min(setting["mb"], 10.0))
    measured, decision = _run(campaign, lambda mb, _: 2.0 if mb == 4 else 3.0)
    assert measured == [25, 4, 25, 4]  # what is left leads to the same again: the search ends early
    assert search.told[:4] == [(25, 3), (30, 3), (31, 3), (4, 2)]
    assert decision.setting == {"mb": 4}
