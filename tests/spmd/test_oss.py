"""Whole parameters, each owned by one rank: who owns what, and the optimizers for which it has to be so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import dear
import oss
from overlap.plan.assignment import assign_owners
from overlap.plan.partition import lane_of
from overlap.plan.plan import Updates
from tests.spmd.listening import heard
from tests.spmd.loops import LOOPS, MakeOptimizer, Run
from tests.spmd.models import WIDTH, double_model, single_model
from tests.spmd.rounded_training import BF16, Reference, train_step
from tests.spmd.strategies import OPTIMIZERS, WRAP
from tests.spmd.training import assert_close, halves, loop_alone, train_in_loop

pytestmark = pytest.mark.four_ranks


def _trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 2, **options: Any) -> Any:
    distributed = oss.DistributedOptimizer(optimizer, model, threshold_mb=0.001, **options)
    run = Run(model, distributed, dear.rank(), dear.size())
    for step in range(steps):
        distributed.zero_grad()
        run.loss(step).backward()
        distributed.step()
    return distributed


def _owned(optimizer: Any, model: nn.Module) -> dict[str, int]:
    """The rank that holds the state of each parameter; fails where several do, or where it is not whole."""
    mine = []
    for name, parameter in model.named_parameters():
        state = optimizer.held_state.get(parameter)
        if state:
            assert state["momentum_buffer"].shape == parameter.shape
            mine.append(name)
    found = [(name, rank) for rank, names in enumerate(dear.allgather_object(mine)) for name in names]
    assert len(dict(found)) == len(found)
    return dict(found)


def _expected(names: list[str], model: nn.Module) -> dict[str, int]:
    sizes = [dict(model.named_parameters())[name].numel() for name in names]
    return dict(zip(names, assign_owners(sizes, (0,) * dear.size()), strict=True))


def test_parameters_stay_whole_and_go_to_the_rank_that_owns_least() -> None:
    model = double_model("Mlp")
    names = [name for name, _ in model.named_parameters()]
    groups = [names[1::2], names[0::2]]  # the order of the groups counts, not that of the model
    parameters = dict(model.named_parameters())
    inner = torch.optim.SGD([{"params": [parameters[name] for name in group]} for group in groups], 0.05, momentum=0.9)
    optimizer = _trained(inner, model)
    assert _owned(optimizer, model) == _expected([*groups[0], *groups[1]], model)
    for bucket in optimizer.buckets:
        edges = [sum(bucket.shares[:rank]) for rank in range(dear.size())]
        for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
            assert not any(offset < edge < offset + slot.param.numel() for edge in edges)
    lanes = {lane_of(bucket.shares, len(optimizer._engine.round._reductions)) for bucket in optimizer.buckets}
    assert len(lanes) == min(dear.size(), 2)  # both directions are used at once


def test_who_owns_a_parameter_goes_on_owning_it() -> None:
    """Others are unfrozen, added, and put into other buckets meanwhile; they go where least is owned then."""
    model = double_model("Mlp")
    first = model.inner[0]
    first.requires_grad_(False)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = _trained(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    assert _owned(optimizer, model) == _expected(names, model)
    first.requires_grad_(True)
    late = [name for name, _ in model.named_parameters() if name not in names]
    run = Run(model, optimizer, dear.rank(), dear.size())
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))]})
            late.append("offset")
            model.register_parameter("offset", optimizer.param_groups[1]["params"][0])
        if step == 2:
            optimizer.replan(optimizer.strategy.at({"threshold_mb": 25}))
        optimizer.zero_grad()
        run.loss(step).backward()
        if step > 0:
            model.offset.grad = torch.ones_like(model.offset)
        optimizer.step()
    assert _owned(optimizer, model) == _expected([*names, *late], model)
    assert len(optimizer.buckets) < len(names)


def test_a_parameter_that_can_be_owned_only_later_is_owned_from_the_next_plan_on() -> None:
    """One with gaps between its elements is updated by every rank, until it is laid out anew."""

    def train(distributed: bool) -> Any:
        model = double_model("OddParameters")
        optimizer: Any = OPTIMIZERS["adam"](list(model.parameters()))
        if distributed:
            optimizer = WRAP["oss"](optimizer, model)
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(4):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
            if step == 1:
                model.gappy.data = model.gappy.data.clone(memory_format=torch.contiguous_format)
                if distributed:
                    holders.append(bool(optimizer.held_state.get(model.gappy)))
                    optimizer.replan(optimizer.strategy)
        if distributed:
            holders.append(bool(optimizer.held_state.get(model.gappy)))
        return model.state_dict(), optimizer.state_dict()

    holders: list[bool] = []
    actual, expected = train(True), train(False)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close(mine, theirs, "laid out anew")
    before, after = zip(*dear.allgather_object(holders), strict=True)
    assert all(before)
    assert sum(after) == 1


@pytest.mark.parametrize(
    "loop",
    ["clipped", "accumulated_without_sync", "skipped_steps", "unfrozen_later", "scaled", "replanned", "state_reloaded"],
)
def test_an_optimizer_that_needs_whole_parameters_is_sharded(loop: str) -> None:
    """Adafactor keeps a row and a column of statistics; all its state is compared with one process's."""
    model = "Sometimes" if loop in ("skipped_steps", "scaled") else "Mlp"
    expected, actual = (
        train(model, "adafactor", loop, *rest) for train, rest in ((loop_alone, ()), (train_in_loop, ("oss",)))
    )
    for mine, theirs, where in zip(actual, expected, ("model", "optimizer", "seen"), strict=True):
        assert_close(mine, theirs, where)


