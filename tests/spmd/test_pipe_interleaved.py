"""Pipelines whose ranks have several stages each: as in one process."""

from __future__ import annotations

import copy
import itertools
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

import dear
import pipe
from overlap.transport.communicator import Communicator, Work
from tests.spmd import test_pipe_models as models
from tests.spmd import test_pipe_skips as skips

pytestmark = [pytest.mark.four_ranks, pytest.mark.usefixtures("sets_of_a_test")]


def _layers(count: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count))).double()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator).double(), torch.randn(rows, 6, generator=generator).double()


def _stages() -> int:
    """Along the axis `pipeline`; with four ranks, two pipelines beside each other."""
    return min(2, dear.size())


def _of_whole(name: str) -> str:
    return name.split(".", 2)[2]


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "loopedbfs"])
@pytest.mark.parametrize("chunks", [1, 4, *(pytest.param(chunks, marks=pytest.mark.full) for chunks in (2, 5))])
@pytest.mark.parametrize("balance", [[1, 3, 2, 2], pytest.param([1, 1, 2, 1, 1, 2], marks=pytest.mark.full)])
@pytest.mark.parametrize("strategy", ["dear", "wfbp", "fsdp"])
def test_training_equals_one_process(schedule: str, chunks: int, balance: list[int], strategy: str) -> None:
    mesh = dear.Mesh(data=-1, pipeline=_stages())
    shares, mine = mesh.size("data"), mesh.coordinate["data"]
    plain = _layers()
    piped = pipe.Pipe(_layers(), balance, mesh=mesh, chunks=chunks, schedule=schedule, loss=_loss)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    ours = dear.DistributedOptimizer(
        torch.optim.AdamW(piped.parameters(), 0.01), piped, strategy=strategy, process_set=mesh.group("data")
    )
    for step in range(4):
        x, y = _batch(step, 2 * chunks * shares)
        theirs.zero_grad()
        wanted = _loss(plain(x), y)
        wanted.backward()
        wanted_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        theirs.step()
        ours.zero_grad()
        found = piped.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        norm = torch.nn.utils.clip_grad_norm_(piped.parameters(), 0.2)
        torch.testing.assert_close(norm, wanted_norm, rtol=1e-9, atol=0)
        ours.step()
        total = dear.allreduce(found, process_set=mesh.group("data"))
        torch.testing.assert_close(total, wanted.detach(), rtol=1e-9, atol=0)
    saved = plain.state_dict()
    numbers = range(mesh.coordinate["pipeline"], len(balance), _stages())
    assert list(piped.stages) == list(numbers)
    for name, value in piped.state_dict().items():
        torch.testing.assert_close(value, saved[_of_whole(name)], rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        output = piped(_batch(9, 2 * chunks)[0])
    assert (output is None) == (mesh.coordinate["pipeline"] != _stages() - 1)
    if output is not None:
        torch.testing.assert_close(output, plain(_batch(9, 2 * chunks)[0]))


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "loopedbfs"])
@pytest.mark.parametrize("strategy", ["dear", "fsdp"])
def test_each_bucket_is_reduced_once_a_step(strategy: str, schedule: str) -> None:
    """Also where stages of a rank end their backward passes one after the other."""
    mesh = dear.Mesh(data=-1, pipeline=max(1, dear.size() // 2))
    piped = pipe.Pipe(_layers(), [1] * 8, mesh=mesh, chunks=4, schedule=schedule, loss=_loss)
    ours = dear.DistributedOptimizer(
        torch.optim.SGD(piped.parameters(), 0.01), piped, strategy=strategy, process_set=mesh.group("data")
    )
    heard: list[str] = []

    def listen(_comm: Communicator, work: Work) -> Work:
        heard.append(work.op)
        return work

    x, y = _batch(0, 8)
    for step in range(4):
        Communicator.listener = listen if step == 3 else None
        try:
            ours.zero_grad()
            piped.step(x, target=y)
            ours.step()
        finally:
            Communicator.listener = None
    assert heard.count("reduce_scatter") == len(ours._engine.order)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6, 8])
