"""A small model under co2, its batches, and what tests compare."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import co2
from overlap.job.session import current
from tests.spmd.models import WIDTH

__all__ = [
    "DOUBLE",
    "FULL",
    "PLAIN",
    "PLAIN_SIMULATED",
    "Resumed",
    "adamw",
    "add_and_train",
    "assert_equal",
    "assert_same",
    "equal_everywhere",
    "loss_of",
    "momentum_sgd",
    "resumes",
    "sgd",
    "small_model",
    "train_steps",
    "while_rank_0_stands_still",
    "wrapped",
]

DOUBLE = torch.float64
# Of a plain optimizer under CO2DistributedDataParallel; and the same for `co2_simulation`.
PLAIN: dict[str, Any] = {"nprocs_per_node": 1, "outer_lr": 0.8, "co2_clip": True, "co2_clip_threshold": 0.02}
PLAIN_SIMULATED: dict[str, Any] = {"frequency": 3, "lr": 0.8, "momentum": 0.5, "clip": 0.02, "penalty": False}
FULL: dict[str, Any] = {"outer_lr": 0.8, "outer_momentum": 0.5, "outer_clip": 0.02, "gap_penalty": True}


def small_model(dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(4, WIDTH, generator=generator, dtype=DOUBLE).to(dtype) for _ in range(2))
    return nn.functional.mse_loss(model(x), y)


def momentum_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def wrapped(make: Callable[[Any], torch.optim.Optimizer] = momentum_sgd, **arguments: Any) -> tuple[nn.Sequential, Any]:
    model = small_model()
    return model, co2.DistributedOptimizer(make(model.parameters()), model, **arguments)


def train_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, co2.rank(), step).backward()
        optimizer.step()


def add_and_train(model: nn.Module, optimizer: Any, steps: range) -> nn.Parameter:
    """A parameter that ranks hold with other values, which is added before the first of `steps`, in which it falls."""
    extra = nn.Parameter(torch.full((3,), float(co2.rank()), dtype=DOUBLE))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, co2.rank(), step) + extra.sum() * (co2.rank() + 1)).backward()
        optimizer.step()
    return extra


def assert_same(model: nn.Module, expected: nn.Module, *, measured_gap: bool = True) -> None:
    """Equal bit for bit at up to two ranks, where no measured gap has been at work.

    That gap is a norm. It is summed over pieces here and over whole tensors in the simulation, and how a processor's
    vectors add up depends on where a piece begins: see docs/architecture.md, "Numerical contract".
    """
    for (name, value), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        if co2.size() <= 2 and not measured_gap:
            assert torch.equal(value, wanted), name
        else:
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    """Bit for bit, unless there is a tolerance."""
    for (name, value), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            value, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


class Resumed(NamedTuple):
    """What a job has saved, and the model and optimizer of the one that has loaded it, before it goes on."""

    saved: dict[str, Any]  # by the optimizer
    model: nn.Sequential
    optimizer: Any


def resumes(
    wrap: Callable[[], tuple[nn.Sequential, Any]],
    ran: tuple[nn.Sequential, Any],
    after: range,
    elsewhere: range = range(0),
    *,
    train: Callable[[nn.Sequential, Any, range], None] = train_steps,
    loaded: Callable[[Resumed], None] = lambda _resumed: None,
) -> Resumed:
    """Save where `ran`, a model and its optimizer, has come to; that one and one that loads this go on through `after`.

    Their parameters are then equal bit for bit. `elsewhere` is what the other one trains before it loads, and `loaded` is
    called between.
    """
    model, optimizer = ran
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # torch hands out tensors that it goes on with
    train(model, optimizer, after)
    other, resumed = wrap()
    train(other, resumed, elsewhere)
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    result = Resumed(saved[1], other, resumed)
    loaded(result)
    train(other, resumed, after)
    assert_equal(other, model)
    return result


def while_rank_0_stands_still(train: Callable[[], None]) -> None:
    """Rank 0 goes on when rank 1, at the end of its own `train`, says so: nobody else may wait for it before."""
    gate = threading.Event()
    if co2.size() > 1:
        current().peer_queries.on("test/gate", lambda _sender, _news: gate.set())
        co2.barrier()
        if co2.rank() == 0:
            assert gate.wait(30), "another rank waits for this one"
    train()
    if co2.size() > 1 and co2.rank() == 1:
        current().peer_queries.tell(0, "test/gate")


def equal_everywhere(model: nn.Module) -> bool:
    """Whether all ranks have the same values, bit for bit."""
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    return all(torch.equal(flat, other) for other in co2.allgather_object(flat))
