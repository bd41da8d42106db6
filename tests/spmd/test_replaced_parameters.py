"""Parameters that a script replaces, or moves, after wrapping: one message on every rank, unless somebody trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dear
from tests.spmd.one_process import SGD, loss_of, small_model, train
from tests.spmd.strategies import PACKAGES, WRAP

Script = Callable[[Any], Any]


def _assign(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _own(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


REPLACE: dict[str, Script] = {
    "to meta": lambda model: model.to("meta"),
    "assign": _assign,
    "by hand": _own,
    "registered": lambda model: model[0].register_parameter("weight", nn.Parameter(torch.zeros_like(model[0].weight))),
}


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    if next(model.parameters()).is_meta:
        return model(torch.ones(2, 6, dtype=torch.float64, device="meta")).mean()  # type: ignore[no-any-return]
    return loss_of(model, step, False)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("way", PACKAGES)
@pytest.mark.parametrize("how", REPLACE)
def test_a_parameter_that_was_replaced_is_named(how: str, way: str, after: int) -> None:
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False, steps=after)
    REPLACE[how](model)
    optimizer.zero_grad()
    _loss(model, 5).backward()
    with pytest.raises(RuntimeError, match=r"another parameter '0.weight' than the optimizer .*, which no step would"):
        optimizer.step()


def test_on_one_rank_alone_all_are_told() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    if dear.rank() == dear.size() - 1:
        _own(model)
    optimizer.zero_grad()
    loss_of(model, 5, False).backward()
    with pytest.raises(RuntimeError, match=r"another parameter '0.weight' than the optimizer"):
        optimizer.step()


def test_parameters_under_new_names_or_in_a_group_of_their_own_are_trained() -> None:
    model: Any = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    prune.l1_unstructured(model[0], "weight", amount=2)  # the same parameter is called weight_orig
    model[2].bias = nn.Parameter(model[2].bias.detach().clone(), requires_grad=False)  # frozen
    _own_weight = nn.Parameter(model[2].weight.detach().clone())
    model[2].weight = _own_weight
    optimizer.add_param_group({"params": [_own_weight]})
    before = _own_weight.detach().clone()
    train(model, optimizer, False)
    optimizer.synchronize()
    assert not torch.equal(before, _own_weight)


@pytest.mark.parametrize("after", [0, 2])
def test_a_parameter_that_was_moved_is_named(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)  # it stays the same object
    model = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False, steps=after)
    optimizer.zero_grad()
    model.to("meta")
    _loss(model, 5).backward()
    with pytest.raises(
        RuntimeError, match=r"'0.weight' was .*on cpu when the optimizer was wrapped and is .*on meta now"
    ):
        optimizer.step()
