"""Every strategy equals one process training on the concatenated batch: parameters, and the optimizer's state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bytescheduler_adapter
import dear
import mgwfbp
import oss
import wfbp
from overlap.core.bucket import Phase
from tests.spmd.loops import LOOPS, MakeOptimizer, Run
from tests.spmd.models import MODELS, adafactor
from tests.spmd_plugin import OVER_MPI, SIZE

STRATEGIES: dict[str, Callable[..., Any]] = {
    "dear": dear.DistributedOptimizer,
    "dear-layerwise": lambda o, m, **k: dear.DistributedOptimizer(o, m, threshold_mb=None, num_nearby_layers=1, **k),
    "wfbp": wfbp.DistributedOptimizer,
    "mgwfbp": lambda o, m, **k: mgwfbp.DistributedOptimizer(o, m, alpha_beta=(3e-5, 1e-9), profile_steps=3, **k),
}
# Policies of a strategy above, and others that update as those do: all models and loops, with one optimizer.
VARIANTS: dict[str, Callable[..., Any]] = {
    "dear-rb": lambda o, m, **k: dear.DistributedOptimizer(o, m, policy="rb", threshold_mb=0.001, **k),
    "dear-whole": lambda o, m, **k: dear.DistributedOptimizer(o, m, all_reduced=0.5, threshold_mb=0.001, **k),
    "oss": lambda o, m, **k: oss.DistributedOptimizer(o, m, threshold_mb=0.001, **k),
    "dear-eager": lambda o, m, **k: as_early_as_possible(
        dear.DistributedOptimizer(o, m, eager=True, threshold_mb=0.001, **k)
    ),
    "bytescheduler": lambda o, m, **k: bytescheduler_adapter.DistributedOptimizer(
        o, m, partition_mb=0.001, credit_mb=0.002, **k
    ),
}
# Refused by early updates, see test_eager.py.
NOT_EAGER = {
    "clipped",
    "clipped_by_largest",
    "clipped_after_synchronize",
    "skipped_steps",
    "skipped_steps_behind_our_back",
    "skipped_where_some_used_nothing",
    "scaled",
    "scaled_and_clipped",
    "scaled_as_with_horovod",
}
WRAP = STRATEGIES | VARIANTS
# Whose modules these are is found by looking at every object of the process, which takes time, and neither the number of
# ranks nor what connects them has a part in it: at one rank, too, parameters are poisoned until a module hands them out.
NAMELESS: dict[str, Callable[..., Any]] = (
    {"dear-nameless": lambda o, m, **k: dear.DistributedOptimizer(o, threshold_mb=0.001, **k)} if SIZE == 1 else {}
)
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
# Policies of dear update as it does: they meet all loops and scripts at two ranks over MPI, and elsewhere all the rest.
POLICIES = () if SIZE == 2 and OVER_MPI else ("dear-rb", "dear-whole", "dear-eager")
# One for each package that is synchronous; the first with several buckets.
PACKAGES = ("dear-layerwise", "wfbp", "mgwfbp", "bytescheduler", "oss")
# Every optimizer meets the first strategy, which updates shards. Where all ranks update whole parameters, its rule meets
# no code of ours; smaller buckets are cut as larger ones are; and who holds a parameter is all the same to it.
RULES = "dear"


def as_early_as_possible(optimizer: Any) -> Any:
    """With early updates, but not as they happen to come: every gradient hook first awaits the last reduction."""
    policy, round, order = optimizer._engine.policy, optimizer._engine.round, optimizer._engine.order
    update = policy.gradient

    def patient(bucket: Any) -> None:
        for other in order:
            if other.phase is Phase.REDUCING and other.work is not None:
                other.work.wait()
        assert round.quiet
        update(bucket)

    policy.gradient = patient
    return optimizer


def _two_groups(make: Callable[..., torch.optim.Optimizer], **second: Any) -> MakeOptimizer:
    def build(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return make([{"params": params[0::2]}, {"params": params[1::2], **second}])

    return build


optim = torch.optim
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": _two_groups(lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1), lr=0.02, nesterov=True),
    "adamw": _two_groups(lambda p: optim.AdamW(p, 3e-3, weight_decay=0.2), lr=1e-3, amsgrad=True),
    "adam": lambda p: optim.Adam(p, 3e-3, weight_decay=0.01),
    # Gradients that are zero but for rounding (of a key's bias in attention) would otherwise grow to the learning rate.
    "adam-steady": lambda p: optim.Adam(p, 3e-3, eps=1e-3),
    "adagrad": lambda p: optim.Adagrad(p, 0.02, initial_accumulator_value=0.1),
    "adadelta": lambda p: optim.Adadelta(p, 0.5),
    "adamax": lambda p: optim.Adamax(p, 3e-3),
    "nadam": lambda p: optim.NAdam(p, 3e-3),
    "radam": lambda p: optim.RAdam(p, 3e-3),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, 1e-3),
    "asgd": lambda p: optim.ASGD(p, 1e-2, t0=2),
    "adafactor": lambda p: adafactor(p, 1e-2),
}
SOMETIMES = ("plain", "zeros_kept", "skipped_steps", "scaled", "scaled_and_clipped")  # loops with unused parameters
LOOPED = ("sgd", "adamw", "adafactor")  # each with every loop at one and two ranks over MPI, elsewhere the first


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(1234)
    model = MODELS[name]()
    for parameter in model.parameters():
        if not parameter.is_complex():
            parameter.data = parameter.data.double()
    return model


def _train(model_name: str, optimizer_name: str, loop_name: str, strategy: str | None) -> tuple[Any, Any, Any]:
    model = _model(model_name)
    if strategy is not None and dear.rank() > 0:  # wrapping must bring rank 0's values
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    optimizer: Any = OPTIMIZERS[optimizer_name](list(model.parameters()))
    rank = None
    if strategy is not None:
        optimizer, rank = (WRAP | NAMELESS)[strategy](optimizer, model), dear.rank()
    run = Run(model, optimizer, rank, dear.size())
    LOOPS[loop_name](run)
    if strategy is not None:
        optimizer.synchronize()
    return model.state_dict(), optimizer.state_dict(), run.seen


@functools.cache
def _alone(model_name: str, optimizer_name: str, loop_name: str) -> tuple[Any, Any, Any]:
    """One process, which does the same for every strategy."""
    return _train(model_name, optimizer_name, loop_name, None)


def _assert_close(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape, where
        assert actual.dtype == expected.dtype, where
        if expected.is_sparse:  # coalesced or not
            actual, expected = actual.to_dense(), expected.to_dense()
        tolerance = 1e-12 if expected.dtype in (torch.float64, torch.complex128) else 2e-6
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{where}: {sorted(actual)} != {sorted(expected)}"
        for key in expected:
            _assert_close(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            _assert_close(mine, theirs, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-12), where
    else:
        assert actual == expected, where


def check_while_it_trains(kind: str, wrap: Callable[..., Any], steps: int, look: Callable[[int, Any], None]) -> None:
    """Plain steps are those of one process, whatever becomes of buckets meanwhile: `look` is called after each."""

    def train(distributed: bool) -> Any:
        model = _model("Mlp")
        optimizer: Any = OPTIMIZERS[kind](list(model.parameters()))
        if distributed:
            optimizer = wrap(optimizer, model)
        run = Run(model, optimizer, dear.rank() if distributed else None, dear.size())
        for step in range(steps):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
            if distributed:
                look(step, optimizer)
        if distributed:
            optimizer.synchronize()
        return model.state_dict(), optimizer.state_dict()

    actual, expected = train(True), train(False)
    _assert_close(actual[0], expected[0], "model")
    _assert_close(actual[1], expected[1], "optimizer")


def _check(model: str, optimizer: str, loop: str, strategy: str) -> None:
    expected = _alone(model, optimizer, loop)
    actual = _train(model, optimizer, loop, strategy)
    _assert_close(actual[0], expected[0], "model")
    _assert_close(actual[1], expected[1], "optimizer")
    _assert_close(actual[2], expected[2], "seen")


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
        model = _model("Mlp")
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if distributed:
            optimizer = WRAP[strategy](optimizer, model)
        LOOPS["closure"](Run(model, optimizer, dear.rank() if distributed else None, dear.size()))
        return model.state_dict()

    expected, actual = train(False), train(True)
    for name, value in expected.items():  # line searches amplify rounding
        torch.testing.assert_close(actual[name], value, rtol=1e-7, atol=1e-9)


def _halves(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 9, generator=generator), torch.randn(6, 9, generator=generator)


def _single_precision() -> torch.nn.Module:
    torch.manual_seed(7)
    return MODELS["Mlp"]()


@functools.cache
def _averaging_alone(optimizer: str) -> list[torch.Tensor]:
    """50 steps of one process that averages the parts' gradients."""
    model = _single_precision()
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    for step in range(50):
        gradients = []
        for rank in range(dear.size()):
            plain.zero_grad()
            x, y = _halves(step, rank)
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
    model = _single_precision()
    distributed = WRAP[strategy](OPTIMIZERS[optimizer](list(model.parameters())), model)
    for step in range(50):
        distributed.zero_grad()
        x, y = _halves(step, dear.rank())
        torch.nn.functional.mse_loss(model(x), y).backward()
        distributed.step()
    for mine, reference in zip(model.parameters(), _averaging_alone(optimizer), strict=True):
        assert torch.equal(mine, reference)


def _fifty_steps(optimizer: str, strategy: str | None) -> dict[str, torch.Tensor]:
    model = _model("Mlp")
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
    _assert_close(_fifty_steps(optimizer, strategy), _fifty_steps_alone(optimizer), "model")
