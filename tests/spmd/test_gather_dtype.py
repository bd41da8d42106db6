"""Parameters that travel in 16 bits: the arithmetic of one process that keeps exact ones beside those it computes with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dear
import oss
from overlap.transport.compression import BF16Compressor, NoneCompressor
from tests.spmd.models import single_model
from tests.spmd.rounded_training import BF16, Reference, loss_of, train_step
from tests.spmd.strategies import OPTIMIZERS, as_early_as_possible

WRAP: dict[str, Callable[..., Any]] = {
    "dear": lambda o, m, **k: dear.DistributedOptimizer(o, m, threshold_mb=0.001, **k),
    "rb": lambda o, m, **k: dear.DistributedOptimizer(o, m, threshold_mb=0.001, policy="rb", **k),
    "oss": lambda o, m, **k: oss.DistributedOptimizer(o, m, threshold_mb=0.001, **k),
    "eager": lambda o, m, **k: as_early_as_possible(
        dear.DistributedOptimizer(o, m, threshold_mb=0.001, eager=True, **k)
    ),
}


def _wrapped(
    kind: str = "adamw", strategy: str = "dear", dtype: torch.dtype = BF16, seed: int = 7
) -> tuple[torch.nn.Module, Any]:
    model = single_model(seed)
    inner = OPTIMIZERS[kind](list(model.parameters()))
    return model, WRAP[strategy](inner, model, gather_dtype=dtype, compression=BF16Compressor)


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_bit_for_bit_at_every_number_of_ranks(kind: str, strategy: str) -> None:
    reference = Reference(kind, BF16)
    model, optimizer = _wrapped(kind, strategy)
    for number in range(5):
        reference.step(number)
        train_step(model, optimizer, number)
        reference.check(model, optimizer)
    assert any(bool((exact != exact.to(BF16)).any()) for exact in reference.exact)  # the masters know more


def test_fp16_with_whole_gradients() -> None:
    if dear.size() > 2:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    reference = Reference("sgd", torch.float16, compressed=False)
    model = single_model()
    inner = OPTIMIZERS["sgd"](list(model.parameters()))
    optimizer = dear.DistributedOptimizer(inner, model, NoneCompressor, gather_dtype=torch.float16)
    for number in range(3):
        reference.step(number)
        train_step(model, optimizer, number)
    reference.check(model, optimizer)


def _resumed(saved: tuple[Any, Any], order: str, steps_before: int) -> tuple[torch.nn.Module, Any]:
    """Another model, with other values, that takes up what was saved, before its first step or after some."""
    model, optimizer = _wrapped(seed=8)
    for number in range(steps_before):
        train_step(model, optimizer, 50 + number)
    for what in order.split():
        target, values = {"model": (model, saved[0]), "optimizer": (optimizer, saved[1])}[what]
        target.load_state_dict(values)
    return model, optimizer


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_a_checkpoint_resumes_bit_for_bit(order: str, steps_before: int) -> None:
    reference = Reference("adamw", BF16)
    model, optimizer = _wrapped()
    for number in range(3):
        reference.step(number)
        train_step(model, optimizer, number)
    alone = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if dear.rank() == 0 else None
    saved: Any = dear.broadcast_object(alone)
    model, optimizer = _resumed(saved, order, steps_before)
    dear.barrier()  # all have loaded
    again = optimizer.state_dict()
    assert all(torch.equal(again["master"][number], value) for number, value in saved[1]["master"].items())
    for number in range(3, 5):
        reference.step(number)
        train_step(model, optimizer, number)
    reference.check(model, optimizer)


def test_a_plain_optimizer_loads_it_and_what_a_plain_one_saved_is_loaded() -> None:
    reference = Reference("adamw", BF16)
    model, optimizer = _wrapped()
    for number in range(2):
        reference.step(number)
        train_step(model, optimizer, number)
    plain_model = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](list(plain_model.parameters()))
    plain.load_state_dict(optimizer.state_dict())
    loss_of(plain_model, 2, 0).backward()
    plain.step()
    assert "master" not in plain.state_dict()
    dear.barrier()  # all have asked for the state before anybody replaces it
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    dear.barrier()
    assert optimizer.state_dict()["master"] == {}  # not known: the parameters count
    for exact, param in zip(reference.exact, plain_model.parameters(), strict=True):
        exact.data.copy_(param.detach())
    reference.round()
    with torch.no_grad():
        for mine, param in zip(reference.model.parameters(), plain_model.parameters(), strict=True):
            mine.copy_(param)
    reference.optimizer.load_state_dict(plain.state_dict())
    reference.step(3)
    train_step(model, optimizer, 3)
    reference.check(model, optimizer)


def test_of_two_states_that_are_loaded_before_the_first_step_the_last_one_counts() -> None:
    model, optimizer = _wrapped()
    train_step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    dear.barrier()
    _, other = _wrapped()
    other.load_state_dict(saved)
    assert other.state_dict()["master"].keys() == saved["master"].keys()
    del saved["master"]
    other.load_state_dict(saved)
    assert other.state_dict()["master"] == {}


def _swapped(model: torch.nn.Module) -> Iterator[None]:
    """Averages come in for an evaluation, and what was there comes back."""
    kept = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.fill_(0.5)
    yield
    for param, value in zip(model.parameters(), kept, strict=True):
        param.data.copy_(value)


def test_what_is_written_to_a_parameter_counts_and_the_rest_stays_exact() -> None:
    reference = Reference("adamw", BF16)
    model, optimizer = _wrapped()
    for number in range(6):
        reference.step(number)
        train_step(model, optimizer, number)
        if number == 1:
            for _ in _swapped(model):
                assert float(next(model.parameters()).detach().flatten()[0]) == 0.5
        if number == 2:  # behind autograd's back, one element
            next(model.parameters()).data.view(-1)[3] = 0.123456789
            for tensor in (reference.exact[0].data, next(reference.model.parameters()).data):
                tensor.view(-1)[3] = 0.123456789
        if number == 3:  # out of the buckets
            vector = torch.nn.utils.parameters_to_vector(model.parameters())
            torch.nn.utils.vector_to_parameters(vector * 0.3, model.parameters())
            torch.nn.utils.vector_to_parameters(vector * 0.3, reference.model.parameters())
            torch.nn.utils.vector_to_parameters(vector * 0.3, reference.exact)
        if number == 4:
            dear.broadcast_parameters(model.state_dict(), dear.size() - 1)
            dear.broadcast_optimizer_state(optimizer, dear.size() - 1)
            dear.barrier()
    reference.check(model, optimizer)


def test_masters_move_with_the_buckets() -> None:
    reference = Reference("adamw", BF16)
    model, optimizer = _wrapped()
    for number in range(5):
        strategy = copy.copy(optimizer.strategy)
        strategy.threshold_mb = (0.0001, 25, 0.001)[number % 3]
        optimizer.replan(strategy)
        reference.step(number)
        train_step(model, optimizer, number)
        reference.check(model, optimizer)
    strategy = copy.copy(optimizer.strategy)
    strategy.gather_dtype = None
    with pytest.raises(ValueError, match=r"cannot change from torch\.bfloat16 to None"):
        optimizer.replan(strategy)


def _refused(**arguments: Any) -> None:
    model = single_model().to(arguments.pop("dtype", torch.float32))
    make = arguments.pop("make", lambda params: torch.optim.SGD(params, 0.1))
    dear.DistributedOptimizer(make(list(model.parameters())), model, **{"gather_dtype": BF16, **arguments})


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match="Adafactor is not known to work element by element"):
        _refused(make=OPTIMIZERS["adafactor"])
    with pytest.raises(TypeError, match=r"is torch\.bfloat16; convert the model to float32"):
        _refused(dtype=BF16)
    with pytest.raises(ValueError, match=r"should be None, torch\.bfloat16 or torch\.float16 and is torch\.int8"):
        _refused(gather_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"gather_dtype=torch\.bfloat16: arguments that belong to 'dear'"):
        _refused(strategy="wfbp")
    _, optimizer = _wrapped()
    saved = optimizer.state_dict()
    saved["master"] = {0: torch.zeros(3)}
    with pytest.raises(ValueError, match=r"master of parameter 0 has shape \(3,\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("strategy", ["dear", "oss"])
def test_what_is_frozen_may_have_any_type(strategy: str) -> None:
    """It is never gathered; once it would be, all ranks are told."""
    model = single_model()
    model.frozen = torch.nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model, gather_dtype=BF16)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, dear.rank()).backward()
        optimizer.step()
    model.frozen.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, 2, dear.rank()).backward()
    with pytest.raises(TypeError, match=r"'frozen' is torch\.bfloat16"):
        optimizer.step()