# Muon is for matrices; the others of the model's parameters are not trained by it.
NEED_WHOLE: dict[str, MakeOptimizer] = {"adafactor": OPTIMIZERS["adafactor"]}
if hasattr(torch.optim, "Muon"):
    NEED_WHOLE["muon"] = lambda p: torch.optim.Muon([parameter for parameter in p if parameter.dim() == 2], 0.01)


@pytest.mark.parametrize("kind", NEED_WHOLE)
def test_what_needs_whole_parameters_is_bit_identical_to_the_averaged_parts(kind: str) -> None:
    """As one process that averages the parts' gradients; what rounds to bfloat16 inside, as Muon does, shows every bit."""
    if dear.size() > 2:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    alone, together = single_model(), single_model()
    plain: Any = NEED_WHOLE[kind](list(alone.parameters()))
    wrapped: Any = WRAP["oss"](NEED_WHOLE[kind](list(together.parameters())), together)
    for step in range(10):
        parts = []
        for rank in range(dear.size()):
            alone.zero_grad()
            x, y = halves(step, rank)
            torch.nn.functional.mse_loss(alone(x), y).backward()
            parts.append([parameter.grad for parameter in alone.parameters()])
        for parameter, *mine in zip(alone.parameters(), *parts, strict=True):
            parameter.grad = sum(mine[1:], mine[0]) / dear.size()
        plain.step()
        together.zero_grad()
        x, y = halves(step, dear.rank())
        torch.nn.functional.mse_loss(together(x), y).backward()
        wrapped.step()
    assert wrapped._engine.shards is not None
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("kind", NEED_WHOLE)
def test_auto_takes_oss_for_what_needs_whole_parameters(kind: str) -> None:
    model = single_model()

    def chosen() -> str:
        optimizer = NEED_WHOLE[kind](list(model.parameters()))
        return dear.DistributedOptimizer(optimizer, model, strategy="auto").strategy.name

    class AnotherLibrarys(type(NEED_WHOLE[kind](list(model.parameters())))):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert chosen() == "oss"
    unknown = AnotherLibrarys([parameter for parameter in model.parameters() if parameter.dim() == 2])
    assert dear.DistributedOptimizer(unknown, model, strategy="auto").strategy.name == "dear"
    assert dear.DistributedOptimizer(unknown, model, strategy="auto", per_parameter=True).strategy.name == "oss"


