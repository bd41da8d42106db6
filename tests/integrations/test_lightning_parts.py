"""Parts of Lightning's strategies by themselves: when models are averaged, and which optimizers are held back."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overlap.optimizer.distributed import DistributedOptimizer


class _Optimizer(DistributedOptimizer):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.held_back = self.averaged = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.held_back += 1
        yield

    def average_parameters(self) -> None:
        self.averaged += 1


def _module() -> Any:
    """Imported when a test runs: Lightning takes seconds, which every process of the tests would spend."""
    return importlib.import_module("dear.integrations.lightning")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what rank 0 has sent."""
    names: list[list[str]] = []
    monkeypatch.setattr(_module(), "broadcast_parameters", lambda parameters, root_rank: names.append([*parameters]))
    return names


def _strategy(optimizer: _Optimizer) -> Any:
    kind = _module().DearStrategy
    made = kind.__new__(kind)
    made._lightning_module, made._optimizers, made._training = torch.nn.BatchNorm1d(2), [optimizer], False
    return made


def test_ranks_have_one_model_when_training_ends_and_are_not_averaged_afterwards(sent: list[list[str]]) -> None:
    optimizer = _Optimizer()
    strategy = _strategy(optimizer)
    strategy.on_train_start()
    strategy.on_train_end()
    assert optimizer.averaged == 1
    strategy.on_validation_start()
    assert (optimizer.averaged, sent) == (1, [])


def test_while_training_all_ranks_validate_one_model_with_rank_0s_buffers(sent: list[list[str]]) -> None:
    """A pass that no step has followed, inside an accumulation, has left other ones on each rank."""
    optimizer = _Optimizer()
    strategy = _strategy(optimizer)
    strategy.on_train_start()
    strategy.on_validation_start()
    assert (optimizer.averaged, sent) == (1, [["running_mean", "running_var", "num_batches_tracked"]])


@pytest.mark.parametrize("enabled", [True, False])
def test_fabric_holds_back_the_optimizers_of_a_module_where_it_is_asked_to(enabled: bool) -> None:
    mine, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    of_mine, of_other = _Optimizer(), _Optimizer()
    control = _module()._NoSync()
    control.optimizers[mine], control.optimizers[other] = [weakref.ref(of_mine)], [weakref.ref(of_other)]
    with control.no_backward_sync(mine, enabled):
        assert (of_mine.held_back, of_other.held_back) == (int(enabled), 0)
