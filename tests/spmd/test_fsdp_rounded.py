"""Sharded models whose whole parameters are rounded to 16 bits: as `dear` with the same, and exact in shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import fsdp
from overlap.transport.compression import BF16Compressor, NoneCompressor
from tests.spmd.device import is_free
from tests.spmd.models import single_model
from tests.spmd.rounded_training import BF16, Reference, loss_of, train_step
from tests.spmd.strategies import OPTIMIZERS
from tests.spmd.training import same_everywhere
from tests.spmd_plugin import SIZE

# Who has saved, and who loads. Parameters of the second kind of optimizer lie whole on one rank.
WAYS = [
    *(("fsdp fsdp", "adamw"), ("dear fsdp", "adamw"), ("fsdp dear", "adamw")),
    *(("fsdp fsdp", "adafactor"), ("oss fsdp", "adafactor"), ("fsdp oss", "adafactor")),
]


def _rounded_model(seed: int = 7) -> torch.nn.Module:
    """`dear` uses initial values as they are, so those of comparisons are numbers of 16 bits."""
    model = single_model(seed)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(BF16))
    return model


def _wrapped(
    strategy: str = "fsdp", kind: str = "adamw", seed: int = 7, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Module, Any]:
    model = _rounded_model(seed).to(dtype)
    inner = OPTIMIZERS[kind](list(model.parameters()))
    options = {"gather_dtype": BF16, "compression": BF16Compressor, **options}
    return model, dear.DistributedOptimizer(inner, model, strategy=strategy, threshold_mb=0.001, **options)


def _trained(strategy: str = "fsdp", steps: int = 3, **options: Any) -> tuple[torch.nn.Module, Any]:
    model, optimizer = _wrapped(strategy, **options)
    for number in range(steps):
        train_step(model, optimizer, number)
    return model, optimizer


def _exact(optimizer: Any) -> list[torch.Tensor]:
    return list(optimizer.state_dict()["master"].values())


def _same(mine: Any, other: Any) -> None:
    """Exact parameters, the optimizer's state, and what its passes compute."""
    first, second = mine.state_dict(), other.state_dict()
    assert first["master"].keys() == second["master"].keys() != set()
    for number, value in second["master"].items():
        assert torch.equal(first["master"][number], value), number
    for number, state in second["state"].items():
        assert all(torch.equal(first["state"][number][key], value) for key, value in state.items())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_bit_for_bit_at_every_number_of_ranks(kind: str) -> None:
    reference = Reference(kind, BF16)
    for exact, parameter in zip(reference.exact, _rounded_model().parameters(), strict=True):
        exact.data.copy_(parameter.data)
    reference.round()
    model, optimizer = _wrapped(kind=kind)
    for number in range(5):
        reference.step(number)
        train_step(model, optimizer, number)
        numbered = [exact for group in reference.optimizer.param_groups for exact in group["params"]]
        for mine, exact in zip(_exact(optimizer), numbered, strict=True):
            assert torch.equal(mine, exact)
        for value, exact in zip(model.state_dict().values(), reference.exact, strict=True):
            assert torch.equal(value, exact), "what it saves is exact"
    assert any(bool((exact != exact.to(BF16)).any()) for exact in reference.exact)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("compression", [NoneCompressor, BF16Compressor])
def test_equal_to_dear(compression: Any, dtype: torch.dtype) -> None:
    if SIZE > 2 and compression is NoneCompressor:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    pairs = [_trained(name, 4, gather_dtype=dtype, compression=compression) for name in ("fsdp", "dear")]
    _same(pairs[0][1], pairs[1][1])
    with torch.no_grad():
        assert torch.equal(pairs[0][0](torch.ones(2, 9)), pairs[1][0](torch.ones(2, 9)))


def test_parameters_of_float64() -> None:
    """Nobody widens those on the way."""
    values = []
    for name in ("fsdp", "dear"):
        model, optimizer = _wrapped(name, dtype=torch.float64)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 9), 1.0 + dear.rank() + step, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        values.append(optimizer)
    for mine, other in zip(*map(_exact, values), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def _accumulated(model: torch.nn.Module, optimizer: Any) -> None:
    for number in range(2):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, 10 * number + part, dear.rank()).backward()
        optimizer.step()


def _clipped(model: torch.nn.Module, optimizer: Any) -> None:
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number, dear.rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def _uneven(model: torch.nn.Module, optimizer: Any) -> None:
    for number in range(3 if dear.rank() else 1):
        train_step(model, optimizer, number)
    dear.join()


@pytest.mark.parametrize("loop", [_accumulated, _clipped, _uneven])
def test_loops_equal_to_dears(loop: Any) -> None:
    if SIZE > 2:
        pytest.skip("the order of a sum of more than two numbers depends on the algorithm")
    found = []
    for name in ("fsdp", "dear"):
        passes = {"backward_passes_per_step": 2} if loop is _accumulated else {}
        model, optimizer = _wrapped(name, compression=NoneCompressor, **passes)
        loop(model, optimizer)
        found.append(optimizer)
    _same(*found)


