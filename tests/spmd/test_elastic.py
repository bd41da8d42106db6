"""Elastic state between ranks: what a commit holds, going back to it, and the functions around training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
from dear import elastic
from tests.spmd.models import MODELS
from tests.spmd.strategies import WRAP


@pytest.fixture
def folder(folder: Path) -> Path:
    """The first commit makes it."""
    return folder / "commits"


def _step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dear.rank())
    optimizer.zero_grad()
    model(torch.randn(4, 9, generator=generator)).square().mean().backward()
    optimizer.step()


def _copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("strategy", ["dear", "dear-rb", "oss", "wfbp", "bytescheduler"])
def test_going_back_to_a_commit_repeats_the_same_steps(strategy: str, wrapped: str, folder: Path) -> None:
    """Whether the optimizer is wrapped before or after the state is made."""
    torch.manual_seed(1)
    model = MODELS["Mlp"]()
    inner = torch.optim.Adam(model.parameters(), 0.05)
    optimizer = WRAP[strategy](inner, model) if wrapped == "before" else inner
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = elastic.TorchState(model, optimizer, scheduler=scheduler, elastic_dir=folder, epoch=0, notes=["a"])
    if wrapped == "after":
        optimizer = WRAP[strategy](inner, model)
    with pytest.raises(elastic.CommitError, match="no commit"):
        state.restore()
    _step(model, optimizer, 0)
    scheduler.step()
    state.epoch = 7
    state.commit()
    committed = _copies(model)
    outcomes = []
    for _ in range(2):
        for seed in (1, 2):
            _step(model, optimizer, seed)
            scheduler.step()
        outcomes.append(_copies(model))
        state.epoch, state.notes = 9, ["b"]
        state.restore()
        assert (state.epoch, state.notes) == (7, ["a"])
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert all(torch.equal(one, other) for one, other in zip(_copies(model), committed, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_sync_takes_rank_0s_values(folder: Path) -> None:
    torch.manual_seed(dear.rank())
    model = torch.nn.Sequential(torch.nn.Linear(9, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + dear.rank()), momentum=0.9)
    _step(model, optimizer, 0)
    state = elastic.TorchState(model, optimizer, elastic_dir=folder, batch=dear.rank() + 5)
    state.sync()
    everywhere = dear.allgather_object((_copies(model), optimizer.state_dict()["state"], state.batch))
    for values, momentum, batch in everywhere:
        assert all(torch.equal(one, other) for one, other in zip(values, everywhere[0][0], strict=True))
        assert torch.equal(momentum[0]["momentum_buffer"], everywhere[0][1][0]["momentum_buffer"])
        assert batch == 5
    assert optimizer.param_groups[0]["lr"] == 0.1


Best = namedtuple("Best", "accuracy epoch")


def test_attributes_keep_their_type(folder: Path) -> None:
    """Rank 0's values, in a dictionary with a default, a counter, an ordered one and a tuple with names."""
    mine = dear.rank() == 0
    state = elastic.ObjectState(
        elastic_dir=folder,
        history=defaultdict(list, {"loss": [torch.ones(2) if mine else torch.zeros(2)]}),
        seen=Counter("aab" if mine else "c"),
        order=OrderedDict(b=1, a=2) if mine else OrderedDict(),
        best=Best(0.5, 3) if mine else Best(0.0, 0),
    )
    state.sync()
    state.history["norm"].append(1.0)
    assert torch.equal(state.history["loss"][0], torch.ones(2))
    assert state.seen == Counter("aab")
    assert state.seen.most_common(1) == [("a", 2)]
    assert isinstance(state.order, OrderedDict)
    assert list(state.order) == ["b", "a"]
    assert state.best == Best(0.5, 3)
    assert state.best.epoch == 3


@pytest.mark.parametrize("how", ["sync", "restore"])
def test_attributes_may_be_parameters_and_tensors_of_any_kind(how: str, folder: Path) -> None:
    """They stay what they are: what a script trains, what is sparse, a view of another one's imaginary part."""
    mine = float(dear.rank() + 1)
    state = elastic.ObjectState(
        elastic_dir=folder,
        prompt=torch.nn.Parameter(torch.full((2,), mine)),
        graph=(torch.eye(3, device="cpu") * mine).to_sparse(),
        phase=torch.tensor([1 + 1j * mine], device="cpu").conj().imag,
    )
    if how == "restore":
        state.save()
        state.prompt, state.graph = torch.nn.Parameter(torch.zeros(2)), None
    getattr(state, how)()
    assert isinstance(state.prompt, torch.nn.Parameter)
    assert state.prompt.tolist() == [1.0, 1.0]
    state.prompt.sum().backward()
    assert torch.equal(state.graph.to_dense(), torch.eye(3, device="cpu"))
    assert state.phase.tolist() == [-1.0]


