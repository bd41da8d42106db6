"""The path of a gradient by itself: no feature is registered, or one is missing, and the rest works as it did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.core.feature import Feature
from overlap.features.gradient_check import GradientCheck
from overlap.features.rounded_parameters import RoundedParameters
from overlap.features.sparse import DenseGradients, SparseGradients
from overlap.optimizer import assembly
from overlap.transport.communicator import Communicator, Work
from tests.spmd.one_process import WAYS, as_in_one_process, loss_of, train
from tests.spmd.strategies import WRAP


def _without(monkeypatch: pytest.MonkeyPatch, *kinds: type[Feature]) -> None:
    """Optimizers that are made from now on have no feature of these kinds."""
    features_of = assembly.features_of

    def fewer(*args: Any, **kwargs: Any) -> tuple[Feature, ...]:
        return tuple(feature for feature in features_of(*args, **kwargs) if not isinstance(feature, kinds))

    monkeypatch.setattr(assembly, "features_of", fewer)


def _script(model: nn.Module, optimizer: Any, alone: bool) -> None:
    """Accumulation, a step that is skipped, averages that are changed, and a layer that is thawed later."""
    model[0].requires_grad_(False)
    train(model, optimizer, alone)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    with contextlib.nullcontext() if alone else optimizer.no_sync():
        loss_of(model, 2, alone).backward()
    loss_of(model, 3, alone).backward()
    optimizer.zero_grad()
    loss_of(model, 4, alone).backward()
    if not alone:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    train(model, optimizer, alone, first=5)


@pytest.mark.parametrize("way", WAYS)
def test_core_trains_without_any_feature(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "features_of", lambda *_args, **_kwargs: ())
    as_in_one_process(way, _script, sync_start=True)


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_a_plain_step_is_the_same_with_and_without_features(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and in the same operations."""

    def trained() -> tuple[list[torch.Tensor], Sequence[str]]:
        torch.default_generator.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
        optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
        train(model, optimizer, False)  # the first iteration asks for sparse gradients
        operations: list[str] = []

        def heard(_comm: Communicator, work: Work) -> Work:
            operations.append(f"{work.op} {work.label} {work.nbytes}")
            return work

        optimizer.synchronize()
        monkeypatch.setattr(Communicator, "listener", heard)
        train(model, optimizer, False, first=2)
        optimizer.synchronize()
        monkeypatch.setattr(Communicator, "listener", None)
        return [parameter.detach().clone() for parameter in model.parameters()], operations

    values, operations = trained()
    _without(monkeypatch, Feature)
    others, fewer = trained()
    assert all(map(torch.equal, values, others))
    assert sorted(operations) == sorted(fewer)  # of a pretended device, a thread issues them


def _changed_in_silence(model: nn.Module, optimizer: Any) -> None:
    """A gradient is changed behind autograd's back while its bucket is on its way."""
    optimizer.zero_grad()
    loss_of(model, 5, False).backward()
    gradient = model[2].weight.grad
    assert gradient is not None
    gradient.data.mul_(2.0)
    optimizer.step()


def test_only_the_check_of_samples_sees_gradients_changed_through_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
        optimizer = WRAP["dear-layerwise"](torch.optim.SGD(model.parameters(), 0.1), model)
        train(model, optimizer, False)
        return model, optimizer

    with pytest.raises(RuntimeError, match=r"the gradient of '2\.weight' was changed"):
        _changed_in_silence(*trained())
    _without(monkeypatch, GradientCheck)
    _changed_in_silence(*trained())


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_sparse_gradients_are_refused_where_nobody_reduces_them(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket takes dense gradients: without the feature that claims such parameters, a rank that has one is told."""
    _without(monkeypatch, SparseGradients, DenseGradients)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)).double()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"sparse_as_dense=True"):
        optimizer.step()


def test_without_a_gather_dtype_nothing_is_rounded_and_no_exact_values_are_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    optimizer = WRAP["dear-layerwise"](torch.optim.SGD(model.parameters(), 0.1), model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert all(bucket.master is None for bucket in optimizer.buckets)
    assert "master" not in optimizer.state_dict()


def test_later_parameters_are_looked_at_by_who_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a `gather_dtype`, a group of parameters that cannot be rounded is refused; that is the feature's part."""

    def with_group(check: Callable[[], Any]) -> None:
        model, added = nn.Linear(6, 3), nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = dear.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, gather_dtype=torch.bfloat16
        )
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": list(added.parameters())})
        added(model(torch.ones(2, 6)).to(torch.bfloat16)).sum().backward()
        with check():
            optimizer.step()

    with_group(lambda: pytest.raises(TypeError, match="gather_dtype"))
    assert RoundedParameters.admit is not Feature.admit
