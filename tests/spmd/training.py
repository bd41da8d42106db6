"""What many suites train a few steps with, and how they compare what comes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from tests.spmd.loops import LOOPS, Run
from tests.spmd.models import double_model
from tests.spmd.strategies import NAMELESS, OPTIMIZERS, OWNED, WRAP

__all__ = [
    "assert_close",
    "backward",
    "check_while_it_trains",
    "halves",
    "local_loss",
    "loop_alone",
    "same_everywhere",
    "same_values",
    "train_in_loop",
    "trained",
    "values_of",
]


def local_loss(
    model: torch.nn.Module, step: int = 0, rank: int | None = None, width: int = 9, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Of four rows that are of this step and of `rank`, which is this one if none is given."""
    generator = torch.Generator().manual_seed(100 * step + (dear.rank() if rank is None else rank))
    return model(torch.randn(4, width, generator=generator, dtype=dtype)).square().mean()


def backward(model: torch.nn.Module, optimizer: Any, step: int = 0) -> None:
    optimizer.zero_grad()
    Run(model, optimizer, dear.rank(), dear.size()).loss(step).backward()


def trained(strategy: str = "dear", steps: int = 2, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, **options), model)
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    return model, optimizer


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters as a rank saves them: between steps, `fsdp` has no rank hold them whole."""
    saved = model.state_dict()
    return [saved[name].detach().clone() for name, _ in model.named_parameters()]


def same_values(mine: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Bit for bit, buffers too."""
    for (name, value), other in zip(mine.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def same_everywhere(value: Any) -> None:
    values = dear.allgather_object(value)
    assert all(torch.equal(other, values[0]) for other in values)


def train_in_loop(model_name: str, optimizer_name: str, loop_name: str, strategy: str | None) -> tuple[Any, Any, Any]:
    """The state of the model and of the optimizer, and what the loop has seen; in one process, if no strategy is given."""
    model = double_model(model_name)
    if strategy is not None and dear.rank() > 0:  # wrapping must bring rank 0's values
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    optimizer: Any = OPTIMIZERS[optimizer_name](list(model.parameters()))
    rank = None
    if strategy is not None:
        optimizer, rank = (WRAP | NAMELESS | OWNED)[strategy](optimizer, model), dear.rank()
    run = Run(model, optimizer, rank, dear.size())
    LOOPS[loop_name](run)
    if strategy is not None:
        optimizer.synchronize()
    return model.state_dict(), optimizer.state_dict(), run.seen


@functools.cache
def loop_alone(model_name: str, optimizer_name: str, loop_name: str) -> tuple[Any, Any, Any]:
    """The same in one process, which does it once for all strategies."""
    return train_in_loop(model_name, optimizer_name, loop_name, None)


def halves(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs and targets of a step, in single precision."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 9, generator=generator), torch.randn(6, 9, generator=generator)


def assert_close(actual: Any, expected: Any, where: str) -> None:
    """Tensors, numbers, and states that contain them, up to rounding; all else is equal. A failure says `where`."""
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape, f"{where}: {actual.shape} != {expected.shape}"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} != {expected.dtype}"
        if expected.is_sparse:  # coalesced or not
            actual, expected = actual.to_dense(), expected.to_dense()
        tolerance = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 2e-6
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{where}: {sorted(actual)} != {sorted(expected)}"
        for key in expected:
            assert_close(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} != {len(expected)} entries"
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_close(mine, theirs, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-12), f"{where}: {actual} != {expected}"
    else:
        assert actual == expected, f"{where}: {actual} != {expected}"


def check_while_it_trains(kind: str, wrap: Callable[..., Any], steps: int, look: Callable[[int, Any], None]) -> None:
    """Plain steps are those of one process, whatever becomes of buckets meanwhile: `look` is called after each."""

    def train(distributed: bool) -> Any:
        model = double_model("Mlp")
        optimizer: Any = OPTIMIZERS[kind](list(model.parameters()))
        if distributed:
            optimizer = wrap(optimizer, model)
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(steps):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
            if distributed:
                look(step, optimizer)
        if distributed:
            optimizer.synchronize()
        return model.state_dict(), optimizer.state_dict()

    actual, expected = train(True), train(False)
    assert_close(actual[0], expected[0], "model")
    assert_close(actual[1], expected[1], "optimizer")
