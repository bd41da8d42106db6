"""What a careless script does to the wrapper: it works as in one process, or one message says what is wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import dear
import wfbp
from overlap.transport.objects import SignatureMismatch
from tests.spmd.models import double_model
from tests.spmd.strategies import WRAP
from tests.spmd.training import local_loss, same_everywhere, trained, values_of

# What the last rank gives, what the others do, and how the message goes on after the name of the argument.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"threshold_mb": 4}, {"threshold_mb": 1}, "threshold_mb=1» on rank 0 and «threshold_mb=4"),
    # As large as the first buckets are that are planned: who plans measures, and would wait for the others.
    ({"threshold_mb": 1.0}, {}, r"planned=\['all_reduced', 'threshold_mb'\]» on rank 0 and «planned=\[\]"),
    (
        {"strategy": "oss", "threshold_mb": 1.0},
        {"strategy": "oss"},
        r"planned=\['threshold_mb'\]» on rank 0 and «planned=\[\]",
    ),
    ({"strategy": "wfbp"}, {}, "strategy=dear» on rank 0 and «strategy=wfbp"),
    # These measure, or ask rank 0 for, something of their own before they wrap.
    ({"strategy": "mgwfbp"}, {}, "strategy=dear» on rank 0 and «strategy=mgwfbp"),
    ({"strategy": "wfbp"}, {"strategy": "mgwfbp"}, "strategy=mgwfbp» on rank 0 and «strategy=wfbp"),
    ({"strategy": "bytescheduler_adapter"}, {}, "strategy=dear» on rank 0 and «strategy=bytescheduler_adapter"),
    (
        {"strategy": "wfbp"},
        {"strategy": "bytescheduler_adapter"},
        "bytescheduler_adapter» on rank 0 and «strategy=wfbp",
    ),
    (
        {"strategy": "mgwfbp"},
        {"strategy": "bytescheduler_adapter"},
        "strategy=bytescheduler_adapter» on rank 0 and «strategy=mgwfbp",
    ),
    ({"strategy": "oss"}, {}, "strategy=dear» on rank 0 and «strategy=oss"),
    ({"strategy": "co2"}, {"strategy": "oss"}, "strategy=oss» on rank 0 and «strategy=co2"),
    ({"tune": True}, {}, "tune=False» on rank 0 and «tune=True"),
    ({"strategy": "mgwfbp"}, {"strategy": "mgwfbp", "tune": True}, "tune=True» on rank 0 and «tune=False"),
    ({"tune": dear.Tuning(trials=3)}, {"tune": True}, r"tune=True» on rank 0 and «tune=Tuning\(trials=3, .*\)"),
    ({"backward_passes_per_step": 2}, {}, "passes_per_step=1» on rank 0 and «backward_passes_per_step=2"),
    ({"compression": dear.Compression.fp16}, {}, "NoneCompressor» on rank 0 and «compression=FP16Compressor"),
    ({"elementwise": False}, {}, "updates=sharded» on rank 0 and «updates=whole"),
    ({"groups": 2}, {}, "groups=0» on rank 0 and «groups=2"),
    ({"sync_start": False}, {}, "sync_start=True» on rank 0 and «sync_start=False"),  # who sends nothing is waited for
]


@pytest.mark.parametrize(("last", "others", "message"), DIFFERENT)
def test_ranks_with_different_arguments_are_told_apart(
    last: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SignatureMismatch, match=f"{message}» on rank {dear.size() - 1}"):
        dear.DistributedOptimizer(inner, model, **(last if dear.rank() == dear.size() - 1 else others))


def test_a_promise_that_one_rank_alone_gives_is_named() -> None:
    """Where closures are evaluated by the loss, ranks wait for each other's losses."""
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")

    class Unknown(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    model = double_model("Mlp")
    with pytest.raises(
        SignatureMismatch, match=f"closures=by loss» on rank 0 and «closures=once» on rank {dear.size() - 1}"
    ):
        wfbp.DistributedOptimizer(
            Unknown(model.parameters(), 0.1), model, elementwise=True if dear.rank() == dear.size() - 1 else None
        )


def test_an_optimizer_is_wrapped_once() -> None:
    model, optimizer = trained()
    for wrap in (dear.DistributedOptimizer, wfbp.DistributedOptimizer):
        with pytest.raises(TypeError, match="the optimizer is distributed already"):
            wrap(optimizer, model)


def test_what_is_clipped_are_parameters_of_one_distributed_optimizer() -> None:
    (model, optimizer), (other, _other_optimizer), alone = trained(), trained(), double_model("Mlp")
    for wrong, name in (
        (optimizer, type(optimizer).__name__),
        (model, type(model).__name__),
        (model.named_parameters(), "tuple"),
        (optimizer.param_groups, "dict"),
    ):
        with pytest.raises(TypeError, match=f"such as model.parameters.., and a {name} is none"):
            dear.clip_grad_norm_(wrong, 1.0)
    with pytest.raises(ValueError, match="wrap their optimizer first"):
        dear.clip_grad_norm_(alone.parameters(), 1.0)
    both = [*model.parameters(), *other.parameters()]
    with pytest.raises(ValueError, match=f"{len(both) // 2} of {len(both)} parameters do not belong"):
        dear.clip_grad_norm_(both, 1.0)


@pytest.mark.parametrize("strategy", WRAP)
def test_a_step_without_a_backward_changes_nothing(strategy: str) -> None:
    """As in one process: also before the first iteration, and where only some ranks have gradients later."""
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1), model)
    for _ in range(2):
        before = values_of(model)
        optimizer.step()
        optimizer.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(values_of(model), before, strict=True))
        optimizer.zero_grad()
        local_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        changed = values_of(model)
        assert not any(torch.equal(one, other) for one, other in zip(changed, before, strict=True))
        same_everywhere(changed[0])


