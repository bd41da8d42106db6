"""Every strategy equals one process training on the concatenated batch: parameters, and the optimizer's state."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import dear
from tests.spmd.loops import LOOPS, Run
from tests.spmd.models import MODELS, double_model, single_model
from tests.spmd.strategies import NAMELESS, NOT_EAGER, OPTIMIZERS, PACKAGES, POLICIES, STRATEGIES, WRAP
from tests.spmd.training import assert_close, halves, loop_alone, train_in_loop
from tests.spmd_plugin import OVER_MPI, SIZE

# With the loops in which parameters are read, or come and go.
READING = (
    "plain",
    "evaluated_between",
    "unfrozen_later",
    "group_added",
    "replanned",
    "state_reloaded",
    "data_replaced",
)
# Every optimizer meets the first strategy, which updates shards. Where all ranks update whole parameters, its rule meets
# no code of ours; smaller buckets are cut as larger ones are; and who holds a parameter is all the same to it.
RULES = "dear"
SOMETIMES = ("plain", "zeros_kept", "skipped_steps", "scaled", "scaled_and_clipped")  # loops with unused parameters
LOOPED = ("sgd", "adamw", "adafactor")  # each with every loop at one and two ranks over MPI, elsewhere the first


def _check(model: str, optimizer: str, loop: str, strategy: str) -> None:
    expected = loop_alone(model, optimizer, loop)
    actual = train_in_loop(model, optimizer, loop, strategy)
    assert_close(actual[0], expected[0], "model")
    assert_close(actual[1], expected[1], "optimizer")
    assert_close(actual[2], expected[2], "seen")


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [(o, s) for o in OPTIMIZERS for s in STRATEGIES if s == RULES or o in LOOPED]
)
def test_optimizers(optimizer: str, strategy: str) -> None:
    _check("Mlp", optimizer, "plain", strategy)


@pytest.mark.parametrize("strategy", WRAP | NAMELESS)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "OddParameters"])
def test_models(model: str, strategy: str) -> None:
    for optimizer in ("sgd", "adam-steady") if strategy == RULES else ("sgd",):
        _check(model, optimizer, "plain", strategy)


@pytest.mark.parametrize("strategy", WRAP | NAMELESS)
def test_odd_parameters(strategy: str) -> None:
    _check("OddParameters", "sgd", "plain", strategy)
    _check("OddParameters", "adam", "plain", strategy)


def _loops(strategy: str) -> tuple[str, ...]:
    """Those that a strategy meets here."""
    if strategy in NAMELESS:
        return READING
    if strategy in POLICIES:
        return READING[:1]
    return tuple(LOOPS)


@pytest.mark.parametrize(("loop", "strategy"), [(loop, s) for s in WRAP | NAMELESS for loop in _loops(s)])
def test_loops(loop: str, strategy: str) -> None:
    if "eager" in strategy and loop in NOT_EAGER:
        return
    for optimizer in LOOPED if strategy == RULES and OVER_MPI and SIZE < 4 else LOOPED[:1]:
        if (loop, optimizer) == ("group_added", "adafactor"):
            continue  # torch's own load_state_dict, run where rank 0's state arrives, gives later groups one key more
        _check("Sometimes" if loop in SOMETIMES else "Mlp", optimizer, loop, strategy)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_lbfgs(strategy: str) -> None:
    def train(distributed: bool) -> Any:
        model = double_model("Mlp")
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if distributed:
            optimizer = WRAP[strategy](optimizer, model)
        LOOPS["closure"](Run(model, optimizer, dear.rank() if distributed else None, dear.size()))
        return model.state_dict()

    expected, actual = train(False), train(True)
    for name, value in expected.items():  # line searches amplify rounding
        torch.testing.assert_close(actual[name], value, rtol=1e-7, atol=1e-9)


@functools.cache
def _averaging_alone(optimizer: str) -> list[torch.Tensor]:
    """50 steps of one process that averages the parts' gradients."""
    model = single_model()
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    for step in range(50):
        gradients = []
        for rank in range(dear.size()):
            plain.zero_grad()
            x, y = halves(step, rank)
            torch.nn.functional.mse_loss(model(x), y).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / dear.size()
        plain.step()
    return list(model.parameters())


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fp32_is_bit_identical_to_the_averaged_halves(optimizer: str, strategy: str) -> None:
    """At one and two ranks, bit for bit."""
    if dear.size() > 2:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    model = single_model()
    distributed = WRAP[strategy](OPTIMIZERS[optimizer](list(model.parameters())), model)
    for step in range(50):
        distributed.zero_grad()
        x, y = halves(step, dear.rank())
        torch.nn.functional.mse_loss(model(x), y).backward()
        distributed.step()
    for mine, reference in zip(model.state_dict().values(), _averaging_alone(optimizer), strict=True):
        assert torch.equal(mine, reference)


def _fifty_steps(optimizer: str, strategy: str | None) -> dict[str, torch.Tensor]:
    model = double_model("Mlp")
    wrapped: Any = OPTIMIZERS[optimizer](list(model.parameters()))
    if strategy is not None:
        wrapped = STRATEGIES[strategy](wrapped, model)
    run = Run(model, wrapped, None if strategy is None else dear.rank(), dear.size())
    for step in range(50):
        wrapped.zero_grad()
        run.loss(step).backward()
        wrapped.step()
    return model.state_dict()


@functools.cache
def _fifty_steps_alone(optimizer: str) -> dict[str, torch.Tensor]:
    return _fifty_steps(optimizer, None)


FIFTY = [  # who updates whole parameters does it with torch's own AdamW
    *(("sgd", strategy) for strategy in STRATEGIES),
    ("adamw", RULES),
    *(pytest.param("adamw", strategy, marks=pytest.mark.slow) for strategy in STRATEGIES if strategy != RULES),
]


@pytest.mark.parametrize(("optimizer", "strategy"), FIFTY)
def test_fp64_follows_one_process_for_fifty_steps(optimizer: str, strategy: str) -> None:
    assert_close(_fifty_steps(optimizer, strategy), _fifty_steps_alone(optimizer), "model")
