"""The optimizer's state, wherever its shards lie: full for whoever asks, at any moment."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.transport.peer_queries import NoAnswer
from tests.spmd.models import double_model
from tests.spmd.strategies import PACKAGES
from tests.spmd.training import local_loss, same_everywhere, trained


def _momenta(optimizer: Any) -> list[torch.Tensor]:
    return [entry["momentum_buffer"].clone() for _, entry in sorted(optimizer.state_dict()["state"].items())]


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "oss", "wfbp"])
def test_rank_0_alone_may_save_in_the_middle_of_training(strategy: str) -> None:
    model, optimizer = trained(strategy)
    states = []
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, 10 + step).backward()
        if dear.rank() == 0:
            states.append(optimizer.state_dict())  # between backward and step: still the last step's
        optimizer.step()
        if dear.rank() == 0:
            states.append(optimizer.state_dict())
    everywhere = optimizer.state_dict()
    if dear.rank() == 0:
        assert len(states[0]["state"]) == len(list(model.parameters()))
        for before, after in zip(states[1:-1:2], states[2::2], strict=True):
            for index in before["state"]:
                one, other = before["state"][index]["momentum_buffer"], after["state"][index]["momentum_buffer"]
                assert torch.equal(one, other)
        last = states[-1]["state"][0]["momentum_buffer"]
        assert torch.equal(last, everywhere["state"][0]["momentum_buffer"])


def _clip(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.05)


def _synchronize(optimizer: Any) -> None:
    optimizer.synchronize()


@pytest.mark.parametrize("settle", [_clip, _synchronize])
@pytest.mark.parametrize("strategy", ["dear", "dear-rb", *PACKAGES])
def test_rank_0_alone_may_save_once_all_gradients_are_reduced(strategy: str, settle: Callable[[Any], None]) -> None:
    """No rank then waits for a reduction in its step, and yet none is ahead of rank 0, which takes its time."""
    model, optimizer = trained(strategy)
    before = _momenta(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        local_loss(model, 10 + step).backward()
        settle(optimizer)
        if dear.rank() == 0:
            time.sleep(0.02)
            assert all(map(torch.equal, _momenta(optimizer), before))
        optimizer.step()
        if dear.rank() == 0:
            after = _momenta(optimizer)
            assert not any(map(torch.equal, after, before))
            before = after


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "oss"])
def test_who_saves_right_after_its_step_waits_for_that_step_of_the_others(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(strategy)
    round = optimizer._engine.round
    settle_done = round.settle_done

    def settle_late() -> None:
        """All is issued, so rank 0 goes on; nothing is updated here yet."""
        if dear.rank() > 0:
            time.sleep(0.02)
        settle_done()

    monkeypatch.setattr(round, "settle_done", settle_late)
    optimizer.zero_grad()
    local_loss(model, 10).backward()
    optimizer.step()
    for momentum in _momenta(optimizer):
        same_everywhere(momentum)


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "oss"])
def test_rank_0_alone_may_save_around_the_loading_of_a_state(strategy: str) -> None:
    """Ranks load one after the other: whoever asks meanwhile gets all of the old state or all of the new one."""
    _, optimizer = trained(strategy)
    before = _momenta(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["momentum_buffer"] += 1.0
    dear.barrier()
    if dear.rank() > 0:
        optimizer.load_state_dict(saved)
    dear.barrier()
    if dear.rank() == 0:
        assert all(map(torch.equal, _momenta(optimizer), before)), "the others have loaded"
    dear.barrier()
    if dear.rank() == 0:
        optimizer.load_state_dict(saved)
    after = _momenta(optimizer)
    assert all(torch.equal(mine, old + 1.0) for mine, old in zip(after, before, strict=True))

    for entry in saved["state"].values():  # as Horovod's script resumes: on rank 0 alone, then from there
        entry["momentum_buffer"] += 1.0
    if dear.rank() == 0:
        optimizer.load_state_dict(saved)
        assert all(torch.equal(mine, old + 1.0) for mine, old in zip(_momenta(optimizer), after, strict=True))
    dear.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(mine, old + 1.0) for mine, old in zip(_momenta(optimizer), after, strict=True))


@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "oss"])
def test_a_state_dict_may_be_changed_after_it_was_loaded_and_after_it_was_given_out(strategy: str) -> None:
    _, optimizer = trained(strategy)
    before = _momenta(optimizer)
    saved = optimizer.state_dict()
    dear.barrier()
    optimizer.load_state_dict(saved)
    for one in (saved, optimizer.state_dict()):
        for entry in one["state"].values():
            entry["momentum_buffer"].zero_()
        assert all(map(torch.equal, _momenta(optimizer), before))


class _Remembers(torch.optim.SGD):
    """Keeps what cannot be pickled in its state, as some optimizers keep hooks."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("hook", lambda gradient: gradient)
        return result


def test_who_asks_for_state_that_cannot_be_pickled_is_told_at_once() -> None:
    model = double_model("Mlp")
    optimizer = dear.DistributedOptimizer(_Remembers(model.parameters(), 0.05), model, elementwise=True)
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()
        if dear.rank() == 0 and dear.size() > 1 and step > 0:  # twice: the others go on answering
            with pytest.raises(NoAnswer, match=r"rank 1 could not answer 'state/\d+': .*<lambda>"):
                optimizer.state_dict()
    same_everywhere(next(model.parameters()).detach().clone())


def test_state_is_sharded_and_loads_into_a_plain_optimizer() -> None:
    model, optimizer = trained()
    held = sum(value.numel() for state in optimizer.held_state.values() for value in state.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert held <= total / dear.size() + 64 * len(list(model.parameters()))
    plain_model = copy.deepcopy(model)
    plain = torch.optim.SGD(plain_model.parameters(), 0.05, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    for parameter, twin in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert plain.state[twin]["momentum_buffer"].shape == parameter.shape


def test_optimizer_state_follows_the_root_and_takes_no_step() -> None:
    model = double_model("Mlp")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1 if dear.rank() == 0 else 0.7, weight_decay=0.5)
    if dear.rank() == 0:
        local_loss(model).backward()
        optimizer.step()
    dear.broadcast_parameters(model.state_dict(), root_rank=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    dear.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        same_everywhere(optimizer.state[parameter]["exp_avg"])
