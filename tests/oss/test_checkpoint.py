"""A checkpointed part of a model computes what it would without, and keeps less for backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from oss import checkpoint_wrapper, disable_checkpointing


class _Model(nn.Module):
    """The tutorial's, with batch normalisation; with options, its first part is wrapped by them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ffn = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
        if options:
            part = self.ffn
            self.ffn = checkpoint_wrapper(part, **options)
            assert self.ffn is part
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.ffn(x))


def _trained(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    return [torch.get_rng_state(), *model.state_dict().values()]


@pytest.mark.parametrize("offload", [False, True])
def test_training_is_the_same_with_dropout_and_running_statistics(offload: bool) -> None:
    plain, wrapped = _Model(), _Model(offload_to_cpu=offload)
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    for mine, reference in zip(_trained(wrapped), _trained(plain), strict=True):
        assert torch.equal(mine, reference)


def test_the_forward_pass_runs_again_in_backward_and_only_then() -> None:
    model = _Model(offload_to_cpu=False)
    calls: list[bool] = []
    model.ffn[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    loss = model(torch.randn(5, 8)).sum()
    assert calls == [True]
    loss.backward(retain_graph=True)
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 3
    with torch.no_grad():
        model(torch.randn(5, 8))
    assert len(calls) == 4


def test_a_pass_may_go_without_and_another_one_be_recomputed_meanwhile() -> None:
    outer = nn.Sequential(_Model(offload_to_cpu=False).ffn, nn.Linear(8, 1))
    checkpoint_wrapper(outer)
    calls: list[None] = []
    outer[0][0].register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(5, 8)
    with disable_checkpointing():
        outer(x).sum().backward()
        assert len(calls) == 1
    loss = outer(x).sum()
    with disable_checkpointing():
        loss.backward()  # what is recomputed keeps as much as in forward, also in parts that are wrapped themselves
    assert len(calls) == 4


def test_a_copy_recomputes_itself() -> None:
    model = _Model(offload_to_cpu=False)
    other = copy.deepcopy(model)
    other(torch.randn(5, 8)).sum().backward()
    assert other.ffn[0].weight.grad is not None
    assert model.ffn[0].weight.grad is None


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, word: str) -> dict[str, Any]:
        return {"outputs": (x * self.weight, [scale * self.weight]), "word": word}


def test_arguments_by_name_and_nested_outputs() -> None:
    module = checkpoint_wrapper(_Nested())
    scale = torch.tensor(2.0, requires_grad=True)
    found = module(torch.ones(3), scale=scale, word="as it is")
    assert found["word"] == "as it is"
    total = found["outputs"][0].sum() + found["outputs"][1][0].sum()
    by_scale, by_weight = torch.autograd.grad(total, (scale, module.weight))
    assert torch.equal(by_scale, torch.tensor(3.0))
    assert torch.equal(by_weight, torch.full((3,), 3.0))


def test_autocast_is_the_same_when_it_is_recomputed() -> None:
    model = _Model(offload_to_cpu=False)
    seen: list[torch.dtype] = []
    model.ffn[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(5, 8)).sum()
    loss.backward()
    assert seen == [torch.bfloat16] * 2


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a module"):
        checkpoint_wrapper(nn.Linear)
