"""Early updates: that they come early, and that whatever they cannot honour raises on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import dear
from overlap.core.bucket import Phase
from overlap.features.early import StepSkipped, UpdatedEarly
from tests.spmd.loops import Run
from tests.spmd.models import WIDTH, Mlp, adafactor
from tests.spmd.strategies import as_early_as_possible
from tests.spmd.training import assert_close, backward


def _layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def _wrapped(model: nn.Module, rate: Any = 0.05, **arguments: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=0.1)
    limits = {"threshold_mb": None, "num_nearby_layers": 1}
    return as_early_as_possible(dear.DistributedOptimizer(inner, model, eager=True, **{**limits, **arguments}))


def _mid_step(rate: Any = 0.05) -> tuple[nn.Sequential, Any]:
    """After a backward pass that updated its last layer, before the step."""
    model = _layers()
    optimizer = _wrapped(model, rate)
    for step in range(2):
        backward(model, optimizer, step)
        if step == 0:
            optimizer.step()
    return model, optimizer


def test_late_layers_are_updated_while_backward_runs() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    held = model[3].weight
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append([bucket.phase for bucket in optimizer.buckets])
    )
    for step in range(3):
        before, version = held.detach().clone(), held._version
        backward(model, optimizer, step)
        if step:
            assert seen[-1][0] is Phase.GATHERING
            assert held._version > version
            mine = optimizer.buckets[0]
            home = (before.flatten(), held.detach().flatten().clone())  # step() would wait for a view
            start, stop = mine.own.start, min(mine.own.stop, held.numel())
            assert start >= stop or not torch.equal(home[0][start:stop], home[1][start:stop])
        optimizer.step()
    assert [bucket.phase for bucket in optimizer.buckets] == [Phase.GATHERING] * 4


def _scaled(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


REFUSED = {
    "attribute": lambda model, _: model[3].weight,
    "model": lambda model, _: model.state_dict(),
    "forward": lambda model, _: model(torch.ones(1, WIDTH, dtype=torch.float64)),
    "state_dict": lambda _, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda _, optimizer: optimizer.load_state_dict({}),
    "add_param_group": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "scaler": lambda _, optimizer: _scaled(optimizer),
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_time_before_the_step_is_refused(what: str) -> None:
    model, optimizer = _mid_step()
    with pytest.raises(UpdatedEarly, match="eager=False"):
        REFUSED[what](model, optimizer)
    optimizer.step()
    assert bool(torch.isfinite(model[3].weight).all())


def test_a_step_cannot_be_skipped() -> None:
    _, optimizer = _mid_step()
    with pytest.raises(StepSkipped, match="call step\\(\\) after every backward"):
        optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_hyper_parameters_are_those_of_backward(rate: Any) -> None:
    """A rate that is a tensor is changed where it lies."""
    _, optimizer = _mid_step(rate(0.25))
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(UpdatedEarly, match=r"'lr' of parameter group 0 was 0\.25 .* and is .*0\.125.* at step"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] *= 2.0
    optimizer.step()


def test_training_may_end_without_a_step() -> None:
    _, optimizer = _mid_step()
    optimizer.finish()
    assert Phase.GATHERING not in [bucket.phase for bucket in optimizer.buckets]


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    model = Mlp()
    with pytest.raises(ValueError, match="element by element; Adafactor"):
        dear.DistributedOptimizer(adafactor(model.parameters(), 1e-2), model, eager=True)


class Peeking(nn.Module):
    """A gradient that depends on a later layer's weight, read through the module during backward from call `since` on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.layers, self.since, self.calls = _layers(), since, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layers[0](x)
        if self.calls >= self.since:
            x.register_hook(lambda gradient: gradient * (1 + self.layers[3].weight.detach().mean()))
        return self.layers[3](self.layers[2](self.layers[1](x)))


def test_what_backward_reads_late_is_updated_by_the_step() -> None:
    def train(distributed: bool) -> Any:
        model = Peeking(since=1)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        if distributed:
            optimizer = _wrapped(model)
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(4):
            optimizer.zero_grad()
            run.loss(step).backward()
            if distributed and step:
                phases = [bucket.phase for bucket in optimizer.buckets]
                assert phases[0] is Phase.REDUCING
                assert phases[1] is Phase.GATHERING
            optimizer.step()
        return model.state_dict()

    assert_close(train(True), train(False), "model")


def test_a_late_read_that_comes_as_a_surprise_raises() -> None:
    model = Peeking(since=3)
    optimizer = _wrapped(model)
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
    with pytest.raises(UpdatedEarly, match=r"'layers\.3\.weight' was read before step"):
        backward(model, optimizer, 2)
    optimizer.step()  # completes what the interrupted backward left


def test_rank_0_saves_alone_while_the_others_go_on() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    states = []
    for step in range(4):
        backward(model, optimizer, step)
        optimizer.step()
        if dear.rank() == 0:
            time.sleep(0.02)  # the others are in the next backward by now
            states.append(optimizer.state_dict())
    plain = _layers()
    alone = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    run = Run(plain, alone, None, dear.size())
    for step in range(4):
        alone.zero_grad()
        run.loss(step).backward()
        alone.step()
        if dear.rank() == 0:
            saved = states[step]["state"][6]["momentum_buffer"]
            assert_close(saved, alone.state[plain[3].weight]["momentum_buffer"], f"step {step}")


class _Busy:
    """A round whose wire has no gap."""

    quiet = False

    def __init__(self, round: Any) -> None:
        self.settle, self.on_used = round.settle, round.on_used


def test_ranks_that_have_no_room_for_early_updates_slow_nobody_down_and_get_fewer() -> None:
    model = _layers()
    optimizer = _wrapped(model)
    policy = optimizer._engine.policy
    run = Run(model, optimizer, dear.rank(), dear.size())
    plain = _layers()
    alone = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    whole = Run(plain, alone, None, dear.size())
    counts = []
    for step in range(9):
        if dear.rank() == dear.size() - 1:  # the others go ahead, this one makes up for it in step()
            policy._round = _Busy(optimizer._engine.round) if step < 5 else optimizer._engine.round
        for who, what in ((run, optimizer), (whole, alone)):
            what.zero_grad()
            who.loss(step).backward()
            what.step()
        counts.append(len(policy._chosen))
    assert counts[0] == 3  # all that step() does not have to reduce itself
    assert counts[4] == 0
    assert counts[-1] > 0
    assert counts == dear.allgather_object(counts)[0]
    assert_close(model.state_dict(), plain.state_dict(), "model")
