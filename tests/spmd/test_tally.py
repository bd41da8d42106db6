"""What any rank says is what all of them read, in the order of their calls; and what scripts make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dear
from overlap.core.closing import OtherRankFailed
from overlap.core.round import GradientChanged, TooManyGradients
from overlap.core.tally import Call, Said, Tally
from overlap.job.session import current
from tests.spmd.models import double_model
from tests.spmd.strategies import PACKAGES, WRAP
from tests.spmd.training import local_loss, same_everywhere


def test_all_read_what_any_rank_said() -> None:
    tally = Tally(current().channels.named("test of a tally"))
    rank, size = dear.rank(), dear.size()
    last = rank == size - 1
    for details, gradients, late in [
        ({}, False, False),
        ({"gradients": last}, True, False),
        ({"late": not last}, False, size > 1),
        ({"gradients": last, "late": not last}, True, size > 1),
    ]:
        tally.post(Said(Call.CLOSE, 4, rank, 2 + rank, **details), "test")
        heard = tally.read()
        assert (heard.gradients, heard.late, heard.others, heard.last) == (gradients, late, 2, 1 + size)


def test_what_one_rank_raises_in_a_step_all_ranks_raise_and_none_has_lost_anything() -> None:
    """A gradient that one rank alone has changed; then it is put back."""
    model = double_model("Mlp")
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(2):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    local_loss(model, 2).backward()
    last = next(p for p in model.parameters() if p.grad is not None)
    kept = last.grad
    if dear.rank() == dear.size() - 1:
        last.grad = torch.zeros_like(last)
    with pytest.raises((GradientChanged, OtherRankFailed), match="was changed after its reduction had been issued"):
        optimizer.step()
    last.grad = kept
    optimizer.step()
    optimizer.synchronize()
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_rank_that_had_no_batch_in_a_step_that_all_skip_is_not_left_behind(strategy: str) -> None:
    """Also where a metric is averaged before the next step, for which the others do not wait for it."""
    model, alone = double_model("Mlp"), double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    plain = torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9)
    for step in range(10):
        skipped, empty = step in (2, 3, 5, 8), dear.size() - 1 if step in (3, 5, 6, 8) else None
        optimizer.zero_grad()
        if dear.rank() != empty:
            local_loss(model, step, dear.rank()).backward()
        if step == 4:
            dear.allreduce(torch.ones(3))
        if not skipped:
            optimizer.step()
            plain.zero_grad()
            for rank in range(dear.size()):
                if rank != empty:
                    (local_loss(alone, step, rank) / dear.size()).backward()
            plain.step()
    optimizer.synchronize()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11)
        same_everywhere(parameter.detach())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_ranks_that_make_different_calls_raise(strategy: str) -> None:
    if dear.size() == 1:
        return
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    local_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"different calls in step 0: rank 0 asks .*, and rank \d needs them"):
        optimizer.synchronize() if dear.rank() == 0 else optimizer.step()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_closure_behind_a_backward_of_one_rank_raises_on_all(strategy: str) -> None:
    """Its gradients would be added to those. Nothing is lost by that."""
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = local_loss(model, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    if dear.rank() == 0:
        local_loss(model, 0).backward()
    with pytest.raises(TooManyGradients, match="on some rank there were some already"):
        optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


@pytest.mark.parametrize("gradients", ["", "window", "replaced"])
@pytest.mark.parametrize("strategy", PACKAGES)
def test_synchronize_waits_for_nobody_s_gradients_after_a_step(strategy: str, gradients: str) -> None:
    """On every rank, as often as one likes; nothing is averaged twice."""
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if gradients == "window" else contextlib.nullcontext():
            local_loss(model, step).backward()
        if gradients == "replaced":
            optimizer.synchronize()
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 2.0
        optimizer.step()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for _ in range(2):
            optimizer.synchronize()
        assert not optimizer._engine.closing.closed, "there was nothing to average"
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    for parameter in model.parameters():
        same_everywhere(parameter.detach())


def test_gradients_of_replaced_buckets_are_not_averaged_again() -> None:
    model = double_model("Mlp")
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
        optimizer.replan(optimizer.strategy.at({"threshold_mb": 1.0 + step}))
        rounds = optimizer._engine.participants.round
        optimizer.synchronize()
        assert optimizer._engine.participants.round == rounds
        assert not optimizer._wrapped.local


@pytest.mark.parametrize("strategy", PACKAGES)
def test_what_some_rank_trains_later_is_trained_on_all(strategy: str) -> None:
    """Layers that one rank alone has thawed, one after the other: each takes part from then on, everywhere."""
    model = double_model("Mlp")
    layers = [layer for layer in model.inner if list(layer.parameters())]
    for layer in layers:
        layer.requires_grad_(False)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2 * len(layers)):
        if step % 2 and (step // 2) % dear.size() == dear.rank():
            layers[step // 2].requires_grad_(True)
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
    optimizer.synchronize()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value)
        same_everywhere(parameter.detach())


class _Heads(torch.nn.Module):
    """A trunk and two heads, each in a bucket of its own; a step uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, *heads = (torch.nn.Linear(6, 6).double() for _ in range(3))
        self.heads = torch.nn.ModuleList(heads)

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        hidden = self.trunk(x)
        return sum((self.heads[head](hidden) for head in used), start=hidden).square().mean()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_what_no_rank_used_is_left_alone_and_asked_for_only_where_no_rank_used_all(strategy: str) -> None:
    """With momentum and weight decay: a gradient of zero would change the parameter."""
    first, last = 0, dear.size() - 1
    both, one = (0, 1), (0,)
    steps = [(one, one), (both, both), (one, both), (one, one), (both, both), ((1,), one), (both, one)]
    models = [_Heads(), _Heads()]
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.5, weight_decay=0.1) for m in models]
    optimizers[0] = WRAP[strategy](optimizers[0], models[0])
    told = []
    for number, (on_first, on_last) in enumerate(steps):
        used = dict.fromkeys(range(dear.size()), both) | {last: on_last} | {first: on_first}
        if dear.size() > 2 and on_first == on_last == one:
            used = dict.fromkeys(used, one)
        channel = optimizers[0]._engine.closing._comm
        before = channel.issued
        for mine, model, optimizer in ((True, models[0], optimizers[0]), (False, models[1], optimizers[1])):
            optimizer.zero_grad()
            for rank in (dear.rank(),) if mine else used:
                x = torch.full((2, 6), (1.0 + rank + number) / 10, dtype=torch.float64)
                (model(x, used[rank]) / (1 if mine else dear.size())).backward()
            optimizer.step()
        told.append(channel.issued - before)
        for mine, alone in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), alone.detach(), rtol=1e-12, atol=1e-12)
    if dear.size() == 2:
        usual = told[1]
        # After the first step, where buckets are made, ranks ask only where none of them has every gradient.
        assert [one - usual for one in told[1:]] == [0, 0, 1, 0, 1, 0]
