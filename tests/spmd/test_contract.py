"""What every strategy promises beside parity: visibility, state, errors, and what travels when."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import dear
import wfbp
from overlap.core.bucket import Bucket
from overlap.core.round import GradientChanged, TooManyGradients
from overlap.job.session import current
from tests.spmd.models import MODELS, double_model
from tests.spmd.strategies import PACKAGES, SHARDED, STAND_INS, WRAP
from tests.spmd.training import local_loss, same_everywhere, trained, values_of


def test_dropped_optimizers_are_freed_and_leave_the_model_alone() -> None:
    """Of all strategies at once: collecting garbage takes its time."""

    def train(strategy: str) -> tuple[torch.nn.Module, list[weakref.ref[Any]]]:
        model, optimizer = trained(strategy)
        return model, [weakref.ref(optimizer), weakref.ref(optimizer._engine)]

    def look(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.ones(1, 9, dtype=torch.float64))

    gc.collect()
    kept = {strategy: train(strategy) for strategy in WRAP}
    number = len(current().channels)
    expected = {strategy: look(model) for strategy, (model, _) in kept.items()}
    gc.collect()
    wfbp.DistributedOptimizer(
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    )  # where ranks agree on what is dropped
    gc.collect()
    for strategy, (model, gone) in kept.items():
        assert not any(reference() for reference in gone), strategy
        assert not any(module._forward_pre_hooks for module in model.modules()), strategy
        assert torch.equal(look(model), expected[strategy]), strategy
    parameters = {name: [weakref.ref(p) for p in model.parameters()] for name, (model, _) in kept.items()}
    del kept, model
    for strategy in WRAP:
        train(strategy)
        gc.collect()  # on all ranks at once: a channel is free when each of them has dropped who used it
    assert len(current().channels) <= number, "they use the first ones' channels"
    gc.collect()
    assert [name for name, references in parameters.items() if any(r() is not None for r in references)] == []


@pytest.mark.parametrize("strategy", WRAP)
def test_who_is_wrapped_again_belongs_to_the_new_optimizer_alone(strategy: str) -> None:
    model, first = trained(strategy)
    # Early updates let nobody read parameters then, and a sharded model needs all ranks for a forward.
    if dear.rank() == 0 and strategy not in ("dear-eager", *SHARDED):
        local_loss(model).backward()  # the step of which never comes
    model.zero_grad()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05), model)
    one = double_model("Mlp")
    one.load_state_dict(model.state_dict())
    for step in range(2):
        optimizer.zero_grad()
        local_loss(model, step).backward()
        with pytest.raises(RuntimeError, match="made later"):
            first.step()
        optimizer.step()
        expected = torch.optim.SGD(one.parameters(), 0.05)
        expected.zero_grad()
        generators = [torch.Generator().manual_seed(100 * step + rank) for rank in range(dear.size())]
        batch = torch.cat([torch.randn(4, 9, generator=generator, dtype=torch.float64) for generator in generators])
        one(batch).square().mean().backward()
        expected.step()
    for mine, theirs in zip(values_of(model), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_whoever_looks_through_the_module_sees_final_values(strategy: str) -> None:
    looks = {
        "attribute": lambda m: m.head.weight,
        "parameters": lambda m: next(m.head.parameters()),
        "named": lambda m: dict(m.named_parameters())["head.weight"],
        "state_dict": lambda m: m.state_dict()["head.weight"],
        "submodule": lambda m: m.head.state_dict()["weight"],
        "deepcopy": lambda m: copy.deepcopy(m).head.weight,
        "dict": lambda m: dict(m.head._parameters)["weight"],
    }
    model, optimizer = trained(strategy)
    for number, (name, look) in enumerate(looks.items()):
        optimizer.zero_grad()
        local_loss(model, 10 + number).backward()
        optimizer.step()
        value = look(model).detach().clone()
        assert bool(torch.isfinite(value).all()), name
        same_everywhere(value)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_bare_tensors_are_final_after_synchronize(strategy: str) -> None:
    model = double_model("Mlp")
    held = list(model.parameters())
    optimizer = WRAP[strategy](torch.optim.Adam(held, 1e-2), model)
    local_loss(model).backward()
    optimizer.step()
    optimizer.synchronize()
    for tensor in held:
        same_everywhere(tensor.detach().clone())


@pytest.mark.parametrize("strategy", ["dear-layerwise", "oss", "bytescheduler"])
def test_gradients_are_dropped_through_the_model_without_a_wait(strategy: str) -> None:
    """As Hugging Face's Trainer does, right after step()."""
    model, optimizer = trained(strategy)
    transit = optimizer._engine.transit
    before = list(transit.pending)
    model.zero_grad()
    assert before
    assert list(transit.pending) == before
    assert all(param.grad is None for param in optimizer._parameter_names)
    list(model.parameters())
    assert not transit.pending