def test_gradients_are_those_of_one_process_bit_for_bit(chunks: int) -> None:
    """Interleaved 1F1B adds micro-batches up from the first to the last. Numbers of rows change from step to step."""
    plain = _layers()
    ranks = dear.size()
    balance = {1: [3, 5], 2: [2, 1, 3, 2], 4: [1] * 8}[ranks]
    mesh = dear.Mesh(data=1, pipeline=-1)
    piped = pipe.Pipe(_layers(), balance, mesh=mesh, chunks=chunks, schedule="interleaved1f1b", loss=_loss)
    theirs = dict(plain.named_parameters())
    for step, each in enumerate((2, 3, 2)):
        x, y = _batch(step, each * chunks)
        plain.zero_grad()
        piped.zero_grad()
        for part, wanted in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (_loss(plain(part), wanted) / chunks).backward()
        piped.step(x, target=y)
        for name, parameter in piped.named_parameters():
            if chunks % max(1, chunks // ranks):  # another schedule stands in, which adds up backwards
                torch.testing.assert_close(parameter.grad, theirs[_of_whole(name)].grad, rtol=1e-10, atol=1e-15)
            else:
                assert torch.equal(parameter.grad, theirs[_of_whole(name)].grad), name


@pytest.mark.parametrize("name", ["u-net", "input", "structures"])
def test_skip_connections_and_structures(name: str) -> None:
    torch.manual_seed(3)
    plain = skips.MODELS[name]()
    balance = {1: [8], 2: [2, 1, 3, 2], 4: [1] * 8}[dear.size()]
    piped = pipe.Pipe(
        copy.deepcopy(plain),
        balance,
        mesh=dear.Mesh(data=1, pipeline=-1),
        chunks=4,
        schedule="interleaved1f1b",
        loss=skips._loss,
    )
    x, y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (skips._loss(plain(part), wanted) / 4).backward()
    piped.step(x, target=y)
    theirs = dict(plain.named_parameters())
    for key, parameter in piped.named_parameters():
        assert torch.equal(parameter.grad, theirs[_of_whole(key)].grad), key


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("strategy", ["dear", "wfbp"])
def test_models_of_transformers_and_tied_weights(name: str, strategy: str) -> None:
    mesh = dear.Mesh(data=-1, pipeline=_stages())
    plain = models.MODELS[name]()
    piped = pipe.Pipe(
        models.MODELS[name](),
        [1, 1, 1, 1],
        mesh=mesh,
        chunks=4,
        schedule="interleaved1f1b",
        loss=models._cross_entropy,
    )
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    ours = dear.DistributedOptimizer(
        torch.optim.AdamW(piped.parameters(), 0.01), piped, strategy=strategy, process_set=mesh.group("data")
    )
    shares, mine = mesh.size("data"), mesh.coordinate["data"]
    for step in range(3):
        x, y = models._words(step)
        theirs.zero_grad()
        ours.zero_grad()
        wanted = models._cross_entropy(models._logits(plain, x), y)
        wanted.backward()
        found = piped.step(x.chunk(shares)[mine], target=y.chunk(shares)[mine])
        total = dear.allreduce(found, process_set=mesh.group("data"))
        torch.testing.assert_close(total, wanted.detach(), rtol=1e-8, atol=0)
        theirs.step()
        ours.step()


def test_steps_are_explained_and_a_balance_measured() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    x, y = _batch(0, 8)
    piped = pipe.Pipe(_layers(), "auto", mesh=mesh, chunks=4, schedule="interleaved1f1b", loss=_loss, sample=x[:2])
    ranks = dear.size()
    assert len(piped.balance) == 2 * ranks
    for _ in range(3):
        piped.step(x, target=y)
    told = piped.explain()
    assert f"stage {dear.rank()}, {dear.rank() + ranks} of {2 * ranks}, layers " in told
    assert re.search(r"schedule +interleaved1f1b$", told, re.MULTILINE)
    assert f"{100 * (ranks - 1) / (8 + ranks - 1):.1f} % of a step of nothing else" in told
    with pytest.raises(RuntimeError, match="this rank has the stages"):
        _ = piped.stage


def test_mistakes_are_told_on_every_rank() -> None:
    mesh = dear.Mesh(data=1, pipeline=-1)
    ranks = dear.size()
    if ranks == 1:
        return
    with pytest.raises(ValueError, match=rf"has {ranks + 1} stages, and the axis 'pipeline' {ranks} ranks: give each"):
        pipe.Pipe(_layers(), [8 - ranks, *[1] * ranks], mesh=mesh, schedule="interleaved1f1b")
    with pytest.raises(ValueError, match=f"or take schedule='interleaved1f1b', with a multiple of {ranks} stages"):
        pipe.Pipe(_layers(), [9 - 2 * ranks, *[1] * (2 * ranks - 1)], mesh=mesh)
    shared = nn.Linear(6, 6)
    layers = [nn.Linear(6, 6) for _ in range(2 * ranks)]
    layers[0] = layers[ranks] = shared
    with pytest.raises(NotImplementedError, match=f"of stage 0 is .* of stage {ranks}, too"):
        pipe.Pipe(nn.Sequential(*layers), [1] * 2 * ranks, mesh=mesh, schedule="interleaved1f1b")


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 300))])
def test_random_pipelines_do_not_hang(seed: int) -> None:
    """Stages, layers, micro-batches and schedules by chance: gradients are those of one process."""
    chance = random.Random(seed)
    ranks = chance.choice([each for each in (1, 2, 4) if dear.size() % each == 0])
    stages = ranks * chance.randint(1, 3)
    layers, rows, chunks = chance.randint(stages, stages + 4), chance.randint(1, 3), chance.randint(1, 9)
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    balance = [b - a for a, b in itertools.pairwise(cuts)]
    plain = _layers(layers)
    piped: Any = pipe.Pipe(
        _layers(layers),
        balance,
        mesh=dear.Mesh(data=-1, pipeline=ranks),
        chunks=chunks,
        schedule=chance.choice(["interleaved1f1b", "loopedbfs"]),
        loss=_loss,
    )
    for step in range(2):
        x, y = _batch(step, rows * chunks)
        plain.zero_grad()
        piped.zero_grad()
        wanted = _loss(plain(x), y)
        wanted.backward()
        torch.testing.assert_close(piped.step(x, target=y), wanted.detach(), rtol=1e-10, atol=0)
        theirs = dict(plain.named_parameters())
        for name, parameter in piped.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[_of_whole(name)].grad, rtol=1e-8, atol=1e-14)
