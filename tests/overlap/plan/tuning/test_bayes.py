"""The search finds minima in few trials, repeats itself exactly, and leaves the process's random numbers alone."""

from __future__ import annotations

import math
import random

import numpy
import pytest

from overlap.plan.tuning import bayes
from overlap.plan.tuning.bayes import BayesianSearch
from overlap.plan.tuning.space import Dimension

MB = Dimension("mb", 1, 256)


def _best(search: BayesianSearch, cost: object, trials: int) -> dict[str, float]:
    assert callable(cost)
    log = []
    for _ in range(trials):
        setting = search.ask()
        log.append((cost(setting), setting))
        search.tell(setting, cost(setting))
    return min(log, key=lambda one: one[0])[1]


@pytest.mark.parametrize("optimum", [1.5, 40.0])
def test_finds_the_valley(optimum: float) -> None:
    noise = random.Random(1)

    def cost(setting: dict[str, float]) -> float:
        return 0.1 * (1 + 0.2 * math.log2(setting["mb"] / optimum) ** 2) * (1 + noise.uniform(-0.01, 0.01))

    found = _best(BayesianSearch([MB]), cost, 10)
    assert abs(math.log2(found["mb"] / optimum)) < 0.5  # within 5 % of the least time; the worst is 13 times as long


def test_two_dimensions() -> None:
    search = BayesianSearch([MB, Dimension("ahead", 1, 16, integer=True)])

    def cost(setting: dict[str, float]) -> float:
        return 1 + 0.2 * math.log2(setting["mb"] / 30) ** 2 + 0.2 * math.log2(setting["ahead"] / 4) ** 2

    assert cost(_best(search, cost, 16)) < 1.1


def test_first_proposals_spread_over_the_space() -> None:
    search = BayesianSearch([MB])
    positions = sorted(MB.position(search.ask()["mb"]) for _ in range(3))
    assert positions[0] < 1 / 3 < positions[1] < 2 / 3 < positions[2]


def test_random_numbers_of_the_process_stay_and_the_search_repeats_itself() -> None:
    def asked() -> list[float]:
        search = BayesianSearch([MB], seed=3)
        values = []
        for _ in range(5):
            values.append(search.ask()["mb"])
            search.tell({"mb": values[-1]}, 1 + values[-1])
        return values

    random.seed(5)
    numpy.random.seed(5)
    expected = random.random(), float(numpy.random.rand())
    random.seed(5)
    numpy.random.seed(5)
    first = asked()
    assert (random.random(), float(numpy.random.rand())) == expected
    assert asked() == first


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one dimension"):
        BayesianSearch([])
    with pytest.raises(ValueError, match=r"said to take 0\.0 seconds"):
        BayesianSearch([MB]).tell({"mb": 2}, 0.0)
    monkeypatch.setattr(bayes, "available", lambda: False)
    with pytest.raises(ImportError, match="pip install bayesian-optimization"):
        BayesianSearch([MB])
