"""Mixed precision with every strategy: autocast, GradScaler, 16-bit parameters, against one process with the same parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
from overlap.core.round import GradientChanged
from tests.spmd.models import MODELS
from tests.spmd.strategies import OPTIMIZERS, PACKAGES, WRAP
from tests.spmd.training import values_of

# dtype of the parameters, dtype of autocast, a scaler?, relative tolerance: bf16 rounds at every addition of the
# reference, the wire once.
KINDS = {
    "autocast-bf16": (torch.float32, torch.bfloat16, False, 1e-5),
    "autocast-fp16-scaled": (torch.float32, torch.float16, True, 1e-5),
    "bf16-parameters": (torch.bfloat16, None, False, 2e-2),
}


def _build(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(7)
    return MODELS["Mlp"]().to(dtype)


def _loss(model: torch.nn.Module, step: int, rank: int, dtype: torch.dtype, autocast: torch.dtype | None) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(6, 9, generator=generator).to(dtype) for _ in range(2))
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        return torch.nn.functional.mse_loss(model(x).float(), y.float())


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("kind", KINDS)
def test_precision(kind: str, strategy: str) -> None:
    dtype, autocast, scaled, tolerance = KINDS[kind]
    if scaled and "eager" in strategy:
        return  # refused: see test_eager.py

    def train(distributed: bool) -> tuple[list[torch.Tensor], float]:
        model = _build(dtype)
        optimizer: Any = OPTIMIZERS["sgd"](list(model.parameters()))
        if distributed:
            optimizer = WRAP[strategy](optimizer, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3, enabled=scaled)
        ranks = [dear.rank()] if distributed else list(range(dear.size()))
        for step in range(6):
            optimizer.zero_grad()
            for rank in ranks:
                scaler.scale(_loss(model, step, rank, dtype, autocast)).backward()
            if not distributed:
                for parameter in model.parameters():
                    parameter.grad.div_(dear.size())
            if scaled and step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return values_of(model), scaler.get_scale()

    expected, scale = train(False)
    actual, same_scale = train(True)
    assert scale == same_scale
    assert scale < 2.0**24 or not scaled, "no step overflowed, so nothing was skipped"
    for mine, reference in zip(actual, expected, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_asking_what_an_optimizer_can_do_changes_nothing(strategy: str) -> None:
    model = _build(torch.float32)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, step, dear.rank(), torch.float32, None).backward()
        if dear.rank() == 0:  # alone: nothing may be communicated
            assert not optimizer._step_supports_amp_scaling, (
                "who is told so unscales before it clips, as Lightning does"
            )
            assert [group["lr"] for group in optimizer.param_groups] == [0.1]
        optimizer.step()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_skipped_step_leaves_a_clean_state(strategy: str) -> None:
    model = _build(torch.float32)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    spoiled = float("nan") if dear.rank() == dear.size() - 1 else 1.0
    scaler.scale(_loss(model, 0, dear.rank(), torch.float32, None) * spoiled).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf"}
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    optimizer.zero_grad()
    _loss(model, 1, dear.rank(), torch.float32, None).backward()
    optimizer.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert not any(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("strategy", PACKAGES)
def test_skip_synchronize_wants_synchronize(strategy: str) -> None:
    model = _build(torch.float32)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(2):
        _loss(model, 0, dear.rank(), torch.float32, None).backward()
        with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match=r"call synchronize\(\) before"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def test_unscaling_by_hand_is_not_mistaken_for_a_scaler() -> None:
    model = _build(torch.float32)
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.1), model)
    _loss(model, 0, dear.rank(), torch.float32, None).backward()
    optimizer.step()
    optimizer.zero_grad()
    _loss(model, 1, dear.rank(), torch.float32, None).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)
    with pytest.raises(GradientChanged, match=r"synchronize\(\)"):
        optimizer.step()
    optimizer.zero_grad()
