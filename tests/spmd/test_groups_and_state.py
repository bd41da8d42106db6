"""Scripts that look at groups and state of a distributed optimizer, and edit them: as in one process, or an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from tests.spmd.one_process import SGD, WAYS, as_in_one_process, loss_of, small_model, train
from tests.spmd.strategies import PACKAGES, WRAP

pytestmark = pytest.mark.four_ranks


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_groups_are_final_when_they_are_looked_up(way: str) -> None:
    """Weights are clamped after every step, through the optimizer, by an iterator and by an index."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(4):
            train(model, optimizer, alone, steps=1, first=step)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.clamp_(-0.2, 0.2)
                    group["params"][0].mul_(0.5)

    model = as_in_one_process(way, script)
    assert max(float(param.detach().abs().max()) for param in model.parameters()) <= 0.2


def test_groups_are_plain_lists_again_for_who_copies_or_wraps_anew() -> None:
    model = small_model()
    inner = SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model)
    train(model, optimizer, False)
    copied = optimizer.param_groups[0]["params"].__reduce_ex__(4)
    assert copied[0] is list
    optimizer = dear.DistributedOptimizer(inner, model, strategy="wfbp")
    assert type(inner.param_groups[0]["params"]) is list
    train(model, optimizer, False)


@pytest.mark.parametrize("way", PACKAGES)
def test_a_parameter_goes_by_the_group_it_was_moved_to(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        param = optimizer.param_groups[0]["params"].pop(0)
        optimizer.add_param_group({"params": [param], "lr": 0.0})
        train(model, optimizer, alone, first=2)

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", PACKAGES)
def test_groups_may_be_replaced_by_others(way: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        params = list(optimizer.param_groups[0]["params"])
        rest = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        optimizer.param_groups = [{**rest, "params": params[:1], "lr": 0.01}, {**rest, "params": params[1:]}]
        train(model, optimizer, alone, first=2)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]

    as_in_one_process(way, script)


class _Hidden(torch.nn.Module):
    """Has a parameter that it hands out to nobody: in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.linear = torch.nn.Linear(6, 3, dtype=torch.float64)
        self.hidden = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.hidden[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("since", [0, 2])
def test_a_parameter_that_no_module_hands_out_is_final_in_the_next_forward(since: int, way: str) -> None:
    """Whether it is there from the beginning or comes later."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for step in range(5):
            if step == since:
                optimizer.add_param_group({"params": model.hidden})
            optimizer.zero_grad()
            loss_of(model, step, alone).backward()
            optimizer.step()

    as_in_one_process(way, script, build=_Hidden)


@pytest.mark.parametrize("way", PACKAGES)
def test_parameters_behind_the_wrapper_are_refused(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False, steps=3)
    model[2].bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer.param_groups[0]["params"][3] = model[2].bias
    loss_of(model, 3, False).backward()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\) was put into param_groups"):
        optimizer.step()


@pytest.mark.parametrize("way", ["dear-layerwise", "oss", "bytescheduler"])
def test_a_parameter_that_was_taken_out_is_named(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1), model)
    train(model, optimizer, False)
    del optimizer.param_groups[0]["params"][1]
    loss_of(model, 3, False).backward()
    with pytest.raises(
        RuntimeError, match=r"parameter '0.bias' was taken out of param_groups: use requires_grad_\(False\)"
    ):
        optimizer.step()


STATE_EDITS: dict[str, Callable[[Any, torch.nn.Module], Any]] = {
    "cleared": lambda optimizer, _: optimizer.state.clear(),
    "another one": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "popped": lambda optimizer, model: optimizer.state.pop(model[0].weight, None),
    "replaced": lambda optimizer, model: [optimizer.state.__setitem__(p, {}) for p in model.parameters()],
    "updated": lambda optimizer, model: optimizer.state.update({p: {} for p in model.parameters()}),
}


@pytest.mark.parametrize("edit", STATE_EDITS)
@pytest.mark.parametrize("way", ["dear-layerwise", "bytescheduler", "oss"])
def test_state_may_be_dropped_while_training(way: str, edit: str) -> None:
    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        train(model, optimizer, alone)
        STATE_EDITS[edit](optimizer, model)
        train(model, optimizer, alone, first=2)

    as_in_one_process(way, script)


@pytest.mark.parametrize("way", ["dear-layerwise", "bytescheduler", "oss"])
def test_state_that_is_not_there_is_empty(way: str) -> None:
    """As torch's: scripts look whether there is some, also for parameters whose state another rank has."""

    def script(model: torch.nn.Module, optimizer: Any, alone: bool) -> None:
        for param in model.parameters():
            assert len(optimizer.state[param]) == 0
        train(model, optimizer, alone)
        for param in model.parameters():
            optimizer.state[param].setdefault("seen", 1)
            assert optimizer.state.get(param, {}).get("seen", 1) == 1
        train(model, optimizer, alone, first=2)

    as_in_one_process(way, script)


def test_what_is_put_into_empty_state_stays() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1), model, threshold_mb=0)
    train(model, optimizer, False)
    for param in model.parameters():
        optimizer.state[param]["mine"] = 1
    assert all("mine" in optimizer.state.get(param, {}) for param in model.parameters())
    train(model, optimizer, False, steps=1, first=2)
    assert all("mine" in optimizer.state.get(param, {}) for param in model.parameters())


def test_state_of_a_sharded_optimizer_is_a_dictionary() -> None:
    model = small_model()
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.1, momentum=0.9), model, threshold_mb=0)
    train(model, optimizer, False)
    every = list(optimizer.state)
    assert {id(param) for param in every} == {id(param) for param in model.parameters()}
    assert isinstance(optimizer.state, dict)
    assert optimizer.state.setdefault(every[0]) == optimizer.state[every[0]]
    param, state = optimizer.state.popitem()
    assert "momentum_buffer" in state
    assert param not in optimizer.state
    assert optimizer.state.pop(param, 3) == 3
    with pytest.raises(KeyError):
        del optimizer.state[param]
    assert len(optimizer.state) == len(every) - 1
    optimizer.state.setdefault(param, {"momentum_buffer": state["momentum_buffer"]})
    assert len(optimizer.state) == len(every)
    assert optimizer.state[param]["momentum_buffer"] is state["momentum_buffer"]
    dear.barrier()


@pytest.mark.parametrize("way", ["dear-layerwise", "oss"])
def test_state_that_was_changed_after_loading_is_saved_as_it_is(way: str) -> None:
    model = small_model()
    optimizer = WRAP[way](SGD(model.parameters(), 0.1, momentum=0.9), model)
    train(model, optimizer, False)
    saved = optimizer.state_dict()
    dear.barrier()
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].clone()  # as scripts do that move what they loaded
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)
    again = optimizer.state_dict()["state"]
    for number, state in saved["state"].items():
        assert torch.equal(again[number]["momentum_buffer"], state["momentum_buffer"] * 0.5)
    dear.barrier()
    train(model, optimizer, False, steps=1, first=2)
    assert len(optimizer.state_dict()["state"]) == 4
    dear.barrier()
