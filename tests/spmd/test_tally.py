"""What any rank says is what all of them read, in the order of their calls; and what scripts make of it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import dear
from overlap.core.closing import OtherRankFailed
from overlap.core.round import GradientChanged, TooManyGradients
from overlap.core.tally import Call, Said, Tally
from overlap.job.session import current
from tests.spmd.test_contract import _loss, _same_everywhere
from tests.spmd.test_parity import PACKAGES, WRAP, _model


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
    model = _model("Mlp")
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    _loss(model, 2).backward()
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
        _same_everywhere(parameter.detach())


def _loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 9, generator=generator, dtype=torch.float64)).square().mean()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_rank_that_had_no_batch_in_a_step_that_all_skip_is_not_left_behind(strategy: str) -> None:
    """Also where a metric is averaged before the next step, for which the others do not wait for it."""
    model, alone = _model("Mlp"), _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    plain = torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9)
    for step in range(10):
        skipped, empty = step in (2, 3, 5, 8), dear.size() - 1 if step in (3, 5, 6, 8) else None
        optimizer.zero_grad()
        if dear.rank() != empty:
            _loss_of(model, step, dear.rank()).backward()
        if step == 4:
            dear.allreduce(torch.ones(3))
        if not skipped:
            optimizer.step()
            plain.zero_grad()
            for rank in range(dear.size()):
                if rank != empty:
                    (_loss_of(alone, step, rank) / dear.size()).backward()
            plain.step()
    optimizer.synchronize()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11)
        _same_everywhere(parameter.detach())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_ranks_that_make_different_calls_raise(strategy: str) -> None:
    if dear.size() == 1:
        return
    model = _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    _loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"different calls in step 0: rank 0 asks .*, and rank \d needs them"):
        optimizer.synchronize() if dear.rank() == 0 else optimizer.step()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_closure_behind_a_backward_of_one_rank_raises_on_all(strategy: str) -> None:
    """Its gradients would be added to those. Nothing is lost by that."""
    model = _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    if dear.rank() == 0:
        _loss(model, 0).backward()
    with pytest.raises(TooManyGradients, match="on some rank there were some already"):
        optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure)
    for parameter in model.parameters():
        _same_everywhere(parameter.detach())


@pytest.mark.parametrize("gradients", ["", "window", "replaced"])
@pytest.mark.parametrize("strategy", PACKAGES)
def test_synchronize_waits_for_nobody_s_gradients_after_a_step(strategy: str, gradients: str) -> None:
    """On every rank, as often as one likes; nothing is averaged twice."""
    model = _model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if gradients == "window" else contextlib.nullcontext():
            _loss(model, step).backward()
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
        _same_everywhere(parameter.detach())


def test_gradients_of_replaced_buckets_are_not_averaged_again() -> None:
    model = _model("Mlp")
    optimizer = WRAP["dear"](torch.optim.SGD(model.parameters(), 0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        optimizer.replan(optimizer.strategy.at({"threshold_mb": 1.0 + step}))
        rounds = optimizer._engine.participants.round
        optimizer.synchronize()
        assert optimizer._engine.participants.round == rounds
        assert not optimizer._wrapped.local


@pytest.mark.parametrize("strategy", PACKAGES)
def test_what_some_rank_trains_later_is_trained_on_all(strategy: str) -> None:
    """Layers that one rank alone has thawed, one after the other: each takes part from then on, everywhere."""
    model = _model("Mlp")
    layers = [layer for layer in model.inner if list(layer.parameters())]
    for layer in layers:
        layer.requires_grad_(False)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2 * len(layers)):
        if step % 2 and (step // 2) % dear.size() == dear.rank():
            layers[step // 2].requires_grad_(True)
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    optimizer.synchronize()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value)
        _same_everywhere(parameter.detach())
