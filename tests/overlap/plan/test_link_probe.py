"""What a probe of the link makes of operations whose times are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap.plan import link_probe
from overlap.plan.link_probe import Measured, measure_all_reduce, start_cost
from overlap.transport.operation import Operation


class Link:
    """A communicator, and the clocks. Operations take a second, of which a quarter is the thread's; at first, a hundred."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self.now, self.own, self.repeats = 0.0, 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.own

    def run(self, operation: Operation) -> None:
        self.repeats += 1

    def start(self, operation: Operation) -> Any:
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        self.now += 100.0 if self.repeats == 1 else 1.0
        self.own += 0.25


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Link()
    monkeypatch.setattr(link_probe, "time", found)
    monkeypatch.setattr(link_probe, "agree", lambda _comm, value: value)
    return found


@pytest.mark.parametrize("nbytes", [4096, 2**19, 2**22])  # of which many, a few and one are in flight
def test_what_one_operation_takes_once_the_link_is_warm(nbytes: int, link: Any) -> None:
    assert measure_all_reduce(link, repeats=1, sizes=[nbytes]) == Measured([(nbytes, 1.0)], 0.25)


@pytest.mark.parametrize(("budget", "sizes"), [(0.0, 3), (1e9, 5)])
def test_a_probe_ends_with_its_budget_and_has_sizes_enough_for_a_fit(budget: float, sizes: int, link: Any) -> None:
    found = measure_all_reduce(link, budget_seconds=budget, sizes=[2**20 * number for number in range(1, 6)])
    assert len(found.samples) == sizes


def test_a_start_is_measured_once_for_each_communicator(link: Any) -> None:
    assert start_cost(link) == (1.0, 0.25)
    repeats = link.repeats
    assert start_cost(link) == (1.0, 0.25)
    assert link.repeats == repeats > 0