def test_passes_use_rounded_values_and_a_rank_keeps_its_share_alone() -> None:
    """In the first pass, too; and what is gathered has half the bytes, which are free after it."""
    model = single_model()
    first = copy.deepcopy(model)
    optimizer = fsdp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, BF16Compressor, threshold_mb=0.001, gather_dtype=BF16
    )
    linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    seen: list[torch.Tensor] = []
    linear.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    before = next(module for module in first.modules() if isinstance(module, torch.nn.Linear)).weight.detach()
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number, dear.rank()).backward()
        for bucket in optimizer.buckets:
            assert bucket.gathering.recv.dtype is BF16
            assert not bucket.master.buffer.there, "it was widened"
            assert not bucket.parameters.there
        optimizer.step()
        for bucket in optimizer.buckets:
            assert is_free(bucket.outgoing), "gradients that were sent are freed"
            assert is_free(bucket.incoming)
    assert torch.equal(seen[0], before.to(BF16).float())
    assert seen[0].dtype is torch.float32


def test_whole_parameters_are_exact_and_what_is_written_counts() -> None:
    model, optimizer = _trained(compression=NoneCompressor)
    exact = [value.clone() for value in model.state_dict().values()]
    with dear.whole(model):
        for parameter, value in zip(model.parameters(), exact, strict=True):
            assert torch.equal(parameter, value)
        first = next(model.parameters())
        first.data.view(-1)[3] = 0.123456789
        exact[0].view(-1)[3] = 0.123456789
    for value, expected in zip(model.state_dict().values(), exact, strict=True):
        assert torch.equal(value, expected)
        same_everywhere(value)
    train_step(model, optimizer, 9)


def _saved(model: torch.nn.Module, optimizer: Any) -> Any:
    alone = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if dear.rank() == 0 else None
    return dear.broadcast_object(alone)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
@pytest.mark.parametrize(("ways", "kind"), WAYS)
def test_a_checkpoint_resumes_bit_for_bit(ways: str, kind: str, order: str, steps_before: int) -> None:
    writer, reader = ways.split()
    model, optimizer = _trained(writer, kind=kind)
    saved = _saved(model, optimizer)
    other, fresh = _trained(reader, steps_before, kind=kind, seed=8)
    for what in order.split():
        target, values = {"model": (other, saved[0]), "optimizer": (fresh, saved[1])}[what]
        target.load_state_dict(values)
    dear.barrier()
    again = fresh.state_dict()["master"]
    assert all(torch.equal(again[number], value) for number, value in saved[1]["master"].items())
    if reader != "fsdp":
        return  # which uses what it has loaded as it is, until the next update
    for number in range(3, 5):
        train_step(model, optimizer, number)
        train_step(other, fresh, number)
    _same(fresh, optimizer)


def test_other_parameters_than_those_of_the_exact_values_count() -> None:
    """As with `dear`: a model that is loaded last, or first, is not that of the optimizer's checkpoint."""
    model, optimizer = _trained()
    saved = _saved(model, optimizer)
    other, fresh = _wrapped(seed=8)
    values = {name: value * 0.5 for name, value in saved[0].items()}
    other.load_state_dict(values)
    fresh.load_state_dict(saved[1])
    dear.barrier()
    for name, value in other.state_dict().items():
        assert torch.equal(value, values[name])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield Path(dear.broadcast_object(str(tmp_path)))
    dear.barrier()


@pytest.mark.parametrize(("ways", "kind"), WAYS)
def test_sharded_checkpoints(ways: str, kind: str, folder: Path) -> None:
    writer, reader = ways.split()
    model, optimizer = _trained(writer, kind=kind)
    expected = [value.clone() for value in _exact(optimizer)]
    dear.save_checkpoint(folder / "one", model, optimizer)
    for steps in (0, 2):
        other, fresh = _trained(reader, steps, kind=kind, seed=8)
        dear.load_checkpoint(folder / "one", other, fresh)
        found = list(other.state_dict().values()) if writer == "fsdp" else _exact(fresh)
        named = list(model.state_dict().values()) if writer == "fsdp" else expected
        assert all(torch.equal(mine, value) for mine, value in zip(found, named, strict=True))
        dear.barrier()
        train_step(other, fresh, 9)


def test_exact_values_move_with_the_buckets() -> None:
    model, optimizer = _wrapped()
    other, steady = _wrapped()
    for number in range(4):
        strategy = copy.copy(optimizer.strategy)
        strategy.threshold_mb = (0.0001, 25, 0.001)[number % 3]
        optimizer.replan(strategy)
        train_step(model, optimizer, number)
        train_step(other, steady, number)
        _same(optimizer, steady)


def test_what_cannot_be_honoured_is_refused() -> None:
    plain = single_model()
    with pytest.raises(ValueError, match=r"LBFGS is not known .* per_parameter=True with oss or fsdp"):
        fsdp.DistributedOptimizer(torch.optim.LBFGS(plain.parameters()), plain, gather_dtype=BF16)
    with pytest.raises(ValueError, match=r"gather_dtype should be None, .* and is torch\.int8"):
        _wrapped(gather_dtype=torch.int8)
    model = single_model().to(BF16)
    with pytest.raises(TypeError, match=r"is torch\.bfloat16; convert the model to float32"):
        fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, gather_dtype=BF16)
