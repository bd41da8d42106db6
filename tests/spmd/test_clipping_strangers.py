"""Clipping and scaling over more than distributed optimizers have: as in one process, or refused by name on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils

import dear
from overlap.core.alike import DifferentScales, NotAveraged
from overlap.core.closing import OtherRankFailed
from tests.spmd.models import MODELS
from tests.spmd.one_process import as_in_one_process, loss_of, small_model
from tests.spmd.strategies import PACKAGES, WRAP

_SINCE_2_6 = pytest.mark.skipif(not hasattr(utils, "get_total_norm"), reason="came with torch 2.6")
CLIP: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "clip_grad_norm_": lambda params: utils.clip_grad_norm_(params, 0.02),
    "clip_grad_value_": lambda params: utils.clip_grad_value_(params, 0.001),
    "get_total_norm": lambda params: utils.get_total_norm([p.grad for p in params if p.grad is not None]),
}
WAYS = [pytest.param(name, marks=_SINCE_2_6 if name == "get_total_norm" else ()) for name in CLIP]


def _head(model: nn.Module, way: str) -> Any:
    return WRAP[way](torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9), model[2])


def _head_as_in_one_process(way: str, script: Callable[[nn.Module, Any, bool], None]) -> None:
    """`script` trains the head, first alone and then with all ranks, to the same parameters."""
    model, reference = small_model(), small_model()
    script(reference, torch.optim.SGD(reference[2].parameters(), 0.1, momentum=0.9), True)
    optimizer = _head(model, way)
    script(model, optimizer, False)
    optimizer.synchronize()
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("way", PACKAGES)
def test_gradients_of_this_rank_alone_are_refused_by_name(way: str, call: str) -> None:
    """The optimizer has the head of a model whose body has gradients, too. Nothing is lost: the head alone is clipped."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, alone).backward()
            if not alone and dear.size() > 1:
                with pytest.raises(NotAveraged, match=rf"{call}\(\) .*'0.weight' of a Sequential, .* and of 1 more"):
                    CLIP[call]([*model.parameters()])
            utils.clip_grad_norm_(model[2].parameters(), 0.02)
            optimizer.step()

    _head_as_in_one_process(way, script)


def _with_one_ranks_own(model: nn.Module) -> nn.Parameter:
    """On the last rank alone it has a gradient."""
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    if dear.rank() == dear.size() - 1:
        extra.grad = torch.full_like(extra, 0.5)
    loss_of(model, 0, False).backward()
    return extra


@pytest.mark.parametrize("way", PACKAGES)
def test_a_gradient_on_one_rank_is_refused_on_all(way: str) -> None:
    if dear.size() == 1:
        pytest.skip("one rank has nobody to differ from")
    model = small_model()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    extra = _with_one_ranks_own(model)
    refused = NotAveraged if dear.rank() == dear.size() - 1 else OtherRankFailed
    with pytest.raises(refused, match="a tensor of shape"):
        utils.clip_grad_norm_([*model.parameters(), extra], 0.02)
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("way", PACKAGES)
def test_beside_averages_they_are_refused_before_the_update(way: str) -> None:
    """Where ``synchronize()`` came first nobody asks the others any more, so ``step()`` does."""
    if dear.size() == 1:
        pytest.skip("one rank has nobody to differ from")
    model = small_model()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    extra = _with_one_ranks_own(model)
    optimizer.synchronize()
    utils.clip_grad_norm_([*model.parameters(), extra], 0.02)
    with pytest.raises(NotAveraged if dear.rank() == dear.size() - 1 else OtherRankFailed, match="nobody averages"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    loss_of(model, 0, False).backward()
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_what_the_script_averages_itself_has_its_part_in_the_norm(way: str, call: str) -> None:
    seen: list[Any] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, alone).backward()
            for parameter in () if alone else model[0].parameters():
                dear.allreduce_(parameter.grad)
            seen.append(CLIP[call]([*model.parameters()]))
            optimizer.step()

    _head_as_in_one_process(way, script)
    if call != "clip_grad_value_":
        torch.testing.assert_close(seen[3:], seen[:3], rtol=1e-9, atol=1e-12)


@_SINCE_2_6
@pytest.mark.parametrize("model", ["Mlp", "Sometimes"])
@pytest.mark.parametrize("way", PACKAGES)
def test_a_norm_first_and_then_clipping_by_it(way: str, model: str) -> None:
    """Of averages, and of those parameters, too, that other ranks have used."""
    norms: list[torch.Tensor] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            x[1:, 0] = -x[1:, 0].abs()  # at most the first rank takes the branch of `Sometimes`
            x[0, 0] = 1.0
            share = 8 // dear.size()
            model(x if alone else x[dear.rank() * share :][:share]).square().mean().backward()
            grads = (p.grad for p in model.parameters() if p.grad is not None)
            norms.append(utils.get_total_norm(grads, norm_type=2 if step else float("inf")))
            utils.clip_grads_with_norm_(model.parameters(), 0.02, norms[-1])
            optimizer.step()

    as_in_one_process(way, script, build=lambda: _built(model))
    torch.testing.assert_close(norms[4:], norms[:4], rtol=1e-9, atol=1e-12)


def _built(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().double()


@_SINCE_2_6
@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_a_norm_that_each_rank_has_for_itself_is_refused(way: str) -> None:
    if dear.size() == 1:
        pytest.skip("one rank has nobody to differ from")
    model = small_model()
    optimizer = WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model)
    for averaged in (False, True):
        optimizer.zero_grad()
        loss_of(model, 0, False).backward()
        if averaged:
            optimizer.synchronize()
        mine = torch.tensor(1.0 + dear.rank())
        with pytest.raises(NotAveraged, match=rf"another total_norm on other ranks than on this one \({mine:g}\)"):
            _clip_and_step(model, optimizer, mine)
    optimizer.zero_grad()


def _clip_and_step(model: nn.Module, optimizer: Any, total_norm: torch.Tensor) -> None:
    utils.clip_grads_with_norm_(model.parameters(), 0.02, total_norm)
    optimizer.step()


def test_torchs_own_functions_do_what_they_did() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    for name in ("clip_grad_norm_", "get_total_norm"):
        if hasattr(utils, name):
            assert CLIP[name]([parameter]).item() in (pytest.approx(4.0), pytest.approx(0.02))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("way", PACKAGES)
def test_a_scaler_that_steps_a_local_optimizer_too_is_refused_once_ranks_scale_apart(way: str, unscale: bool) -> None:
    """It finds that one's infinities on one rank alone, and goes on there with another scale."""
    torch.manual_seed(3)
    model, local = small_model().float(), nn.Linear(3, 3)
    optimizer, other = (
        WRAP[way](torch.optim.SGD(model.parameters(), 0.1), model),
        torch.optim.SGD(local.parameters(), 0.1),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in itertools.count():
        optimizer.zero_grad()
        other.zero_grad()
        y = model(torch.randn(2, 6, generator=torch.Generator().manual_seed(step)))
        bad = float("inf") if step == 1 and dear.rank() == 0 else 1.0
        loss = y.square().mean() + local(y.detach()).sum() * bad
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if step == 2 and dear.size() > 1:
            with pytest.raises(DifferentScales, match="different scales, from 2 to 4"):
                scaler.step(optimizer)
            break
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
        if step == 3:
            break
    optimizer.zero_grad()
    optimizer.synchronize()