def test_exact_parameters_beside_rounded_ones_are_whole_too() -> None:
    reference = Reference("adafactor", BF16)
    model = single_model()
    options = {"gather_dtype": BF16, "compression": oss.Compression.bf16}
    optimizer: Any = WRAP["oss"](OPTIMIZERS["adafactor"](list(model.parameters())), model, **options)
    for number in range(3):
        reference.step(number)
        train_step(model, optimizer, number)
        reference.check(model, optimizer)
    saved = dear.broadcast_object((model.state_dict(), optimizer.state_dict()))
    model = single_model(8)
    optimizer = WRAP["oss"](OPTIMIZERS["adafactor"](list(model.parameters())), model, **options)
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    optimizer.replan(optimizer.strategy.at({"threshold_mb": 1}))
    for number in range(3, 5):
        reference.step(number)
        train_step(model, optimizer, number)
        reference.check(model, optimizer)


def test_lbfgs_is_stepped_in_full_on_every_rank() -> None:
    def train(distributed: bool) -> Any:
        model = double_model("Mlp")
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if distributed:
            optimizer = WRAP["oss"](optimizer, model)
            assert optimizer._engine.shards is None
        LOOPS["closure"](Run(model, optimizer, dear.rank() if distributed else None, dear.size()))
        return model.state_dict()

    expected, actual = train(False), train(True)
    for name, value in expected.items():  # line searches amplify rounding
        torch.testing.assert_close(actual[name], value, rtol=1e-7, atol=1e-9)


class _Unknown(torch.optim.SGD):
    """Might look at all parameters at once, for all we know."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("promise", "owned"), [({}, False), ({"per_parameter": True}, True), ({"elementwise": True}, True)]
)
def test_an_unknown_optimizer_needs_a_promise(promise: dict[str, Any], owned: bool) -> None:
    model = double_model("Mlp")
    with heard(logging.WARNING) as said:
        optimizer = _trained(_Unknown(model.parameters(), 0.05, momentum=0.9), model, **promise)
    told = any("_Unknown is not known to update each parameter from its own gradient" in text for text in said)
    assert told is (dear.rank() == 0 and not owned)
    mine = sum(bool(state) for state in optimizer.held_state.values())
    total = len(list(model.parameters()))
    assert sum(dear.allgather_object(mine)) == (total if owned else total * dear.size())


def test_a_checkpoint_of_another_strategy_is_taken_up() -> None:
    """Both save what one process saves; so does a job of another size."""

    def train(first: str | None, second: str | None) -> Any:
        model, saved = double_model("Mlp"), None
        for strategy in (first, second):
            optimizer: Any = OPTIMIZERS["adamw"](list(model.parameters()))
            if strategy:
                optimizer = WRAP[strategy](optimizer, model)
            if saved is not None:
                optimizer.load_state_dict(saved)
            LOOPS["plain"](Run(model, optimizer, dear.rank() if strategy else None, dear.size()))
            saved = optimizer.state_dict()
        return model.state_dict(), saved

    expected = train(None, None)
    for way in (("dear", "oss"), ("oss", "wfbp")):
        for mine, theirs in zip(train(*way), expected, strict=True):
            assert_close(mine, theirs, str(way))


def test_by_name_and_with_what_it_refuses() -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model, strategy="oss", threshold_mb=3, per_parameter=True)
    assert optimizer.strategy.setting == {"threshold_mb": 3}
    assert "[oss," in repr(optimizer)
    assert optimizer.strategy.updates is Updates.OWNED
    with pytest.raises(TypeError, match="broadcast_fp16=True is fairscale's; gather_dtype"):
        oss.DistributedOptimizer(inner, model, broadcast_fp16=True)
    with pytest.raises(ValueError, match="threshold_mb should be at least 0 and is -1"):
        oss.DistributedOptimizer(inner, model, threshold_mb=-1)
    with pytest.raises(ValueError, match=r"per_parameter=True is about strategies .* strategy 'dear' does not"):
        dear.DistributedOptimizer(inner, model, per_parameter=True)
    with pytest.raises(ValueError, match=r"gather_dtype.* LBFGS is not known .*per_parameter=True with oss"):
        oss.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, gather_dtype=BF16)