def test_a_copied_or_pickled_model_carries_no_gates() -> None:
    model, optimizer = trained()
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([type(module) for module in model.modules()]):
        loaded = torch.load(buffer, weights_only=True)  # which needs no other names than those of the plain model
    for other in (copied, loaded):
        assert type(other.head._parameters) in (dict, OrderedDict)
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
        assert not any(getattr(module, name) for module in other.modules() for name in hooks)
        local_loss(other).backward()  # its gradients are nobody's business
    optimizer.zero_grad()
    local_loss(model).backward()
    optimizer.step()


def test_the_first_step_keeps_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket has freed what backward left before the next one takes memory."""
    made: list[Bucket] = []

    class Watched(Bucket):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            assert all(slot.param.grad is slot.view for bucket in made for slot in bucket.slots)
            super().__init__(*arguments, **keywords)
            made.append(self)

    monkeypatch.setattr("overlap.core.buckets.planner.Bucket", Watched)
    trained("dear-layerwise", steps=1)
    assert len(made) > 1


def test_shell_looks_like_the_optimizer() -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = dear.DistributedOptimizer(inner, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert "SGD" in repr(optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    inner.register_step_post_hook(lambda *_: seen.append("post"))
    for _ in range(2):
        optimizer.zero_grad()
        local_loss(model).backward()
        optimizer.step()
    assert seen == ["pre", "post"] * 2
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("on_inner", [False, True])
@pytest.mark.parametrize("strategy", PACKAGES)
def test_schedulers_warn_of_nothing(strategy: str, on_inner: bool) -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = WRAP[strategy](inner, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.StepLR(inner if on_inner else optimizer, 1, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            local_loss(model).backward()
            optimizer.step()
            schedule.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.0125)


@pytest.mark.parametrize("strategy", [name for name in WRAP if name not in ("dear-eager", *STAND_INS)])
def test_a_changed_gradient_is_never_silently_ignored(strategy: str) -> None:
    model, optimizer = trained(strategy)
    other, others = trained(strategy)  # a second optimizer, which is not concerned
    others.zero_grad()
    local_loss(other).backward()
    optimizer.zero_grad()
    local_loss(model).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(1e-3)
    with pytest.raises(GradientChanged, match=r"synchronize\(\)"):
        optimizer.step()
    others.step()
    optimizer.zero_grad()
    local_loss(model).backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_second_backward_says_what_to_do(strategy: str) -> None:
    model, optimizer = trained(strategy)
    optimizer.zero_grad()
    local_loss(model).backward()
    with pytest.raises(TooManyGradients, match="backward_passes_per_step"):
        local_loss(model).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_clip_returns_the_global_norm_everywhere(strategy: str) -> None:
    """Also where a rank has no part of any gradient in it."""
    model, optimizer = trained(strategy)
    optimizer.zero_grad()
    local_loss(model).backward()
    dear.clip_grad_norm_(model.parameters(), 1e9)
    norm = dear.clip_grad_norm_([model.head.bias], 1e9)
    assert norm.dtype is torch.float64
    same_everywhere(norm)
    optimizer.step()
    strangers = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no distributed optimizer"):
        dear.clip_grad_norm_(strangers.parameters(), 1.0)


def test_values_used_outside_their_module_are_refused() -> None:
    model = double_model("Mlp")
    held = model.head.weight
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, threshold_mb=None, num_nearby_layers=1
    )
    local_loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="outside their modules"):
        held.square().sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()


def test_an_old_graph_notices_the_update() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    loss = local_loss(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"threshold_mb": -1}, "threshold_mb should be at least 0 and is -1"),
    ({"threshold_mb": None}, "both None"),
    ({"num_nearby_layers": 0}, "num_nearby_layers should be at least 1 and is 0"),
    ({"exclude_parts": "allreduce"}, "exclude_parts should name"),
    ({"backward_passes_per_step": 0}, "backward_passes_per_step should be at least 1 and is 0"),
    ({"strategy": "daer"}, r"strategy should be one of dear, auto, .* and is 'daer'; is 'dear' meant\?"),
    ({"policy": "magic"}, "policy should be one of .* and is 'magic'"),
    ({"policy": "rb", "exclude_parts": "allgather"}, "exclude_parts should name reduce or bcast and names .*allgather"),
    ({"strategy": "magic"}, "'magic'"),
    ({"strategy": "wfbp", "threshold_mb": 1}, "belong to 'dear'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    model = double_model("Mlp")
    with pytest.raises(ValueError, match=message):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **arguments)


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp", "osdp", "co2"])
def test_arguments_that_nobody_has_are_named_with_those_that_are_meant(strategy: str) -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="no argument 'sync_strat'; is 'sync_start' meant"):
        dear.DistributedOptimizer(inner, model, strategy=strategy, sync_strat=False)
    with pytest.raises(TypeError, match=r"no argument 'learning'; there are .*, compression, .*poison"):
        importlib.import_module(strategy).DistributedOptimizer(inner, model, learning=1)


def test_names_are_checked_as_horovod_does() -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    pairs = list(model.named_parameters())
    with pytest.raises(ValueError, match="appears twice"):
        dear.DistributedOptimizer(inner, [*pairs, pairs[0]])
    with pytest.raises(ValueError, match="has no name"):
        dear.DistributedOptimizer(inner, pairs[:-1])
    with pytest.raises(ValueError, match="pairs"):
        wfbp.DistributedOptimizer(inner, list(model.parameters()))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        dear.DistributedOptimizer(model, inner)


def test_ranks_with_different_models_are_told_apart() -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    width = 3 if dear.rank() == 0 else 4
    model = torch.nn.Linear(width, 2)
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*rank 0.*shape \(2, 4\).*rank 1"):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)


def test_excluded_parts_send_nothing() -> None:
    for policy, part in (("rsag", "reducescatter"), ("rsag", "allgather"), ("rb", "reduce"), ("rb", "bcast")):
        model = MODELS["Mlp"]()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = dear.DistributedOptimizer(inner, model, policy=policy, exclude_parts=part)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 9)).sum().backward()
            optimizer.step()
        assert part in optimizer.strategy.excluded


def test_learned_order_is_the_order_of_use() -> None:
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    model = Backwards().double()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model, threshold_mb=None, num_nearby_layers=1)
    local_loss(model).backward()
    optimizer.step()
    names = [[slot.name for slot in bucket.slots] for bucket in optimizer.buckets]
    assert names == [["last.weight", "last.bias"], ["first.weight", "first.bias"]]


def test_objects_travel() -> None:
    assert dear.broadcast_object({"rank": dear.rank()}, root_rank=dear.size() - 1) == {"rank": dear.size() - 1}
    assert dear.allgather_object("x" * dear.rank()) == ["x" * rank for rank in range(dear.size())]
    rows = torch.full((dear.rank() + 1, 2), float(dear.rank()))
    assert dear.allgather(rows).shape == (dear.size() * (dear.size() + 1) // 2, 2)
    total = dear.allreduce(torch.tensor([1.0, dear.rank()]), op=dear.Sum)
    assert total.tolist() == [dear.size(), sum(range(dear.size()))]


def test_session_knows_its_place() -> None:
    session = current()
    assert 0 <= dear.local_rank() < dear.local_size() <= dear.size()
    assert session.comm.rank == dear.rank()
