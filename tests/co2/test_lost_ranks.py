"""What an optimizer takes over where ranks were lost, as it is made anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from co2.equations import DiLoCo, LocalSgd, OuterRule
from co2.optimizer import _where_ranks_are_lost
from co2.recovery.inheritance import Left, bequeath, inherit


class _Session:
    """The `number`-th of a job, in which this rank goes on with others, or alone."""

    def __init__(self, number: int, size: int = 1) -> None:
        self.roster, self.comm = SimpleNamespace(number=number), SimpleNamespace(size=size, rank=0)
        self.control = self.comm


@pytest.mark.parametrize(
    ("nprocs", "size", "fits"), [(4, 6, 2), (2, 3, 1), (2, 4, 2), (4, 2, 2), (6, 9, 3), (None, 3, None)]
)
def test_groups_fit_the_ranks_that_are_left(nprocs: int | None, size: int, fits: int | None) -> None:
    session: Any = _Session(2, size)
    assert _where_ranks_are_lost(nprocs, session) == fits
    first: Any = _Session(1, size)
    assert _where_ranks_are_lost(nprocs, first) == nprocs, "what does not fit is refused there"


class _Rounds:
    def __init__(self, rule: OuterRule, *names: str) -> None:
        self.rule, self.begun = rule, list[Left]()
        params = [torch.nn.Parameter(torch.tensor([5.0, 6.0])) for _ in names]
        self.slots = [SimpleNamespace(name=name, param=param) for name, param in zip(names, params, strict=True)]

    def begin_at(self, left: Left) -> None:
        self.begun.append(left)


LEFT: Left = {"outer": "diloco", "names": ["weight"], "batches": [[0]], "steps": 7, "longest": 2.0, "residuals": {}}
LEFT["shares"] = {0: (0, 2, {"momentum": torch.tensor([1.0, 2.0])})}


def _begun(session: Any, rounds: Any) -> list[Left]:
    bequeath(session, [LEFT])
    inherit(session, rounds)
    return rounds.begun


def test_the_same_model_under_the_same_rule_goes_on() -> None:
    (begun,) = _begun(_Session(2), _Rounds(DiLoCo(), "weight"))
    assert (begun["batches"], begun["steps"], begun["longest"]) == ([[0]], 7, 2.0)
    assert begun["parameters"][0]["momentum"].tolist() == [1.0, 2.0]
    assert begun["parameters"][0]["start"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    ("number", "rule", "names"), [(1, DiLoCo(), ["weight"]), (2, LocalSgd(), ["weight"]), (2, DiLoCo(), ["a", "b"])]
)
def test_a_first_session_another_rule_and_another_model_begin_anew(
    number: int, rule: OuterRule, names: list[str]
) -> None:
    assert _begun(_Session(number), _Rounds(rule, *names)) == []


def test_each_optimizer_takes_over_what_its_predecessor_left() -> None:
    session: Any = _Session(2)
    bequeath(session, [LEFT, {**LEFT, "steps": 8}])
    several: list[Any] = [_Rounds(DiLoCo(), "weight") for _ in range(3)]
    for rounds in several:
        inherit(session, rounds)
    assert [[left["steps"] for left in rounds.begun] for rounds in several] == [[7], [8], []]
