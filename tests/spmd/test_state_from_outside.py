"""Scripts, and methods of the optimizer's class, that read and write the state of parameters: as in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import dear
from overlap.features.early import UpdatedEarly
from tests.spmd.one_process import SGD, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import WRAP

pytestmark = pytest.mark.four_ranks

SHARDED = ("dear-layerwise", "dear-whole", "dear-eager", "oss")


def _asgd(params: Any, lr: float, momentum: float) -> Any:
    del momentum
    return torch.optim.ASGD(params, lr, t0=0, lambd=0.0)


def _adam(params: Any, lr: float, momentum: float) -> Any:
    del momentum
    return torch.optim.Adam(params, lr)


@pytest.mark.parametrize("way", WRAP)
def test_an_average_that_the_optimizer_keeps_is_evaluated(way: str) -> None:
    """ASGD's `ax`, put into the model by a script, and the number of steps beside it."""
    seen: list[Any] = []

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        found: list[torch.Tensor] = []
        for step in range(4):
            train(model, optimizer, alone, steps=1, first=step)
            for param in model.parameters():
                state = optimizer.state[param]
                assert state["ax"].shape == param.shape
                assert float(state["step"]) == step + 1
                found.append(state["ax"].clone())
        seen.append(found)

    as_in_one_process(way, script, _asgd)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WRAP)
def test_rows_of_moments_are_reset(way: str) -> None:
    """In place, as a new tensor, and by removing what there is."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(5):
            train(model, optimizer, alone, steps=1, first=step)
            with torch.no_grad():
                state = optimizer.state[model[0].weight]
                if step == 1:
                    state["exp_avg"][2:5] = 0
                    optimizer.state[model[0].weight]["exp_avg_sq"][2:5] = 0
                elif step == 2:
                    state["exp_avg"] = torch.full_like(model[0].weight, 0.25)
                elif step == 3:
                    optimizer.state[model[2].weight].clear()
                    for key, value in list(optimizer.state[model[2].bias].items()):
                        optimizer.state[model[2].bias][key] = value * 2

    as_in_one_process(way, script, _adam)


@pytest.mark.parametrize("way", [*SHARDED, "dear-rb"])
def test_what_was_written_is_moved_along_by_a_new_plan(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        with torch.no_grad():
            for param in model.parameters():
                optimizer.state[param]["exp_avg"].mul_(2)
        if not alone:
            optimizer.replan(optimizer.strategy)
        train(model, optimizer, alone, first=2)

    as_in_one_process(way, script, _adam)


class ScheduleFree(SGD):
    """SGD whose parameters are moved to an average, which is in its state, for evaluation, and back for training."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "z" not in state:
                        state["z"] = param.clone()
                    state["z"].sub_(param.grad, alpha=group["lr"])
                    param.lerp_(state["z"], 0.5)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], -0.5)

    @torch.no_grad()
    def swap(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                kept = param.clone()
                param.copy_(state.get("kept", param))
                state["kept"] = kept


@pytest.mark.parametrize("by_inner", [False, True])
@pytest.mark.parametrize(
    "way", [way for way in WRAP if not way.startswith(("fsdp", "osdp", "dear-host"))]
)  # methods write to parameters
def test_methods_of_the_class_find_whole_state(way: str, by_inner: bool) -> None:
    """Called on the wrapper or on the optimizer itself."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            train(model, optimizer, alone, steps=1, first=step)
            if by_inner and not alone:
                optimizer.synchronize()
            called = optimizer._inner if by_inner and not alone else optimizer
            (called.eval if step % 2 else called.swap)()
            model(torch.ones(1, 6, dtype=torch.float64))

    as_in_one_process(way, script, ScheduleFree, elementwise=True)


@pytest.mark.parametrize("way", SHARDED)
def test_one_rank_alone_may_read(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](_adam(model.parameters(), 0.1, 0.9), model)
    for step in range(3):
        train(model, optimizer, False, steps=1, first=step)
        if dear.rank() == 0:
            saved = optimizer.state_dict()["state"]
            for number, param in enumerate(model.parameters()):
                assert torch.equal(optimizer.state[param]["exp_avg"], saved[number]["exp_avg"])
    dear.barrier()


@pytest.mark.parametrize("way", SHARDED)
def test_all_of_it_is_what_a_state_dict_has(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](_adam(model.parameters(), 0.1, 0.9), model)
    assert not optimizer.state
    train(model, optimizer, False)
    saved = optimizer.state_dict()["state"]
    numbers = {id(param): number for number, param in enumerate(model.parameters())}
    for found in (
        dict(optimizer.state),
        optimizer.state.copy(),
        pickle.loads(pickle.dumps({numbers[id(p)]: state for p, state in optimizer.state.items()})),
    ):
        assert len(found) == len(saved)
        for key, state in found.items():
            number = key if isinstance(key, int) else numbers[id(key)]
            torch.testing.assert_close(dict(state), dict(saved[number]), rtol=0, atol=0)
    assert {id(param) for param in copy.copy(optimizer.state)} == set(numbers)
    dear.barrier()


@pytest.mark.parametrize("way", SHARDED)
def test_a_row_that_a_script_keeps_is_as_it_is_now(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](_adam(model.parameters(), 0.1, 0.9), model)
    train(model, optimizer, False)
    kept = optimizer.state[model[0].weight]
    for step in range(2, 5):
        train(model, optimizer, False, steps=1, first=step)
        assert float(kept["step"]) == step + 1
        assert kept is optimizer.state[model[0].weight]
        with torch.no_grad():
            kept["exp_avg"].zero_()
        saved = optimizer.state_dict()["state"][0]
        assert not saved["exp_avg"].any()
        assert torch.equal(saved["exp_avg_sq"], kept["exp_avg_sq"])
    dear.barrier()


@pytest.mark.parametrize("way", SHARDED)
def test_each_rank_holds_its_part(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1, momentum=0.9), model)
    train(model, optimizer, False)
    sharded = {id(slot.param) for bucket in optimizer.buckets for slot in bucket.slots if bucket.sharded}
    held = optimizer.held_state.items()
    mine = sum(state["momentum_buffer"].numel() for param, state in held if id(param) in sharded)
    total = sum(param.numel() for param in model.parameters() if id(param) in sharded)
    assert sum(dear.allgather_object(mine)) == total


def test_what_early_updates_may_have_changed_already_is_refused() -> None:
    model = small_model()
    optimizer = WRAP["dear-eager"](_adam(model.parameters(), 0.1, 0.9), model)
    train(model, optimizer, False)
    loss_of(model, 2, False).backward()
    sharded = next(slot for bucket in optimizer.buckets for slot in bucket.slots if bucket.sharded)
    with pytest.raises(UpdatedEarly, match=r"optimizer\.state between backward and step\(\) cannot be had"):
        optimizer.state[sharded.param]["exp_avg"].zero_()
    optimizer.step()


@pytest.mark.parametrize("way", SHARDED)
def test_an_optimizer_that_is_let_go_has_a_state_of_its_own(way: str) -> None:
    model = small_model()
    inner = SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = WRAP[way](inner, model)
    train(model, optimizer, False)
    again = dear.DistributedOptimizer(inner, model, strategy="wfbp")
    train(model, again, False)
    assert inner.state[model[0].weight]["momentum_buffer"].shape == model[0].weight.shape
    del optimizer