def test_a_model_that_one_rank_alone_wraps_again_is_lost_on_all() -> None:
    """The others wrap another model meanwhile: both know of it after one exchange, and nobody waits for the other."""
    model, first = trained()
    if dear.rank() > 0:
        local_loss(model).backward()  # the step of which never comes
    wrapped_next = model if dear.rank() == 0 else double_model("Mlp")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(wrapped_next.parameters(), 0.05), wrapped_next)
    for step in range(2):
        optimizer.zero_grad()
        local_loss(wrapped_next, step).backward()
        optimizer.step()
        same_everywhere(wrapped_next.head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="made later, here or on another rank"):
        first.step()


@pytest.mark.parametrize("after_synchronize", [False, True])
@pytest.mark.parametrize("strategy", ["wfbp", "bytescheduler"])  # which reduce everything under backward
def test_a_step_that_one_rank_alone_skips_is_an_error_on_both_sides(strategy: str, after_synchronize: bool) -> None:
    model, optimizer = trained(strategy)
    local_loss(model).backward()
    if after_synchronize:
        optimizer.synchronize()

    def go_on() -> None:
        if dear.rank() == dear.size() - 1:
            optimizer.zero_grad()
        else:
            optimizer.step()
        for _ in range(2000):  # what the other side says is on its way
            optimizer.zero_grad()
            time.sleep(0.01)

    if dear.size() > 1:
        with pytest.raises(
            RuntimeError, match=rf"rank {dear.size() - 1} has dropped the gradients of step \d+ \(zero_"
        ):
            go_on()


@pytest.mark.parametrize("strategy", [name for name in WRAP if name != "dear-eager"])
def test_a_step_that_all_ranks_skip_is_none(strategy: str) -> None:
    """Also after synchronize(), as scripts do that look at a norm first."""
    model, optimizer = trained(strategy)
    for step in range(4):
        local_loss(model).backward()
        if step == 2:
            optimizer.synchronize()
        if step in (1, 2):
            optimizer.zero_grad()
            dear.barrier()  # what the others said about it has come
            continue
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    same_everywhere(torch.cat([parameter.flatten() for parameter in values_of(model)]))
