"""Pipelines across ranks: losses, gradients and training are those of one process."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dear
import fsdp
import pipe
from osdp.memory_plan import MARGIN
from osdp.watching import Watching

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]


def _layers() -> nn.Sequential:
    torch.manual_seed(3)
    sizes = [6, 8, 5, 7, 4]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes))).double()


def _batch(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator).double(), torch.randn(rows, 4, generator=generator).double()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _balance(stages: int) -> list[int]:
    return {1: [4], 2: [3, 1], 4: [1, 1, 1, 1]}[stages]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp", None])
def test_training_equals_one_process(schedule: str, chunks: int, stages: int, strategy: str | None) -> None:
    if dear.size() % stages or (strategy is None and dear.size() != stages):
        pytest.skip("other numbers of ranks")
    mesh = dear.Mesh(data=-1, pipeline=stages)
    plain = _layers()
    piped = pipe.Pipe(_layers(), _balance(stages), mesh=mesh, chunks=chunks, schedule=schedule, loss=_loss)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    ours: Any = torch.optim.AdamW(piped.parameters(), 0.01)
    if strategy is not None:
        ours = dear.DistributedOptimizer(ours, piped, strategy=strategy, process_set=mesh.group("data"))
    shares, mine = mesh.size("data"), mesh.coordinate["data"]
    for step in range(4):
        x, y = _batch(step)
        theirs.zero_grad()
        wanted = _loss(plain(x), y)
        wanted.backward()
        wanted_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        theirs.step()
        ours.zero_grad()
        found = piped.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        if strategy is not None:
            norm = torch.nn.utils.clip_grad_norm_(piped.parameters(), 0.2)
            torch.testing.assert_close(norm, wanted_norm, rtol=1e-10, atol=0)
            ours.step()
            total = dear.allreduce(found) if mesh.size("data") > 1 else found
            torch.testing.assert_close(total, wanted.detach(), rtol=1e-10, atol=0)
    if strategy is None:
        return
    _same(piped, plain)
    with torch.no_grad():
        output = piped(_batch(9)[0])
    assert (output is None) == (mesh.coordinate["pipeline"] != stages - 1)
    if output is not None:
        torch.testing.assert_close(output, plain(_batch(9)[0]))


def test_ranks_may_have_groups_of_torchs_own() -> None:
    """torch names a group that only its members make by how many others a rank has."""
    if dear.size() % 2:
        pytest.skip("other numbers of ranks")
    if dear.rank() == 0:
        torch.distributed.new_group([0], use_local_synchronization=True)
    piped = pipe.Pipe(_layers(), _balance(2), mesh=dear.Mesh(data=-1, pipeline=2), chunks=2, loss=_loss)
    x, y = _batch(0)
    found = piped.step(x, target=y)
    torch.testing.assert_close(found, _loss(_layers()(x), y).detach(), rtol=1e-10, atol=0)


def _both(stages: int, strategy: str) -> tuple[Any, ...]:
    """A model of one process, the same as a pipeline, an optimizer of each, and the mesh."""
    mesh = dear.Mesh(data=-1, pipeline=stages)
    plain = _layers()
    piped = pipe.Pipe(_layers(), _balance(stages), mesh=mesh, chunks=4, loss=_loss)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    ours = dear.DistributedOptimizer(
        torch.optim.SGD(piped.parameters(), 0.1), piped, strategy=strategy, process_set=mesh.group("data")
    )
    return plain, piped, theirs, ours, mesh


def _step(both: tuple[Any, ...], batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A step of both, with a batch for each of the pipelines beside each other."""
    plain, piped, theirs, ours, mesh = both
    theirs.zero_grad()
    ours.zero_grad()
    for x, y in batches:
        (_loss(plain(x), y) / len(batches)).backward()
    x, y = batches[mesh.coordinate["data"]]
    piped.step(x, target=y)
    theirs.step()
    ours.step()


