"""Horovod's arguments of the optimizer, with every strategy: what they mean, and what is refused."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bytescheduler_adapter
import dear
import mgwfbp
import oss
import wfbp
from overlap.core.round import GradientChanged
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.compression import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from tests.spmd.listening import heard
from tests.spmd.loops import Run
from tests.spmd.models import MODELS, SPARSE_MODELS, double_model
from tests.spmd.strategies import OF_SETS, OPTIMIZERS, PACKAGES, WRAP
from tests.spmd.training import assert_close, values_of

HOROVODS_ORDER = (
    "optimizer",
    "named_parameters",
    "compression",
    "backward_passes_per_step",
    "op",
    "gradient_predivide_factor",
    "num_groups",
    "groups",
    "sparse_as_dense",
    "process_set",
)


class Doubling(Compressor):
    """A user's own: what travels is twice as large and flat."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor * 2).flatten(), tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor / 2).view(ctx)


def _listed(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    params = list(model.parameters())
    return [[params[0], params[-1]], [params[2], params[1]]]


# What it is called: the arguments, and by what the gradient of one process is multiplied.
OPTIONS: dict[str, tuple[Callable[[torch.nn.Module], dict[str, Any]], Callable[[int], float]]] = {
    "sum": (lambda m: {"op": dear.Sum}, float),
    "predivide": (lambda m: {"gradient_predivide_factor": 3.0}, lambda size: 1.0),
    "compressed-predivide": (
        lambda m: {"compression": Doubling, "gradient_predivide_factor": 0.5},
        lambda size: 1.0,
    ),
    "three-groups": (lambda m: {"num_groups": 3}, lambda size: 1.0),
    "listed-groups": (lambda m: {"groups": _listed(m)}, lambda size: 1.0),
}


def _three_steps(run: Run, factor: float) -> dict[str, torch.Tensor]:
    for step in range(3):
        run.optimizer.zero_grad()
        (run.loss(step) * factor).backward()
        run.optimizer.step()
    return run.model.state_dict()


@functools.cache
def _alone(factor: float) -> dict[str, torch.Tensor]:
    model = double_model("Sometimes")  # a parameter that nobody, or one rank alone, uses
    return _three_steps(Run(model, OPTIMIZERS["sgd"](list(model.parameters())), None, dear.size()), factor)


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_one_process(option: str, strategy: str) -> None:
    arguments, factor = OPTIONS[option]
    if strategy in ("dear-eager", "dear-host") and option == "compressed-predivide":
        model = double_model("Mlp")
        with pytest.raises(ValueError, match=r"gives whole tensors|needs whole gradients"):
            WRAP[strategy](OPTIMIZERS["sgd"](list(model.parameters())), model, **arguments(model))
        return

    model = double_model("Sometimes")
    distributed = WRAP[strategy](OPTIMIZERS["sgd"](list(model.parameters())), model, **arguments(model))
    actual = _three_steps(Run(model, distributed, dear.rank(), dear.size()), 1.0)
    assert_close(actual, _alone(factor(dear.size())), option)


SIZES = [(dear, "threshold_mb"), (oss, "threshold_mb"), (mgwfbp, "merge_below_kb")]
SIZES += [(bytescheduler_adapter, name) for name in ("partition_mb", "credit_mb")]


@pytest.mark.parametrize(("package", "size"), SIZES)
def test_a_size_may_be_infinite_and_is_a_number(package: Any, size: str) -> None:
    model = double_model("Sometimes")
    inner = OPTIMIZERS["sgd"](list(model.parameters()))
    with pytest.raises(ValueError, match=f"{size} should be .* and is nan"):
        package.DistributedOptimizer(inner, model, **{size: math.nan})
    distributed = package.DistributedOptimizer(inner, model, **{size: math.inf})
    assert_close(_three_steps(Run(model, distributed, dear.rank(), dear.size()), 1.0), _alone(1.0), size)


@pytest.mark.parametrize(
    "strategy", [name for name in WRAP if not name.endswith("groups")]
)  # which round once in each level
@pytest.mark.parametrize("compression", [FP16Compressor, BF16Compressor])
def test_narrow_wires_sum_in_fp32_and_round_once(compression: Any, strategy: str) -> None:
    """Bit for bit, at every number of ranks: gradients are narrowed, summed in fp32 in rank order, averaged, rounded."""
    narrow = torch.float16 if compression is FP16Compressor else torch.bfloat16

    def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return model(torch.randn(6, 9, generator=generator)).square().mean()

    def build() -> torch.nn.Module:
        torch.manual_seed(7)
        return MODELS["Mlp"]()

    alone, together = build(), build()
    plain: Any = OPTIMIZERS["sgd"](list(alone.parameters()))
    wrapped = WRAP[strategy](OPTIMIZERS["sgd"](list(together.parameters())), together, compression=compression)
    for step in range(4):
        parts = []
        for rank in range(dear.size()):
            plain.zero_grad()
            loss(alone, step, rank).backward()
            parts.append([parameter.grad.to(narrow).float() for parameter in alone.parameters()])
        for parameter, *mine in zip(alone.parameters(), *parts, strict=True):
            parameter.grad = (sum(mine[1:], mine[0]) * (1.0 / dear.size())).to(narrow).float()
        plain.step()
        wrapped.zero_grad()
        loss(together, step, dear.rank()).backward()
        wrapped.step()
    for mine, reference in zip(values_of(together), alone.parameters(), strict=True):
        assert torch.equal(mine, reference)
        assert mine.dtype is torch.float32


# Model of the distributed run, optimizer, arguments. SGD's weight decay and Adam do not take sparse gradients.
SPARSE: dict[str, tuple[str, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": ("Tables", lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), {}),
    "adagrad-sum": ("Tables", lambda p: torch.optim.Adagrad(p, 0.02), {"op": dear.Sum}),
    "sparse-adam": ("TablesAlone", lambda p: torch.optim.SparseAdam(p, 0.01), {}),
    "sgd-alone": ("TablesAlone", lambda p: torch.optim.SGD(p, 0.05), {"gradient_predivide_factor": 2.0}),
    "as-dense": ("Tables", OPTIMIZERS["sgd"], {"sparse_as_dense": True}),
    # It takes no dense gradients: rows are gathered all the same.
    "sparse-adam-as-dense": ("TablesAlone", lambda p: torch.optim.SparseAdam(p, 0.01), {"sparse_as_dense": True}),
}


def _train_sparse(row: str, strategy: str | None) -> Any:
    name, make, arguments = SPARSE[row]
    torch.manual_seed(1234)
    model = SPARSE_MODELS[name]().double()
    optimizer: Any = make(list(model.parameters()))
    if strategy is not None:
        optimizer = WRAP[strategy](optimizer, model, **arguments)
    elif row == "as-dense":
        for table in (model.table, model.rare):
            table.sparse = False
    run = Run(model, optimizer, None if strategy is None else dear.rank(), dear.size())
    for step in range(5):
        optimizer.zero_grad()
        factor = dear.size() if "op" in arguments and strategy is None else 1
        (run.loss(step) * factor).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@functools.cache
def _sparse_alone(row: str) -> Any:
    return _train_sparse(row, None)


@pytest.mark.parametrize("strategy", WRAP)
@pytest.mark.parametrize("row", SPARSE)
def test_sparse_gradients_equal_one_process(row: str, strategy: str) -> None:
    if strategy in ("dear-eager", "dear-host") and row.startswith("sparse-adam"):
        with pytest.raises(ValueError, match=r"(eager=True|residency='host') .*SparseAdam"):
            _train_sparse(row, strategy)
        return
    with heard(logging.WARNING) as said:
        expected, actual = _sparse_alone(row), _train_sparse(row, strategy)
    told = [message for message in said if "SparseAdam takes sparse gradients alone" in message]
    assert len(told) == (row == "sparse-adam-as-dense" and dear.rank() == 0)
    assert_close(actual[0], expected[0], "model")
    assert_close(actual[1], expected[1], "optimizer")


@pytest.mark.parametrize("strategy", PACKAGES)
@pytest.mark.parametrize("options", [{"compression": FP16Compressor}, {"gradient_predivide_factor": 2.0}])
def test_a_gradient_that_vanishes_on_the_wire_was_used_all_the_same(options: dict[str, Any], strategy: str) -> None:
    """Its parameter decays, as one does not that no rank used."""
    model = torch.nn.Linear(3, 2).double()
    values = [param.detach().clone() for param in model.parameters()]
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5), model, **options)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(4, 3, dtype=torch.float64)).sum() * -5e-324).backward()
        optimizer.step()
    for param, before in zip(model.parameters(), values, strict=True):
        torch.testing.assert_close(param.detach(), dear.broadcast(before, 0) * 0.95**2)


