"""Buckets that stay whole for different times in one optimizer, and the choice among them under a limit on memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dear
import osdp
from fsdp.optimizer import Fsdp
from osdp.memory_plan import MARGIN
from osdp.watching import Watching
from overlap.job.memory.counted import Peak, resident_bytes
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer as Shell
from overlap.plan.partition import BucketSpec
from overlap.plan.plan import Residency
from tests.spmd.device import DEVICE
from tests.spmd.training import local_loss, values_of
from tests.spmd_plugin import SIZE

MB = 2**20


class Mixed(Fsdp):
    """Every way for a bucket to be whole on a rank, in turn."""

    post_forward_ranks = SIZE // 2 if SIZE % 2 == 0 else SIZE

    def residency(self, spec: BucketSpec) -> Residency:
        on_hosts = {Residency.HOST, Residency.FREED_IN_STEP_ON_HOST} if DEVICE else {Residency.HOST}
        ways = [each for each in Residency if each not in on_hosts]
        return ways[spec.tensors[0] // 2 % len(ways)]


def _model(layers: int = 9) -> torch.nn.Module:
    torch.default_generator.manual_seed(3)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(9, 9), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts).double()


def _trained(wrap: Any, passes: int = 1, steps: int = 4) -> list[torch.Tensor]:
    model = _model()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), 0.01), model)
    ranks = list(range(SIZE)) if optimizer.__class__ is torch.optim.AdamW else [dear.rank()]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in ranks:
                (local_loss(model, passes * step + part, rank) / len(ranks)).backward()
        if step == 1:
            with torch.no_grad():
                local_loss(model)
        optimizer.step()
    return values_of(model)


def _mixed(optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Shell:
    return Shell(optimizer, model, Mixed(None, 1, None), SharedArguments(backward_passes_per_step=passes))


@pytest.mark.parametrize("passes", [1, 3])
def test_buckets_of_one_optimizer_may_be_whole_for_different_times(passes: int) -> None:
    mine = _trained(lambda *given: _mixed(*given, passes), passes)
    for value, expected in zip(mine, _trained(lambda optimizer, _model: optimizer, passes), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_buckets_that_are_kept_until_the_step_are_gathered_once() -> None:
    class Kept(Fsdp):
        def residency(self, spec: BucketSpec) -> Residency:
            return Residency.FREED_IN_STEP

    model = _model()
    optimizer = Shell(
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        Kept(None, 1, None),
        SharedArguments(backward_passes_per_step=2),
    )
    unsharder = optimizer._engine.unsharder
    for step in range(3):
        before = unsharder.gathered
        for part in range(2):
            local_loss(model, 2 * step + part).backward()
        with torch.no_grad():
            local_loss(model)
        assert unsharder.gathered - before == (len(optimizer.buckets) if step == 0 else 0), "step() has begun with it"
        optimizer.step()
        optimizer.zero_grad()


class Tied(torch.nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(16, 9), torch.nn.Linear(9, 16, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(12))
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_backward_of_a_tied_model_does_not_begin_with_all_of_it() -> None:
    model = Tied()
    optimizer = Shell(torch.optim.SGD(model.parameters(), 0.1), model, Fsdp(None, 1, None), SharedArguments())
    buckets = optimizer._engine.unsharder.buckets
    there: list[int] = []
    model.layers[10].register_full_backward_hook(
        lambda *_: there.append(sum(each.parameters.there for each in buckets))
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
    assert len(buckets) == 13
    assert max(there[1:]) <= 7, "the weight, what is used, and four ahead"


# - The choice, under a limit

WIDTH = 512
LIMITS = ("least", "a third", "two thirds", "all")


def _large() -> torch.nn.Module:
    torch.default_generator.manual_seed(8)
    parts = [part for _ in range(8) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts)


def _large_loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return local_loss(model, step, rank, WIDTH, torch.float32)


def _trains(strategy: str | None, steps: int = 8, **options: Any) -> tuple[list[torch.Tensor], Any]:
    model = _large()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    ranks = range(SIZE)
    if strategy is not None:
        optimizer = dear.DistributedOptimizer(optimizer, model, strategy=strategy, threshold_mb=0, **options)
        ranks = range(dear.rank(), dear.rank() + 1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (_large_loss(model, step, rank) / len(ranks)).backward()
        optimizer.step()
    return values_of(model), optimizer


def _fixed(monkeypatch: pytest.MonkeyPatch, in_passes: int) -> None:
    """What a rank takes is said here, and grows by what is kept: it differs from job to job elsewhere."""
    told: list[Watching] = []

    def taken(watching: Watching) -> tuple[int, int]:
        told.append(watching)
        return in_passes + (0 if watching.plan is None else watching.plan.more), MB

    monkeypatch.setattr(Watching, "_told", taken)


@pytest.mark.parametrize("limit", LIMITS)
def test_results_are_those_of_other_strategies_at_any_limit(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = (WIDTH + 1) * WIDTH * 4
    more = {"least": 0, "a third": 1.2 * layer, "two thirds": 2.4 * layer, "all": 20 * layer}[limit]
    _fixed(monkeypatch, 500 * MB)
    mine, optimizer = _trains("osdp", memory_limit_gb=(500 * MB + more) / (1 - MARGIN) / 2**30 + 1e-6)
    plan = optimizer._planned.plan
    if SIZE > 1:
        assert plan.freed if limit != "all" else not plan.freed
        assert plan.more > more - layer - 8 or limit == "all"
    assert plan.more <= more
    for strategy in ("fsdp", "dear"):
        for value, expected in zip(mine, _trains(strategy)[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            assert SIZE > 2 or torch.equal(value, expected), strategy
    for value, expected in zip(mine, _trains(None)[0], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(SIZE != 4, reason="needs two groups of two ranks")
def test_groups_of_ranks_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = (WIDTH + 1) * WIDTH * 4
    _fixed(monkeypatch, 500 * MB)
    limit = (500 * MB + 2.4 * layer) / (1 - MARGIN) / 2**30 + 1e-6
    mine, optimizer = _trains("osdp", memory_limit_gb=limit, shard_group=2)
    plan = optimizer._planned.plan
    assert plan.kept
    assert plan.freed
    assert plan.job.network.workers == 2
    assert dear.allgather_object(plan.residencies) == [plan.residencies] * SIZE
    for value, expected in zip(mine, _trains("fsdp", shard_group=2)[0], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_every_rank_decides_the_same_and_by_the_rank_that_takes_most(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Peak.read
    monkeypatch.setattr(Peak, "read", lambda peak: real(peak) + 10 * MB * (dear.rank() == SIZE - 1))
    _, optimizer = _trains("osdp", memory_limit_gb=64.0)
    plan = optimizer._planned.plan
    facts = (plan.residencies, plan.in_passes, plan.in_step, optimizer._planned.measured)
    assert dear.allgather_object(facts) == [facts] * SIZE
    mine = dear.allgather_object(real(Peak()))
    assert plan.in_passes >= min(mine) + 10 * MB - 64 * MB
    assert "kept" in optimizer.explain() or SIZE == 1


def test_a_limit_below_what_freed_buckets_need_raises_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    _fixed(monkeypatch, 700 * MB)
    with pytest.raises(
        MemoryError, match=r"limit is .* MB, and 700.0 MB are needed at least, .* the largest: .* memory_limit"
    ):
        _trains("osdp", memory_limit_gb=0.5)


def test_a_rank_that_takes_more_later_has_all_of_them_free_more(monkeypatch: pytest.MonkeyPatch) -> None:
    if SIZE == 1:
        pytest.skip("one rank keeps nothing")
    more = [0]

    def taken(watching: Watching) -> tuple[int, int]:
        return 500 * MB + more[0] + (0 if watching.plan is None else watching.plan.more), MB

    monkeypatch.setattr(Watching, "_told", taken)
    model = _large()
    limit = (500 * MB + 5.5 * (WIDTH + 1) * WIDTH * 4) / (1 - MARGIN)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, strategy="osdp", threshold_mb=0, memory_limit_gb=limit / 2**30
    )
    watching = optimizer._planned
    real = watching._peak.read
    kept = 0
    for step in range(20):
        if step == 10:
            assert not watching.under_way
            kept, more[0] = len(watching.plan.kept), 3 * (WIDTH + 1) * WIDTH * 4
        over = step == 10 and dear.rank() == SIZE - 1
        monkeypatch.setattr(watching._peak, "read", lambda over=over: int(limit) + 1 if over else min(real(), MB))
        optimizer.zero_grad()
        _large_loss(model, step, dear.rank()).backward()
        optimizer.step()
    assert 0 < len(watching.plan.kept) < kept
    assert not watching.under_way
    assert dear.allgather_object(watching.plan.residencies) == [watching.plan.residencies] * SIZE
    monkeypatch.undo()


def test_rules_for_modules_are_the_choice() -> None:
    model = _large()
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        strategy="osdp",
        memory_limit_gb=64.0,
        fsdp_plan={"0": "keep_full_weight", "4": "free_full_weight"},
    )
    for step in range(4):
        optimizer.zero_grad()
        _large_loss(model, step, dear.rank()).backward()
        optimizer.step()
    plan = optimizer._planned.plan
    found = dict(zip(plan.modules, plan.residencies, strict=True))
    assert found["0",] is Residency.FREED_AFTER_BACKWARD
    assert all(residency is Residency.FREED for names, residency in found.items() if "4" in names)
    assert plan.fsdp_plan()["0"] == "keep_full_weight"
    with pytest.raises(ValueError, match="no module"):
        osdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, fsdp_plan={"7x": "free_full_weight"})
    with pytest.raises(ValueError, match="has no _fsdp_plan"):
        osdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, fsdp_plan="model")


# - As the published scripts write it


class Keywords(torch.nn.Module):
    """Built from a config, called with keywords and with what is no tensor."""

    def __init__(self, config: dict[str, int], execution_plan: list[int]) -> None:
        super().__init__()
        self.planned = execution_plan
        torch.default_generator.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config["width"], config["width"]) for _ in execution_plan)

    def forward(self, *, x: torch.Tensor, y: int, z: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * y
        return x * z


@pytest.mark.parametrize("built", [True, False])
def test_the_published_example(built: bool) -> None:
    config = {"width": 64}
    given: Any = Keywords if built else Keywords(config, [0] * 4)
    sharded_module = osdp.OptimalShardedDataParallel(given, [4, 64, config], 65536)
    optim = torch.optim.Adam(sharded_module.parameters(), lr=0.0001)
    plain = Keywords(config, [0] * 4)
    reference = torch.optim.Adam(plain.parameters(), lr=0.0001)

    def sample(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))

    for step in range(5):
        out = sharded_module(x=sample(step, dear.rank()), y=3, z=torch.Tensor([1]))
        out.square().mean().backward()
        optim.step()
        optim.zero_grad()
        for rank in range(SIZE):
            (plain(x=sample(step, rank), y=3, z=torch.Tensor([1])).square().mean() / SIZE).backward()
        reference.step()
        reference.zero_grad()
    saved = sharded_module.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[f"module.{name}"], value, rtol=1e-4, atol=1e-5)
    assert sharded_module.planned == [0] * 4
    assert sharded_module.optimizer is optim
    assert f"osdp on {SIZE} ranks" in optim.explain()  # type: ignore[attr-defined]
    assert optim.strategy.name == "osdp"  # type: ignore[attr-defined]
    late = torch.optim.SGD(sharded_module.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\): parameters of this optimizer are sharded already"):
        late.step()


def test_the_module_tells_the_peak_of_its_rank_once_the_plan_is_settled() -> None:
    sharded = osdp.OptimalShardedDataParallel(_model(), [], 65536)
    optim: Any = torch.optim.SGD(sharded.parameters(), lr=0.01)
    known: list[bool] = []
    for step in range(30):
        local_loss(sharded, step).backward()
        assert (sharded.peak_bytes is None) is (step == 0 or optim.tuning)
        optim.step()
        known.append(not optim.tuning)
    assert known.count(False) >= 3
    assert known[-1]
    peak = sharded.peak_bytes
    assert peak is not None
    assert resident_bytes() / 2 < peak < 65536 * MB
    held = torch.ones(64 * MB, dtype=torch.uint8)  # counts as anything of the process
    local_loss(sharded, 30).backward()
    optim.step()
    assert sharded.peak_bytes >= peak + 48 * MB
    del held


def test_what_the_module_cannot_take() -> None:
    with pytest.raises(TypeError, match="a memory limit in MB and is '8 GB'"):
        osdp.OptimalShardedDataParallel(torch.nn.Linear(2, 2), [1, 2, None], "8 GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above 0 MB and is -1"):
        osdp.OptimalShardedDataParallel(torch.nn.Linear(2, 2), [1, 2, None], -1)
    with pytest.raises(ValueError, match=r"\[layers, hidden, config\] and is \[1, 2\]"):
        osdp.OptimalShardedDataParallel(Keywords, [1, 2], 100)
