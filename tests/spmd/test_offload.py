"""Shards in the host's memory, of models on a device, which is pretended: results are those of shards on it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import dear
import fsdp
import osdp
from fsdp.units import unit_of
from overlap.core.buckets import flat_buffer
from overlap.core.shards import ShardUpdate
from overlap.transport.objects import SignatureMismatch
from tests.spmd.device import pretend
from tests.spmd_plugin import RANK, SIZE

Loop = Any


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)
    )


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + number)
    inputs = torch.randn(4 * SIZE, 6, generator=generator)[4 * RANK : 4 * RANK + 4]
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def _plain(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    _loss(model, number).backward()


def _clipped(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    _loss(model, number).backward()
    optimizer.clip_grad_norm_(0.1)


def _added_up(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    for part in range(3):
        _loss(model, 10 * number + part).backward()


def _seen(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    _loss(model, number).backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def _evaluated(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    _loss(model, number).backward()
    optimizer.clip_grad_norm_(0.1)
    with torch.no_grad():
        _loss(model, 3)


def _written(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    with dear.whole(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    _loss(model, number).backward()


def _loaded(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    if number:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
    _loss(model, number).backward()


def _trained(loop: Loop, wrap: Any = fsdp, **options: Any) -> list[torch.Tensor]:
    model = _model()
    optimizer = wrap.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, threshold_mb=0.001, poison=False, **options
    )
    for number in range(4):
        optimizer.zero_grad()
        loop(model, optimizer, number)
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()] + [
        value for state in optimizer.state_dict()["state"].values() for value in state.values()
    ]


_LOOPS = [_plain, _clipped, _added_up, _seen, _evaluated, _written, _loaded]
_TYPES: list[dict[str, Any]] = [
    {},
    {"compression": dear.Compression.bf16},
    {"compression": dear.Compression.bf16, "gather_dtype": torch.bfloat16},
    {"gradient_predivide_factor": 2.0},
]


@pytest.mark.parametrize("options", _TYPES, ids=["exact", "compressed", "rounded", "divided"])
@pytest.mark.parametrize("loop", _LOOPS)
def test_results_are_those_of_shards_on_the_device(loop: Loop, options: dict[str, Any]) -> None:
    expected = _trained(loop, **options)
    found = _trained(loop, offload="cpu", **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loop", [_plain, _evaluated])
def test_the_host_has_waited_for_copies_before_it_updates(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    update, left = ShardUpdate.step, []

    def checked(shards: ShardUpdate, buckets: Sequence[Any]) -> None:
        left.extend(each for bucket in buckets for each in (bucket._brought, bucket._fetched))
        update(shards, buckets)

    monkeypatch.setattr(ShardUpdate, "step", checked)
    _trained(loop, offload="cpu")
    assert left
    assert left == [None] * len(left)


def test_osdp_offloads_too() -> None:
    found = _trained(_plain, osdp, offload="cpu", memory_limit_gb=1000)
    for one, other in zip(found, _trained(_plain), strict=True):
        assert torch.equal(one, other)


def test_shards_and_what_follows_from_them_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()
    make = flat_buffer.pinned

    def noted(numel: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        made = make(numel, dtype, place)
        pinned.add(made.untyped_storage()._cdata)
        return made

    monkeypatch.setattr(flat_buffer, "pinned", noted)
    model = _model()
    optimizer = fsdp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, threshold_mb=0.001, poison=False, offload="cpu"
    )
    for number in range(2):
        optimizer.zero_grad()
        _loss(model, number).backward()
        optimizer.step()
    optimizer._engine.unsharder.over(optimizer._engine.participants)
    for bucket in optimizer.buckets:
        for shard in (bucket.parameters.shard, bucket.gradients.shard):
            assert shard.untyped_storage()._cdata in pinned
        for one in optimizer._engine.sharded.pieces_of(bucket):
            assert one.proxy.untyped_storage()._cdata in pinned
        on_device = (bucket.parameters.whole, bucket.gradients.whole, bucket.incoming)
        assert [each.untyped_storage().nbytes() for each in on_device] == [0, 0, 0], "at rest, nothing is there"


def test_an_optimizer_of_whole_parameters_is_refused_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrap in (fsdp, osdp):
        model = _model()
        inner = torch.optim.Adafactor(model.parameters())
        with pytest.raises(ValueError, match=r"offload='cpu' with Adafactor, which needs whole parameters"):
            wrap.DistributedOptimizer(inner, model, offload="cpu")
    monkeypatch.undo()
    model = _model()
    optimizer = fsdp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()), model, offload="cpu")
    _loss(model, 0).backward()
    optimizer.step()


def test_another_place_is_refused() -> None:
    model = _model()
    with pytest.raises(TypeError, match=r"offload should be 'cpu' or None and is 'disk'"):
        fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, offload="disk")  # type: ignore[arg-type]


def _fully_sharded(offloads: bool) -> tuple[list[torch.Tensor], bool]:
    model, policy = _model(), CPUOffloadPolicy() if offloads else None
    for layer in model[::2]:  # type: ignore[attr-defined]
        fsdp.fully_shard(layer, offload_policy=policy)
    fsdp.fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        _loss(model, number).backward()
        optimizer.step()
    buckets = unit_of(model).optimizers[0].buckets
    return list(model.state_dict().values()), all(bucket.parameters.offloaded for bucket in buckets)


def test_fully_shard_takes_torchs_policy() -> None:
    expected, _ = _fully_sharded(False)
    found, offloaded = _fully_sharded(True)
    assert offloaded
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(NotImplementedError, match="leave pin_memory=True"):
        fsdp.fully_shard(_model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(TypeError, match="offload_policy should be a CPUOffloadPolicy"):
        fsdp.fully_shard(_model(), offload_policy=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"cpu_offload": True}, {"move_params_to_cpu": True, "move_grads_to_cpu": True}])
def test_fairscales_arguments_offload(given: dict[str, Any]) -> None:
    model = fsdp.FullyShardedDataParallel(_model(), **given)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _loss(model, 0).backward()
    optimizer.step()
    assert all(bucket.parameters.offloaded for bucket in unit_of(model.module).optimizers[0].buckets)
    with pytest.raises(NotImplementedError, match="leave move_grads_to_cpu out"):
        fsdp.FullyShardedDataParallel(_model(), move_grads_to_cpu=True)


@pytest.mark.skipif(SIZE == 1, reason="a rank agrees with itself")
def test_ranks_offload_alike() -> None:
    model = _model()
    with pytest.raises(SignatureMismatch, match="offload"):
        fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, offload=None if RANK else "cpu")