def test_samplers_learn_what_all_ranks_processed(folder: Path) -> None:
    dear.init()
    data = list(range(10 * dear.size()))
    sampler = elastic.ElasticSampler(data, seed=4)
    sampler.set_epoch(2)
    state = elastic.ObjectState(sampler=sampler, elastic_dir=folder)
    whole = list(sampler)
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    state.commit()
    assert len(sampler.processed_indices) == 6 * dear.size()
    sampler.record_batch(2, 3)  # lost: not committed
    other = elastic.ElasticSampler(data, seed=4)
    elastic.ObjectState(sampler=other, elastic_dir=folder).restore()
    assert other.epoch == 2
    assert list(other) == whole[6:]
    assert len(other) == 4
    other.set_epoch(3)
    assert sorted(i for part in dear.allgather_object(list(other)) for i in part) == data


def test_what_a_sampler_recorded_and_nobody_committed_is_forgotten(folder: Path) -> None:
    """Where a job goes back, and where an epoch begins."""
    sampler = elastic.ElasticSampler(range(10 * dear.size()))
    state = elastic.ObjectState(sampler=sampler, elastic_dir=folder)
    sampler.record_batch(0, 2)
    state.commit()
    committed = set(sampler.processed_indices)
    assert len(committed) == 2 * dear.size()
    sampler.record_batch(1, 2)
    state.restore()
    state.commit()
    assert sampler.processed_indices == committed
    sampler.record_batch(2, 2)
    sampler.set_epoch(1)
    state.commit()
    assert sampler.processed_indices == set()


def test_sync_keeps_what_any_ranks_sampler_recorded(folder: Path) -> None:
    sampler = elastic.ElasticSampler(range(10 * dear.size()))
    state = elastic.ObjectState(sampler=sampler, elastic_dir=folder)
    sampler.record_batch(0, 2)
    state.sync()
    assert len(sampler.processed_indices) == 2 * dear.size()


def test_run_continues_finishes_and_begins_anew(folder: Path) -> None:
    resets: list[int] = []

    def job(fail_at: int | None) -> list[int]:
        state = elastic.ObjectState(elastic_dir=folder, step=dear.rank())
        state.register_reset_callbacks([lambda: resets.append(state.step)])
        done = []

        @elastic.run
        def train(state: Any, upto: int) -> int:
            while state.step < upto:
                done.append(state.step)
                if state.step == fail_at:
                    raise ZeroDivisionError("a bad step")
                state.step += 1
                state.commit()
            return upto

        if fail_at is None:
            assert train(state, upto=5) == 5
        else:
            with pytest.raises(ZeroDivisionError, match="bad step"):
                train(state, upto=5)
        return done

    assert job(fail_at=2) == [0, 1, 2]
    assert job(fail_at=None) == [2, 3, 4]
    assert resets == [2]
    assert not folder.exists()
    dear.barrier()
    assert job(fail_at=None) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match="elastic State and is int"):
        elastic.run(lambda state: state)(3)


def test_a_signal_to_any_rank_stops_all_after_a_commit(folder: Path) -> None:
    state = elastic.ObjectState(elastic_dir=folder, step=0)

    @elastic.run
    def train(state: Any) -> None:
        for state.step in range(1, 100):
            if state.step == 3 and dear.rank() == dear.size() - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            state.commit()

    with pytest.raises(elastic.HostsUpdatedInterrupt, match="SIGUSR1"):
        train(state)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    state.step = 50
    state.restore()
    assert state.step == 3


def test_mistakes_raise_on_all_ranks(folder: Path) -> None:
    state = elastic.ObjectState(elastic_dir=folder, a=1)
    state.save()
    with pytest.raises(elastic.CommitError, match=r"holds \['a'\], and this state \['b'\]"):
        elastic.ObjectState(elastic_dir=folder, b=1).restore()
    with pytest.raises(elastic.CommitError, match="commit 2 could not be written"):
        elastic.ObjectState(elastic_dir=folder, a=lambda: None).save()
    for name in ("commit", "_store"):
        with pytest.raises(ValueError, match=f"named '{name}'"):
            elastic.ObjectState(elastic_dir=folder, **{name: 1})


_OTHER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 7 on another.example")
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""


def test_no_job_begins_where_another_one_commits(folder: Path) -> None:
    @elastic.run
    def train(state: Any) -> None:
        raise AssertionError("another job commits there")

    state = elastic.ObjectState(elastic_dir=folder, a=1)
    other = None
    if dear.rank() == 0:
        folder.mkdir()
        command = [sys.executable, "-S", "-c", _OTHER, str(folder / "lock")]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
    with pytest.raises(elastic.CommitError, match=r"commits is in use by process 7 on another\.example, a job that"):
        train(state)
    if other is not None:
        other.communicate()
    state.save()
