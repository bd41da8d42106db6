"""A model that is converted after wrapping: buckets follow on all ranks at one step, or all ranks are told who differs."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch

import dear
from overlap.core.buckets.conversion import Change, difference
from overlap.transport.objects import SignatureMismatch
from tests.spmd.listening import heard
from tests.spmd.models import MODELS, double_model
from tests.spmd.strategies import OPTIMIZERS, SHARDED, WRAP
from tests.spmd.training import trained


def _loss(model: torch.nn.Module, seed: int, rank: int | None, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of one rank's part of the batch, or of all parts."""
    parts = []
    for part in range(dear.size()) if rank is None else [rank]:
        generator = torch.Generator().manual_seed(1000 * seed + part)
        parts.append(torch.randn(4, 9, generator=generator, dtype=torch.float64))
    batch = torch.cat(parts).to(next(model.parameters()).dtype if dtype is None else dtype)
    return model(batch).square().mean()


def _train(script: str, optimizer_name: str, strategy: str | None) -> tuple[Any, Any]:
    model = double_model("Sometimes")
    optimizer: Any = OPTIMIZERS[optimizer_name](list(model.parameters()))
    rank = None
    if strategy is not None:
        optimizer, rank = WRAP[strategy](optimizer, model), dear.rank()
    for step in range(7):
        if script == "there and back" and step in (2, 4):
            model.to(torch.float32 if step == 2 else torch.float64)
        if script == "at once" and step == 3:
            model.half().double()  # while gradients of the last step are still there
        if script == "before the first step" and step == 0:
            model.float()
        if script == "after a skipped step" and step == 3:
            _loss(model, 100, rank).backward()
            model.zero_grad()
            model.float()
        optimizer.zero_grad(set_to_none=step != 3)
        _loss(model, step, rank).backward()
        optimizer.step()
        if script == "there and back" and rank == 0:
            optimizer.state_dict()  # asks the others, who may be in the next step already
    return model.state_dict(), optimizer.state_dict()["state"]


@functools.cache
def _alone(script: str, optimizer: str) -> tuple[Any, Any]:
    return _train(script, optimizer, None)


