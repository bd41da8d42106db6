"""What a script of `tests.local_decisions` trains, compares and expects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import dear

STRATEGIES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss")
SHARDED = ("dear", "oss")
WIDTH = 6
Scenario = Callable[[str], None]
SCENARIOS: dict[str, tuple[Scenario, tuple[str, ...]]] = {}


def scenario(*strategies: str) -> Callable[[Scenario], Scenario]:
    """Make the function a script, run with each of `strategies` (all, if there is none)."""

    def note(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, strategies or STRATEGIES)
        return function

    return note


def make_model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).double()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def wrap(strategy: str, model: nn.Module, **options: Any) -> Any:
    return dear.DistributedOptimizer(sgd(model), model, strategy=strategy, **options)


def train_alone(
    steps: int, gradients: Callable[[nn.Module, int], None], max_norm: float | None = None
) -> nn.Sequential:
    """One process: `gradients` leaves the averaged ones of a step in ``.grad``."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, step)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for (name, value), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def assert_replicas_equal(model: nn.Module) -> None:
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    first, *others = dear.allgather_object(flat)
    assert all(torch.equal(first, other) for other in others), "replicas are apart"


@contextlib.contextmanager
def raises_everywhere(*words: str) -> Iterator[None]:
    """What is inside raises on every rank, and names all `words`."""
    said = ""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said = str(error)
    for text in dear.allgather_object(said):
        assert text, "every rank should raise"
        assert all(word in text for word in words), f"{text!r} should name {words}"
