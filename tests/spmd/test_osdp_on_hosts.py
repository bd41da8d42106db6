"""Buckets of a sharded model that lie once on each host, beside others, and the choice of them."""

from __future__ import annotations

import gc
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
import osdp
from fsdp.optimizer import Fsdp
from osdp.memory_plan import MARGIN
from osdp.watching import Watching
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Residency
from tests.spmd.strategies import hosts
from tests.spmd.training import local_loss, same_everywhere, values_of
from tests.spmd_plugin import RANK, SIZE

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs ranks that share a host")
PER_HOST = 2 if SIZE == 4 else SIZE
MB = 2**20
WIDTH = 128
WAYS = (
    Residency.FREED_IN_STEP_ON_HOST,
    Residency.FREED,
    Residency.FREED_AFTER_BACKWARD,
    Residency.FREED_IN_STEP,
)


class Freed(Fsdp):
    """Every bucket is freed after each use."""


class Mixed(Fsdp):
    """Buckets lie once on each host, and have every other way to be whole, in turn."""

    some_on_host = True

    def residency(self, spec: BucketSpec) -> Residency:
        return WAYS[spec.tensors[0] // 2 % len(WAYS)]


class OnHosts(Mixed):
    def residency(self, spec: BucketSpec) -> Residency:
        return WAYS[0]


def _model(layers: int = 9, width: int = 9) -> torch.nn.Sequential:
    torch.default_generator.manual_seed(3)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts).double()


def _wrapped(kind: type[Fsdp], model: torch.nn.Module, passes: int = 1) -> Any:
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    with hosts(PER_HOST, two_level=SIZE > PER_HOST):
        return Shell(inner, model, kind(None, 1, None), SharedArguments(backward_passes_per_step=passes))


def _train(model: torch.nn.Module, optimizer: Any, steps: range, passes: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            local_loss(model, passes * step + part).backward()
        if step == 1:
            with torch.no_grad():
                local_loss(model)
        optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", [Mixed, OnHosts])
def test_the_bits_are_those_of_buckets_that_are_freed(kind: type[Fsdp], passes: int) -> None:
    found = []
    for each in (Freed, kind):
        model = _model()
        optimizer = _wrapped(each, model, passes)
        _train(model, optimizer, range(4), passes)
        found.append((values_of(model), optimizer.state_dict()["state"]))
    (expected, theirs), (mine, state) = found
    for value, wanted in zip(mine, expected, strict=True):
        assert torch.equal(value, wanted)
        same_everywhere(value)
    for index, wanted_state in theirs.items():
        for key, value in wanted_state.items():
            assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(value)), key


def test_a_rank_gathers_its_part_once_in_a_step() -> None:
    model = _model()
    optimizer = _wrapped(OnHosts, model)
    _train(model, optimizer, range(2))
    before = optimizer._engine.unsharder.gathered
    _train(model, optimizer, range(2, 4))
    buckets = optimizer._engine.unsharder.buckets
    assert optimizer._engine.unsharder.gathered - before == 2 * len(buckets)
    for bucket in buckets:
        assert bucket.gathering.recv.numel() == bucket.spec.padded_numel // PER_HOST
        assert bucket.gathering.comm.shard_size == SIZE // PER_HOST


