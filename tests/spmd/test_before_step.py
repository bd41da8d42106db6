"""What a script does with gradients before step(): it replaces, clips, unscales, keeps and drops them as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.core.round import GradientChanged
from tests.spmd.one_process import as_in_one_process, loss_of, train
from tests.spmd.strategies import PACKAGES


def _spoiled(loss: torch.Tensor, param: torch.Tensor, alone: bool, by: float = float("inf")) -> torch.Tensor:
    """The last rank's gradient of one element becomes infinite or NaN, and so does the average."""
    return loss + param.reshape(-1)[0] * by if alone or dear.rank() == dear.size() - 1 else loss


def _clip(alone: bool) -> Callable[..., torch.Tensor]:
    return torch.nn.utils.clip_grad_norm_ if alone else dear.clip_grad_norm_


@pytest.mark.parametrize("way", ["dear", "dear-rb", *PACKAGES])
def test_tensors_put_in_the_place_of_averages_are_what_step_uses(way: str) -> None:
    """One of them is taken away, so that its parameter stays as it is."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            if not alone:
                optimizer.synchronize()
            for number, param in enumerate(model.parameters()):
                assert param.grad is not None
                param.grad = None if number == step else param.grad * 2.0 + 0.1
            optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("by", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", PACKAGES)
def test_clipping_by_a_norm_that_is_not_finite_spoils_what_it_does_in_one_process(way: str, by: float) -> None:
    """One element is NaN: so is the norm, and then all gradients are. One is infinite: it alone becomes NaN."""
    norms: list[torch.Tensor] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        optimizer.zero_grad()
        _spoiled(loss_of(model, 2, alone), model[0].weight, alone, by).backward()
        norms.append(_clip(alone)(model.parameters(), 0.05))
        optimizer.step()

    model = as_in_one_process(way, script)
    torch.testing.assert_close(norms[1], norms[0], equal_nan=True)
    assert bool(model[2].weight.isnan().all()) is (by != float("inf"))
    assert bool(model[0].weight.isnan().any())


@pytest.mark.parametrize("way", PACKAGES)
def test_a_norm_that_should_be_finite_raises_on_every_rank(way: str) -> None:
    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step, alone)
            if step != 2:
                loss.backward()
                optimizer.step()
                continue
            _spoiled(loss, model[0].weight, alone).backward()
            with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .*finite"):
                _clip(alone)(model.parameters(), 0.05, error_if_nonfinite=True)

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_gradients_that_are_kept_were_clipped_once(way: str) -> None:
    """By each call. ``synchronize()`` shows clipped averages; those of the next step are added to them, where nobody
    zeroes them.
    """

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(6):
            loss_of(model, step, alone).backward()
            for max_norm in (0.02, 0.01)[: 1 + step % 2]:
                _clip(alone)(model.parameters(), max_norm)
            if not alone and step == 2:
                optimizer.synchronize()
            optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_gradients_that_are_kept_have_their_loss_scale_taken_out(way: str) -> None:
    """Those of the next step, which are scaled, are added to them."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            scaler.scale(loss_of(model, step, alone)).backward()
            scaler.step(optimizer)
            scaler.update()

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", ["dear", "dear-whole", "oss"])
def test_gradients_that_are_kept_move_to_other_buckets(way: str) -> None:
    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            loss_of(model, step, alone).backward()
            optimizer.step()
            if not alone:
                optimizer.replan(optimizer.strategy.at({"threshold_mb": (0.0001, 25)[step % 2]}))

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_a_scaler_steps_on_a_rank_that_has_no_gradient(way: str) -> None:
    """It insists on one."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            if step != 2:
                scaler.scale(loss_of(model, step, alone)).backward()
            elif alone or dear.rank() == 0:
                loss = model(torch.ones(2, 6, dtype=torch.float64)).square().sum()
                scaler.scale(loss / (dear.size() if alone else 1)).backward()
            scaler.step(optimizer)
            scaler.update()

    as_in_one_process(way, script)


class _Parts(nn.Module):
    """Parameters that can be cut, one that cannot for the gaps between its elements, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.linear = nn.Linear(6, 3, dtype=torch.float64)
        self.gappy = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)[:, 0])
        self.table = nn.Embedding(5, 6, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((x[:, 0].abs() * 2).long().clamp(max=4))
        return self.linear(x * self.gappy + rows)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("way", PACKAGES)
def test_gradients_that_cannot_be_cut_count_once_in_a_norm(way: str, norm_type: float) -> None:
    norms: list[list[float]] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        norms.append([])
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            dense = [*model.linear.parameters(), model.gappy]
            norms[-1].append(float(_clip(alone)(dense, 0.05, norm_type)))
            optimizer.step()

    as_in_one_process(way, script, build=_Parts)
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert min(norms[0]) > 0.05, "all were clipped"


@pytest.mark.parametrize("unscaled_by", ["script", "step"])
@pytest.mark.parametrize("way", PACKAGES)
def test_a_loss_scale_is_taken_out_of_gradients_that_cannot_be_cut(way: str, unscaled_by: str) -> None:
    """And an infinity in any of them makes all ranks skip the step."""
    scales: list[list[float]] = []

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scales.append([])
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step, alone)
            if step == 2:
                loss = _spoiled(loss, model.gappy, alone)
            if step == 4:
                loss = _spoiled(loss, model.table(torch.tensor([1])), alone)
            scaler.scale(loss).backward()
            if unscaled_by == "script":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())

    as_in_one_process(way, script, build=_Parts)
    assert scales[1] == scales[0]
    assert scales[0][-1] == 2.0**14, "two steps were skipped"


@pytest.mark.parametrize("way", PACKAGES)
def test_a_step_skipped_with_zeros_leaves_zeros(way: str) -> None:
    """While reductions of what was there are still under way."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(6):
            loss_of(model, step, alone).backward()
            if step % 2 == 0:
                optimizer.step()
            sent = step % 2 == 1 and not alone and optimizer._engine.round.sent
            optimizer.zero_grad(set_to_none=False)
            assert not any(bool(param.grad.any()) for param in model.parameters() if param.grad is not None)
            if sent:  # the reduction may end later, in the memory of its bucket
                assert not any(slot.param.grad is slot.view for slot in optimizer._engine.round.slots)

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", ["dear-layerwise", "wfbp"])
def test_gradients_that_are_dropped_by_hand_are_gone_or_refused(way: str) -> None:
    """A later layer's gradient then sends what was left of them, and its own is in one buffer with the average."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        optimizer.zero_grad()
        model[0](torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        for param in model[0].parameters():
            param.grad = None
        loss = loss_of(model, 2, alone)
        if not alone and way == "wfbp":
            with pytest.raises(GradientChanged, match="dropped by hand after backward"):
                loss.backward()
            optimizer.zero_grad()
            loss = loss_of(model, 2, alone)
        loss.backward()
        optimizer.step()

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_what_is_frozen_and_has_a_gradient_on_some_rank_is_stepped(way: str) -> None:
    """As by torch, from the first step on."""

    def script(model: nn.Module, optimizer: Any, alone: bool) -> None:
        model[0].bias.requires_grad_(False)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            if alone or dear.rank() == dear.size() - 1:
                model[0].bias.grad = torch.ones_like(model[0].bias) / (dear.size() if alone else 1)
            optimizer.step()

    as_in_one_process(way, script)
