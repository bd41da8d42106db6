"""Where parameters and gradients lie, and what is left in them."""

from __future__ import annotations

import io

import torch
from torch import nn

import dear
from tests.local_decisions.scenario import (
    SHARDED,
    WIDTH,
    assert_equal,
    loss_of,
    make_model,
    raises_everywhere,
    scenario,
    sgd,
    wrap,
)


@scenario()
def writing_through_state_dict(strategy: str) -> None:
    model = make_model()
    optimizer = wrap(strategy, model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, dear.rank(), step).backward()
        optimizer.step()
    own = model.state_dict()
    with torch.no_grad():
        own["1.weight"].copy_(torch.full((WIDTH, WIDTH), 0.25))
    assert bool((model[1].weight == 0.25).all()), "what was written is lost"


@scenario()
def tied_weights_are_saved_once(strategy: str) -> None:
    def size(model: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        return len(file.getvalue())

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
    model[1].weight = model[0].weight
    before = size(model)
    optimizer = wrap(strategy, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 64, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert size(model) < 1.2 * before, f"{before} bytes have become {size(model)}"


@scenario()
def strides_that_differ(strategy: str) -> None:
    """Channels-last on rank 0 alone: elements would be mixed."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    if dear.rank() == 0:
        model = model.to(memory_format=torch.channels_last)
    with raises_everywhere("0.weight", "stride"):
        wrap(strategy, model)


@scenario(*SHARDED)
def parameters_that_change_places(strategy: str) -> None:
    """``p.data, q.data = q.data, p.data`` with another model's parameter."""
    model, other = make_model(), make_model()
    with torch.no_grad():
        other[0].weight.fill_(0.5)
    optimizer = wrap(strategy, model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, dear.rank(), step).backward()
        optimizer.step()
    optimizer.synchronize()
    p, q = model[0].weight, other[0].weight
    before = p.detach().clone()
    p.data, q.data = q.data, p.data
    optimizer.zero_grad()
    loss_of(model, dear.rank(), 2).backward()
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(q, before), "the other model's parameter is ours still"


def _never_zeroed(strategy: str, max_norm: float | None) -> None:
    """Gradients that are never zeroed add up, as in one process."""
    model = make_model()
    optimizer = wrap(strategy, model)
    for step in range(4):
        # In turn one rank uses the middle layer and the other does not.
        whole = model if step % 2 == dear.rank() else nn.Sequential(model[0], model[2])
        loss_of(whole, dear.rank(), step).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
    alone = make_model()
    plain = sgd(alone)
    for step in range(4):
        for rank in range(2):
            whole = alone if step % 2 == rank else nn.Sequential(alone[0], alone[2])
            (loss_of(whole, rank, step) / 2).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        plain.step()
    assert_equal(model, alone)


@scenario("bytescheduler_adapter")
def unused_gradients_that_are_never_zeroed(strategy: str) -> None:
    _never_zeroed(strategy, None)


@scenario(*SHARDED)
def clipped_gradients_that_are_never_zeroed(strategy: str) -> None:
    _never_zeroed(strategy, 0.05)


@scenario(*SHARDED)
def scaled_gradients_that_are_never_zeroed(strategy: str) -> None:
    """``scaler.step()`` leaves them unscaled, and so does a step that nobody sees."""
    model, alone = make_model(), make_model()
    optimizer, plain = wrap(strategy, model), sgd(alone)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        scalers[0].scale(loss_of(model, dear.rank(), step)).backward()
        scalers[0].step(optimizer)
        scalers[0].update()
        for rank in range(2):
            scalers[1].scale(loss_of(alone, rank, step) / 2).backward()
        scalers[1].step(plain)
        scalers[1].update()
    assert_equal(model, alone)