@pytest.mark.parametrize("strategy", PACKAGES)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_that_a_script_puts_there_itself(as_dense: bool, strategy: str) -> None:
    """No hook sees them, so they stay sparse, whatever becomes of those that backward leaves."""

    def trained(wrapped: bool) -> torch.Tensor:
        torch.manual_seed(3)
        table = torch.nn.Embedding(5, 3, sparse=True, dtype=torch.float64)
        optimizer: Any = torch.optim.SGD(table.parameters(), 0.1)
        if wrapped:
            optimizer = WRAP[strategy](optimizer, table, sparse_as_dense=as_dense)
        ranks = (dear.rank(),) if wrapped else range(dear.size())
        for step in range(3):
            loss = sum(table(torch.tensor([step, (step + rank) % 5])).square().sum() for rank in ranks) / len(ranks)
            (table.weight.grad,) = torch.autograd.grad(loss, table.weight)
            optimizer.step()
            optimizer.zero_grad()
        return table.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_sparse_gradients_and_what_they_cannot(strategy: str) -> None:
    torch.manual_seed(3)
    model = SPARSE_MODELS["Tables"]().double()
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    run = Run(model, optimizer, dear.rank(), dear.size())
    for step in (0, 3):
        optimizer.zero_grad()
        run.loss(step).backward()
        with pytest.raises(TypeError, match=r"'table.weight' is sparse.*sparse_as_dense"):
            optimizer.clip_grad_norm_(1.0)
        optimizer.synchronize()
        assert torch.equal(model.table.weight.grad.to_dense(), dear.allreduce(model.table.weight.grad.to_dense()))
        optimizer.step()
    optimizer.zero_grad()
    run.loss(3).backward()
    model.table.weight.grad = model.table.weight.grad * 2
    with pytest.raises(GradientChanged, match=r"'table.weight'.*synchronize\(\)"):
        optimizer.step()


