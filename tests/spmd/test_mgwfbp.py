"""MG-WFBP where it meets other ranks: measured things are rank 0's, and a backward order that changes changes no result."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dear
import mgwfbp
import oss
from overlap.job.session import current
from overlap.plan.link_probe import link_cost
from tests.spmd.listening import heard
from tests.spmd.loops import Run
from tests.spmd.models import MODELS, WIDTH, Pause, double_model
from tests.spmd.training import assert_close
from tests.spmd_plugin import SIZE


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _groups(optimizer: Any) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in optimizer.buckets]


def _train(model: nn.Module, optimizer: Any, rank: int | None, steps: int) -> None:
    run = Run(model, optimizer, rank, dear.size())
    for step in range(steps):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()


class Turning(nn.Module):
    """Its layers run, and their gradients arrive, in the opposite order from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers if self.calls < 3 else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("asc", [False, True])
def test_a_changed_backward_order_changes_no_result(asc: bool) -> None:
    def train(distributed: bool) -> Any:
        torch.manual_seed(11)
        model = Turning().double()
        optimizer: Any = _sgd(model)
        if distributed:
            times = {name: 5e-3 if name.endswith("bias") else 0.0 for name, _ in model.named_parameters()}
            alpha = 20e-3 if asc else 1e-3
            optimizer = mgwfbp.DistributedOptimizer(
                optimizer, model, asc=asc, layerwise_times=times, alpha_beta=(alpha, 0)
            )
        _train(model, optimizer, dear.rank() if distributed else None, 6)
        if distributed:
            assert 1 < len(optimizer.buckets) < 8
        return model.state_dict()

    assert_close(train(True), train(False), "model")


def test_what_was_measured_on_rank_0_decides_on_every_rank() -> None:
    model = double_model("Mlp")
    names = [name for name, _ in model.named_parameters()]
    mine = {name: 0.0 if dear.rank() else 1.0 for name in names}  # rank 0: nothing is worth waiting for
    with heard(logging.INFO) as said:
        optimizer = mgwfbp.DistributedOptimizer(_sgd(model), model, layerwise_times=mine, alpha_beta=(1e-3, 1e-9))
        _train(model, optimizer, dear.rank(), 2)
        optimizer.preview(optimizer.strategy)  # the same plan, which was told
    assert len(optimizer.buckets) == len(names)
    tables = [text for text in said if text.startswith("mgwfbp: 8 tensors in 8")]
    assert len(tables) == (dear.rank() == 0)


def test_everything_is_merged_where_starts_are_dear() -> None:
    model = double_model("Mlp")
    optimizer = mgwfbp.DistributedOptimizer(_sgd(model), model, alpha_beta=(100.0, 0.0))
    _train(model, optimizer, dear.rank(), 2)
    assert len(optimizer.buckets) == 1