def test_what_a_script_writes_while_parameters_are_whole_counts_once() -> None:
    found = []
    for kind in (Freed, Mixed):
        model = _model()
        optimizer = _wrapped(kind, model)
        _train(model, optimizer, range(2))
        with dear.whole(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        _train(model, optimizer, range(2, 4))
        found.append(values_of(model))
    for value, wanted in zip(found[1], found[0], strict=True):
        assert torch.equal(value, wanted)


def test_no_rank_reads_what_another_one_has_loaded_since() -> None:
    model = _model()
    optimizer = _wrapped(OnHosts, model)
    _train(model, optimizer, range(2))
    saved = model.state_dict()
    others = {name: value * 2 for name, value in saved.items()}
    plain = _model()
    x = torch.ones(2, 9, dtype=torch.float64)
    late = SIZE - 1
    model[8].register_forward_hook(lambda *_: time.sleep(0.3 * (late == RANK)))
    for values in (saved, others, saved):
        model.load_state_dict(values)
        plain.load_state_dict(values)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


def _pss() -> int:
    """Bytes of this process in memory that processes share, each shared page divided by how many have it."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(
        r"^\S+-\S+ \S+ \S+ \S+ \S+ +(\S*dear-\S*)[^\n]*\n(?:(?!\S+-\S+ ).*\n)*?Pss: +(\d+) kB", text, re.M
    )
    return sum(int(size) for _, size in found) * 1024


def test_a_host_has_them_once() -> None:
    gc.collect()
    dear.barrier()
    before = _pss()
    dear.barrier()
    model = _model(4, 256)
    optimizer = _wrapped(OnHosts, model)
    numel = sum(parameter.numel() for parameter in model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        local_loss(model, step, width=256).backward()
        optimizer.step()
    with torch.no_grad():
        local_loss(model, width=256)
    dear.barrier()
    assert 0.95 * 8 / PER_HOST < (_pss() - before) / numel < 1.1 * 8 / PER_HOST
    borrowed = optimizer._engine.unsharder.borrowed
    assert borrowed == pytest.approx(8 * numel * (PER_HOST - 1) / PER_HOST, rel=0.05)
    dear.barrier()


# - The choice, under a limit


def _large() -> torch.nn.Module:
    torch.default_generator.manual_seed(8)
    return torch.nn.Sequential(*(part for _ in range(16) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())))


def _trains(strategy: str, steps: int = 8, **options: Any) -> tuple[list[torch.Tensor], Any]:
    model = _large()
    with hosts(PER_HOST, two_level=SIZE > PER_HOST):
        optimizer = dear.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), 1e-3), model, strategy=strategy, threshold_mb=0, **options
        )
    for step in range(steps):
        optimizer.zero_grad()
        local_loss(model, step, width=WIDTH, dtype=torch.float32).backward()
        optimizer.step()
    return values_of(model), optimizer


@pytest.mark.parametrize("share", [0.6, 1.1])
def test_the_plan_chooses_what_lies_on_hosts(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(watching: Watching) -> tuple[int, int]:
        plan = watching.plan
        return (500 * MB, MB) if plan is None else (500 * MB + plan.more, MB + plan.on_host)

    monkeypatch.setattr(Watching, "_told", taken)
    most = _trains("osdp", memory_limit_gb=64.0, residency="host")[1]._planned.plan.more
    limit = (500 * MB + share * most) / (1 - MARGIN) / 2**30 + 1e-6
    mine, optimizer = _trains("osdp", memory_limit_gb=limit, residency="host")
    plan = optimizer._planned.plan
    assert 0 < plan.more <= share * most
    assert Residency.FREED_IN_STEP_ON_HOST in plan.residencies
    assert plan.freed or share > 1  # with room for all, times as measured decide whether some are
    assert dear.allgather_object(plan.residencies) == [plan.residencies] * SIZE
    assert "kept once on each host" in optimizer.explain()
    assert f"for each of the {PER_HOST} ranks there" in optimizer.explain()
    on_host = [bucket for bucket in optimizer._engine.unsharder.buckets if bucket.on_host]
    assert len(on_host) == plan.residencies.count(Residency.FREED_IN_STEP_ON_HOST)
    for value, expected in zip(mine, _trains("fsdp")[0], strict=True):
        assert torch.equal(value, expected)


def test_what_they_do_not_go_together_with() -> None:
    model = _large()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    for options in ({"gather_dtype": torch.bfloat16}, {"shard_group": 2}, {"per_parameter": True}):
        with pytest.raises(ValueError, match="residency='host' does not go together with"):
            osdp.DistributedOptimizer(inner, model, residency="host", memory_limit_gb=64.0, **options)
    with pytest.raises(ValueError, match="residency should be 'host'"):
        osdp.DistributedOptimizer(inner, model, residency="gpu", memory_limit_gb=64.0)  # type: ignore[arg-type]
    with hosts(1), pytest.raises(ValueError, match=r"each of the .* hosts has one"):
        osdp.DistributedOptimizer(inner, model, residency="host", memory_limit_gb=64.0)