def _set(number: int, ranks: range) -> ProcessSet:
    made = ProcessSet(ranks)
    made._register(number, ranks, dear.rank())
    return made


@pytest.mark.parametrize("strategy", OF_SETS)
def test_process_sets_train_apart(strategy: str) -> None:
    """Each set trains on the whole batch, and so does a rank that is outside of the set it gives."""
    half = max(dear.size() // 2, 1)
    first, second = _set(1, range(half)), _set(2, range(half, dear.size()))
    for mine in (first if dear.rank() < half else second, first):
        expected, actual = double_model("Mlp"), double_model("Mlp")
        for model in (expected, actual):
            optimizer: Any = OPTIMIZERS["sgd"](list(model.parameters()))
            run = Run(model, optimizer, None, dear.size())
            if model is actual:
                optimizer = run.optimizer = WRAP[strategy](optimizer, model, process_set=mine)
                if mine.included():
                    run.rank, run.size = mine.rank(), mine.size() or 0
            for step in range(3):
                optimizer.zero_grad()
                run.loss(step).backward()
                optimizer.step()
        assert_close(actual.state_dict(), expected.state_dict(), "model")
        state = optimizer.state_dict()["state"]  # asks the members of the set alone
        assert len(state) == len(list(actual.parameters()))


def test_a_set_has_to_be_registered() -> None:
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="is not registered"):
        dear.DistributedOptimizer(inner, model, process_set=ProcessSet([0]))


def test_listed_groups_are_buckets() -> None:
    model = double_model("Mlp")
    groups = _listed(model)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, groups=groups)
    model(torch.ones(2, 9, dtype=torch.float64)).sum().backward()
    optimizer.step()
    found = [{id(slot.param) for slot in bucket.slots} for bucket in optimizer.buckets]
    for group in groups:
        assert {id(parameter) for parameter in group} in found
    assert len(found) == 3


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"op": dear.Min}, ValueError, "op should be Average or Sum and is MIN"),
    ({"op": "mean"}, TypeError, "op should be Average or Sum and is 'mean'"),
    ({"op": dear.Sum, "gradient_predivide_factor": 2.0}, ValueError, "is 2.0, while op is SUM"),
    ({"gradient_predivide_factor": 0.0}, ValueError, "above 0 and is 0.0"),
    ({"compression": "fp16"}, TypeError, "and is 'fp16'"),
    ({"groups": -1}, ValueError, "at least 0 and is -1"),
    ({"groups": 2, "num_groups": 2}, ValueError, "num_groups is 2 and groups is given too"),
    ({"groups": ["weight"]}, ValueError, "entry 0 is 'weight'"),
    ({"groups": [[torch.zeros(3)]]}, ValueError, r"groups\[0\] holds a tensor of shape \(3,\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = double_model("Mlp")
    with pytest.raises(error, match=message):
        wfbp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **arguments)


@pytest.mark.parametrize("package", [dear, wfbp, mgwfbp, oss])
def test_arguments_come_in_horovods_order(package: Any) -> None:
    parameters = inspect.signature(package.DistributedOptimizer).parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert positional == HOROVODS_ORDER
    model = double_model("Mlp")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    named = model.named_parameters()
    package.DistributedOptimizer(inner, named, NoneCompressor, 2, dear.Average, 1.0, 0, None, True, global_process_set)
