"""TorchScript, whose modules take no hooks and whose code reads parameters by itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dear
from tests.spmd.one_process import SGD, small_model, train
from tests.spmd.strategies import PACKAGES, WRAP


def _scripted(module: torch.nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        return torch.jit.script(module)


def _model(*, frozen: bool) -> torch.nn.Module:
    model: Any = small_model()
    model[0] = _scripted(model[0])
    for param in model[0].parameters():
        param.requires_grad = not frozen
    return model  # type: ignore[no-any-return]


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", PACKAGES)
def test_parts_in_torchscript(way: str, frozen: bool) -> None:
    reference, model = _model(frozen=frozen), _model(frozen=frozen)
    train(reference, SGD(_trained(reference), 0.1, momentum=0.9), True, steps=4)
    optimizer = WRAP[way](SGD(_trained(model), 0.1, momentum=0.9), model)
    train(model, optimizer, False, steps=4)
    optimizer.synchronize()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", PACKAGES)
def test_a_whole_model_in_torchscript_is_told_what_to_do(way: str) -> None:
    model = _scripted(small_model())
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    if way in ("wfbp", "mgwfbp"):
        train(model, optimizer, False, steps=3)
        return
    if dear.size() == 1:
        pytest.skip("alone, only some have anything on its way after step()")
    with pytest.raises(RuntimeError, match=r"call optimizer\.synchronize\(\) after step\(\)"):
        train(model, optimizer, False, steps=3)