def _same(piped: pipe.Pipe, plain: nn.Module) -> None:
    saved = plain.state_dict()
    for name, value in piped.state_dict().items():
        torch.testing.assert_close(value, saved[name.split(".", 2)[2]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp"])
@pytest.mark.parametrize("stages", [1, 2])
def test_steps_may_have_other_numbers_of_micro_batches(strategy: str, stages: int) -> None:
    if dear.size() % stages:
        pytest.skip("other numbers of ranks")
    plain, piped, *_, mesh = both = _both(stages, strategy)
    shares = mesh.size("data")
    for step, rows in enumerate((2, 2, 8, 3, 8)):
        x, y = _batch(step, rows * shares)
        _step(both, list(zip(x.chunk(shares), y.chunk(shares), strict=True)))
    _same(piped, plain)


@pytest.mark.parametrize("strategy", ["dear", "fsdp"])
@pytest.mark.parametrize("stages", [1, 2])
def test_pipelines_beside_each_other_may_have_other_numbers_of_micro_batches(strategy: str, stages: int) -> None:
    if dear.size() % stages:
        pytest.skip("other numbers of ranks")
    plain, piped, *_, mesh = both = _both(stages, strategy)
    for step in range(4):
        shares = range(mesh.size("data"))
        _step(both, [_batch(10 * step + share, 4 if (step + share) % 2 else 3) for share in shares])
    _same(piped, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_stage_under_fsdp_gathers_once_a_step(schedule: str, stages: int) -> None:
    if dear.size() % stages:
        pytest.skip("other numbers of ranks")
    mesh = dear.Mesh(data=-1, pipeline=stages)
    shares, mine = mesh.size("data"), mesh.coordinate["data"]
    plain = _layers()
    piped = pipe.Pipe(_layers(), _balance(stages), mesh=mesh, chunks=4, schedule=schedule, loss=_loss)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    ours = fsdp.DistributedOptimizer(
        torch.optim.SGD(piped.parameters(), 0.1), piped, process_set=mesh.group("data"), threshold_mb=0, whole_mb=1e-4
    )
    unsharder, buckets = ours._engine.unsharder, len(ours.buckets)
    for step in range(4):
        x, y = _batch(step, 8 * shares)
        before = unsharder.gathered
        theirs.zero_grad()
        ours.zero_grad()
        _loss(plain(x), y).backward()
        piped.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        assert unsharder.gathered - before == (0 if step else buckets), "the step before has gathered for this one"
        assert all(parameter.isnan().all() for parameter in piped.parameters()), "freed in the last backward pass"
        theirs.step()
        ours.step()
        assert unsharder.gathered - before == (buckets if step else 2 * buckets)
        with torch.no_grad():
            output = piped(x) if step == 1 else None
        if output is not None:
            torch.testing.assert_close(output, plain(x).detach(), rtol=1e-9, atol=1e-12)
        assert unsharder.gathered - before == (buckets if step else 2 * buckets), "an evaluation uses what is there"
    _same(piped, plain)


@pytest.mark.parametrize(
    ("megabytes", "options", "said"),
    [
        (501, {}, ""),
        (499, {}, "are whole until the last micro-batch of a pipeline has used them"),
        (501, {"fsdp_plan": {"partitions.*": "free_full_weight"}}, "leave 'free_full_weight' out, or take chunks=1"),
    ],
)
def test_osdp_keeps_its_limit_with_what_a_pipeline_has_whole(
    megabytes: int, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of several micro-batches is whole in all of them: its memory was measured so."""
    if dear.size() < 2:
        pytest.skip("one rank frees nothing")
    monkeypatch.setattr(Watching, "_told", lambda _watching: (500 * 2**20, 2**20))
    options = options | {"memory_limit_gb": megabytes / 1024 / (1 - MARGIN)}
    mesh = dear.Mesh(data=2, pipeline=-1)
    stages, mine = mesh.size("pipeline"), mesh.coordinate["data"]

    def trained(strategy: str, **options: Any) -> tuple[pipe.Pipe, Any]:
        piped = pipe.Pipe(_layers(), _balance(stages), mesh=mesh, chunks=4, loss=_loss)
        optimizer = dear.DistributedOptimizer(
            torch.optim.SGD(piped.parameters(), 0.1, momentum=0.9),
            piped,
            strategy=strategy,
            threshold_mb=0,
            whole_mb=1e-4,
            process_set=mesh.group("data"),
            **options,
        )
        for step in range(8):
            x, y = _batch(step)
            optimizer.zero_grad()
            piped.step(x.chunk(2)[mine], target=y.chunk(2)[mine])
            optimizer.step()
        return piped, optimizer

    if said:
        with pytest.raises((MemoryError, ValueError), match=said):
            trained("osdp", **options)
        return
    piped, optimizer = trained("osdp", **options)
    plan = optimizer._planned.plan
    assert plan.residencies
    assert not plan.freed
    assert plan.predicted_bytes == 500 * 2**20
    wanted = trained("fsdp")[0].state_dict()
    for name, value in piped.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_a_balance_is_measured_and_steps_are_explained() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    x, y = _batch(0)
    slow = _layers()
    slow[0].register_forward_hook(lambda *_: time.sleep(0.002))
    piped = pipe.Pipe(slow, "auto", mesh=mesh, chunks=4, loss=_loss, sample=x[:4])
    assert piped.balance == {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}[dear.size()]
    with pytest.raises(RuntimeError, match="make some steps"):
        piped.explain()
    for _ in range(3):
        piped.step(x, target=y)
    told = piped.explain()
    assert f"stage {dear.rank()} of {dear.size()}, layers {'+'.join(map(str, piped.balance))}, 4 micro-batches" in told
    assert "calls, messages, waits" in told
    with pytest.raises(ValueError, match="with a sample="):
        pipe.Pipe(_layers(), "auto", mesh=mesh)


def test_buffers_are_those_of_one_process() -> None:
    """torch calls each stage once more than there are micro-batches, with numbers of its own."""
    torch.manual_seed(3)
    act = nn.Tanh()  # stands there several times
    layers = [[nn.Linear(6, 6), nn.BatchNorm1d(6), act] for _ in range(4)]
    plain = nn.Sequential(*itertools.chain.from_iterable(layers)).double()
    balance = {1: [12], 2: [5, 7], 4: [2, 4, 3, 3]}[dear.size()]
    piped = pipe.Pipe(copy.deepcopy(plain), balance, mesh=dear.Mesh(data=1, pipeline=-1), chunks=2, loss=_loss)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    for part in x.chunk(2):
        plain(part)
    piped.step(x, target=x)
    theirs = dict(plain.named_buffers())
    for name, buffer in piped.named_buffers():
        assert torch.equal(buffer, theirs[name.split(".", 2)[2]]), name


def test_what_is_wrong_with_a_batch_raises_on_every_rank() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    piped = pipe.Pipe(_layers(), _balance(dear.size()), mesh=mesh, chunks=4, loss=_loss)
    x, y = _batch(0, 7)
    with pytest.raises(ValueError, match="7 rows cannot be cut into 4 equal micro-batches"):
        piped.step(x, target=y)
    with pytest.raises(ValueError, match="was given list"):
        piped.step([x], target=y)
    for target, said in ((None, "was given none"), (torch.ones(3, 4), "was given one of 3 rows")):
        if dear.size() > 1:
            with pytest.raises(ValueError, match=f"cut into 4 equal micro-batches, and {said}"):
                piped.step(_batch(0, 8)[0], target=target)
    for rows in (8, 3, 16, 8):  # fewer than chunks, and other shapes than before
        x, y = _batch(0, rows)
        piped.zero_grad()
        found = piped.step(x, target=y)
        torch.testing.assert_close(found, _loss(_layers()(x), y).detach())


def test_mistakes_are_told() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    stages = dear.size()
    with pytest.raises(ValueError, match=r"balance=\[4\]|has 3 layers"):
        pipe.Pipe(_layers(), [4] if stages > 1 else [3], mesh=mesh)
    with pytest.raises(ValueError, match="'1f1b', 'gpipe'"):
        pipe.Pipe(_layers(), _balance(stages), mesh=mesh, schedule="2f2b")
    with pytest.raises(ValueError, match="has no axis 'pipeline'"):
        pipe.Pipe(_layers(), _balance(stages), mesh=dear.Mesh(data=-1))
    with pytest.raises(NotImplementedError, match="checkpoint"):
        pipe.Pipe(_layers(), _balance(stages), mesh=mesh, checkpoint="always")
    piped = pipe.Pipe(_layers(), _balance(stages), mesh=mesh)
    with pytest.raises(RuntimeError, match="give Pipe"):
        piped.step(_batch(0)[0])
    with pytest.raises(TypeError, match="or a causal model of transformers"):
        pipe.Pipe(nn.Linear(2, 2), [1], mesh=mesh)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 500))])
def test_random_pipelines_do_not_hang(seed: int) -> None:
    """Sizes, stages, micro-batches and schedules by chance: gradients are those of one process."""
    chance = random.Random(seed)
    stages = chance.choice([each for each in (1, 2, 4) if dear.size() % each == 0])
    layers, rows, chunks = chance.randint(stages, 8), chance.randint(1, 6), chance.randint(1, 6)
    width = chance.randint(1, 40)
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    balance = [b - a for a, b in itertools.pairwise(cuts)]
    torch.manual_seed(seed)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).double()
    piped = pipe.Pipe(
        copy.deepcopy(plain),
        balance,
        mesh=dear.Mesh(data=-1, pipeline=stages),
        chunks=chunks,
        schedule=chance.choice(["1f1b", "gpipe"]),
        loss=_loss,
    )
    x = torch.randn(rows * min(chunks, rows), width, dtype=torch.float64)
    x = x[: len(x) // min(chunks, len(x)) * min(chunks, len(x))]
    for _ in range(2):
        plain.zero_grad()
        piped.zero_grad()
        wanted = _loss(plain(x), x)
        wanted.backward()
        torch.testing.assert_close(piped.step(x, target=x), wanted.detach(), rtol=1e-10, atol=0)
        theirs = dict(plain.named_parameters())
        for name, parameter in piped.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name.split(".", 2)[2]].grad, rtol=1e-8, atol=1e-14)