def _compare(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            _compare(actual[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype is expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


SCRIPTS = {
    "there and back": "sgd",
    "at once": "sgd",
    "before the first step": "adamw",  # whose state torch does not mix with gradients of another type
    "after a skipped step": "sgd",
}


KINDS = ("dear", "dear-eager", "wfbp", "bytescheduler")  # one of each way to update


@pytest.mark.parametrize(
    ("script", "strategy"),
    [(c, s) for c in SCRIPTS for s in WRAP if s in KINDS or (c == "there and back" and s not in SHARDED)],
)
def test_converted_models_equal_one_process(script: str, strategy: str) -> None:
    """The state of the optimizer keeps its type, as torch's own does."""
    if "eager" in strategy and script == "after a skipped step":
        return
    expected, actual = _alone(script, SCRIPTS[script]), _train(script, SCRIPTS[script], strategy)
    _compare(actual, expected)


def test_parts_of_a_model_may_be_converted() -> None:
    def train(distributed: bool) -> Any:
        model = double_model("Mlp")
        optimizer: Any = OPTIMIZERS["sgd"](list(model.parameters()))
        if distributed:
            optimizer = dear.DistributedOptimizer(optimizer, model, threshold_mb=0.001)
        for step in range(4):
            if step == 2:
                model.inner.float()
                model.inner.register_forward_hook(lambda _module, _inputs, output: output.double())
            optimizer.zero_grad()
            dtype = torch.float64 if step < 2 else torch.float32
            _loss(model, step, dear.rank() if distributed else None, dtype=dtype).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict()["state"]

    _compare(train(True), train(False))


# Into what the last rank converts its model, and the others theirs; None: not at all.
DIFFERENT = [
    (torch.float32, None),
    (None, torch.float32),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize(("last", "others"), DIFFERENT)
def test_ranks_that_convert_differently_are_told_apart(
    last: torch.dtype | None, others: torch.dtype | None, strategy: str
) -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    model, optimizer = trained(strategy)
    if strategy == "dear-eager":  # the patient one of these tests waits in backward, the others in step()
        del optimizer._engine.policy.gradient
    mine = last if dear.rank() == dear.size() - 1 else others
    if mine is not None:
        model.to(mine)
    first, second = (str(dtype or torch.float64) for dtype in (others, last))

    def train() -> None:
        optimizer.zero_grad()
        _loss(model, 0, dear.rank()).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(
        SignatureMismatch, match=f"{first} on cpu on rank 0 and {second} on cpu on rank {dear.size() - 1}"
    ):
        train()


def test_ranks_that_convert_differently_before_the_first_step_are_told_apart() -> None:
    if dear.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    model, optimizer = trained(steps=0)
    if dear.rank() == 1:
        model.float()
    _loss(model, 0, dear.rank()).backward()
    with pytest.raises(
        SignatureMismatch, match=r"torch.float64 on cpu» on rank 0 and .*torch.float32 on cpu» on rank 1"
    ):
        optimizer.step()


def test_what_no_rank_can_follow_is_refused() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    _loss(model, 0, dear.rank()).backward()
    model.float()
    with pytest.raises(
        RuntimeError, match=r"from torch.float64 on cpu to torch.float32 on cpu between backward\(\) and"
    ):
        optimizer.step()
    model, optimizer = trained()
    model.float()
    with pytest.raises(RuntimeError, match=r"since the last step.*; replan after the next one"):
        optimizer.replan(optimizer.strategy)


def test_exact_parameters_follow_to_a_type_that_can_be_rounded() -> None:
    torch.manual_seed(7)
    model = MODELS["Mlp"]()
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer = dear.DistributedOptimizer(inner, model, gather_dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for step in range(2):
            optimizer.zero_grad()
            _loss(model, step, dear.rank()).backward()
            optimizer.step()
        for number, param in enumerate(model.parameters()):
            assert param.dtype is dtype
            assert torch.equal(optimizer.state_dict()["master"][number].to(torch.bfloat16).to(dtype), param)
        dear.barrier()  # all have asked
    model.to(torch.bfloat16)
    optimizer.zero_grad()
    _loss(model, 0, dear.rank()).backward()
    with pytest.raises(TypeError, match=r"is torch\.bfloat16; convert the model to float32"):
        optimizer.step()


def test_differences() -> None:
    change = Change("weight", "fp64", "fp32")
    assert difference({0: [change], 2: [change]}, [0, 2]) is None
    found = difference({1: [change]}, [0, 1])
    assert found is not None
    assert "'weight' is fp64 on rank 0 and fp32 on rank 1" in found


@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_another_memory_format_changes_no_result_and_is_said_to_be_put_back(strategy: str) -> None:
    """Where shards hold parameters. Where every rank updates whole ones, the new layout stays."""

    def train(wrap: Any) -> Any:
        model = double_model("Convolution").to(memory_format=torch.contiguous_format)
        optimizer = wrap(OPTIMIZERS["sgd"](list(model.parameters())), model)
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            _loss(model, step, None if wrap is _plain else dear.rank()).backward()
            optimizer.step()
        weight = model.convolutions[2].weight
        return model.state_dict(), weight.is_contiguous(memory_format=torch.channels_last)

    expected, relaid = train(_plain)
    assert relaid
    with heard(logging.WARNING) as everything:
        actual, kept = train(WRAP[strategy])
    _compare(actual, expected)
    said = [text for text in everything if "memory_format" in text]
    assert kept == (strategy == "wfbp")
    assert len(said) == (strategy == "dear" and dear.rank() == 0), said
    if said:
        assert "'convolutions.2.weight' (and maybe others) has strides (16, 1, 8, 4), and had (16, 4, 2, 1)" in said[0]


def _plain(optimizer: Any, _model: torch.nn.Module) -> Any:
    return optimizer