def test_cost_is_measured_and_the_plan_is_the_same_everywhere() -> None:
    model = MODELS["Unused"]().double()
    optimizer = dear.DistributedOptimizer(_sgd(model), model, strategy="mgwfbp")
    _train(model, optimizer, dear.rank(), 2)
    there = optimizer._engine.round.comm  # what moves gradients: a device's, too
    cost = link_cost(current().comm if there.streams is None else there)
    assert optimizer.strategy.cost == cost
    assert cost.seconds(2**20) > 0
    everywhere = dear.allgather_object((cost, _groups(optimizer)))
    assert all(other == everywhere[0] for other in everywhere)
    idle = {"inner.0.spare", "never.weight", "never.bias"}  # they keep nobody waiting
    assert all(idle.issuperset(group) or idle.isdisjoint(group) for group in _groups(optimizer))
    assert idle.issuperset(_groups(optimizer)[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"merge_below_kb": -1}, "merge_below_kb should be at least 0 and is -1"),
        ({"asc": True, "merge_below_kb": 4}, "merge_below_kb is 4, but asc=True merges only where that delays nothing"),
        ({"asc": True, "tune": True}, "strategy 'mgwfbp' as it was chosen has nothing to tune"),
        ({"profile_steps": -1}, "profile_steps should be at least 0 and is -1"),
        ({"alpha_beta": (-1.0, 0.0)}, r"alpha should be at least 0 and finite and is -1\.0"),
        ({"layerwise_times": {"head": 1.0}}, r"names 'head' .* are named 'inner\.0\.weight'"),
        ({"layerwise_times": {"head.bias": -2.0}}, r"at least 0 and finite; .*'head\.bias', -2\.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    model = double_model("Mlp")
    with pytest.raises(ValueError, match=message):
        mgwfbp.DistributedOptimizer(_sgd(model), model, **{"alpha_beta": (0.0, 0.0), **arguments})


class Changing(nn.Module):
    """Backward pauses behind the first layer in the first iteration, and behind the third one later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == (0 if self.calls == 1 else 2):
                for _ in range(3):  # 60 ms, so that what a busy machine does to a thread is no pause
                    x = Pause.apply(x)
        return x


def test_times_are_measured_while_training_and_hooks_are_gone_afterwards() -> None:
    model = Changing().double()
    optimizer = mgwfbp.DistributedOptimizer(_sgd(model), model, alpha_beta=(40e-3, 0.0), profile_steps=2)
    layers = []
    with heard(logging.INFO) as said:
        for _ in range(4):
            _train(model, optimizer, dear.rank(), 1)
            layers.append([len({name.split(".")[1] for name in group}) for group in _groups(optimizer)])
            hooks = {len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()}
            assert hooks == ({2} if len(layers) < 4 else {1})
            assert optimizer.tuning == (len(layers) < 4)
    assert layers == [[3, 1]] * 3 + [[1, 3]]  # a pause longer than a start separates
    tables = [text for text in said if "8 tensors in 2 buckets" in text]
    assert len(tables) == (dear.rank() == 0)


@pytest.mark.skipif(SIZE == 1, reason="one rank has no other")
def test_times_of_another_rank_decide_where_the_first_one_has_joined() -> None:
    model = Changing().double()
    optimizer = mgwfbp.DistributedOptimizer(_sgd(model), model, alpha_beta=(40e-3, 0.0), profile_steps=2)
    _train(model, optimizer, dear.rank(), 4 if dear.rank() else 1)
    dear.join()
    assert len(_groups(optimizer)) > 1  # without times, all would be merged


class Slow(nn.Module):
    """20 ms of backward behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x))
        return x


@pytest.mark.skipif(SIZE == 1, reason="one rank has no other set")
def test_process_sets_that_train_apart_are_measured_and_tuned_by_themselves() -> None:
    """Each goes by its own model's times, and waits for nobody else's steps."""
    sets = [dear.add_process_set([0]), dear.add_process_set(range(1, dear.size()))]
    mine = sets[dear.rank() > 0]
    model = (Slow() if dear.rank() else double_model("Mlp")).double()
    given = {name: 0.02 for name, _ in model.named_parameters()} if dear.rank() == 1 else None
    shared: dict[str, Any] = {"process_set": mine, "alpha_beta": (5e-3, 0.0), "profile_steps": 2}
    for layerwise_times in (None, given):
        optimizer = mgwfbp.DistributedOptimizer(_sgd(model), model, layerwise_times=layerwise_times, **shared)
        for _ in range(5 if dear.rank() else 3):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH, dtype=torch.float64)).tanh().mean().backward()
            optimizer.step()
        assert [len(group) for group in _groups(optimizer)] == [1, 1, 1] or dear.rank() == 0
    shared = {"process_set": mine, "threshold_mb": 1, "tune": mgwfbp.Tuning(trials=2, warmup=0, window=1, pairs=1)}
    tuned = oss.DistributedOptimizer(_sgd(model), model, **shared)
    for _ in range(8 if dear.rank() else 2):
        tuned.zero_grad()
        model(torch.ones(2, WIDTH, dtype=torch.float64)).tanh().mean().backward()
        tuned.step()
    tuned.synchronize()
    dear.barrier()
    for each in sets:
        dear.remove_process_set(each)
