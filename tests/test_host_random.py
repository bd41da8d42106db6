"""`tests.spmd.host_random`, with a device that computes nothing in the place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.spmd.host_random import HostRandom

META, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture
def on_meta() -> Iterator[None]:
    with META, HostRandom(META):
        yield


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3, generator=_seeded()),
    "randn": lambda: torch.randn(2, 3, generator=_seeded(), dtype=torch.float64),
    "randint": lambda: torch.randint(5, (2,), generator=_seeded()),
    "randperm": lambda: torch.randperm(4, generator=_seeded()),
    "randn_like": lambda: torch.randn_like(torch.empty(3)),
    "a layer": lambda: torch.nn.Linear(2, 2).weight,
    "filled": lambda: torch.empty(3).uniform_(0, 1, generator=_seeded()),
}


@pytest.mark.parametrize("made", MADE)
def test_numbers_of_the_hosts_generators_are_on_the_device(made: str, on_meta: None) -> None:
    assert MADE[made]().device == META


def test_where_the_call_says_counts(on_meta: None) -> None:
    there = torch.rand(3, device="cpu", generator=_seeded(), requires_grad=True)
    assert there.device == CPU
    assert there.requires_grad
    assert torch.equal(there, torch.empty(3, device="cpu").uniform_(generator=_seeded()))


def test_values_are_those_without_it() -> None:
    torch.default_generator.manual_seed(3)
    plain = torch.nn.Linear(3, 2), torch.randn(4, generator=_seeded())
    torch.default_generator.manual_seed(3)
    with HostRandom(CPU):
        mine = torch.nn.Linear(3, 2), torch.randn(4, generator=_seeded())
    assert torch.equal(plain[0].weight, mine[0].weight)
    assert torch.equal(plain[1], mine[1])
