"""A forked child, as a DataLoader's worker is one: it is no rank, and must not write to its parent's connections."""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_core
import dear
from overlap.core.round import GradientChanged
from overlap.job.session import current
from overlap.transport.operation import all_reduce, barrier
from tests.spmd.strategies import PACKAGES, WRAP


@pytest.fixture(autouse=True, scope="module")
def alone() -> None:
    """A fork waits for the optimizers of other tests, too, and its children take their threads' objects along."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _in_child(act: Callable[[], object]) -> str:
    """What `act` raises in a forked child of this process, "" for nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        faulthandler.dump_traceback_later(10)
        text = ""
        try:
            act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        if not select.select([pipe], [], [], 25)[0]:
            os.kill(child, signal.SIGKILL)  # its alarm was not set: it is still in the hooks of fork()
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung or crashed"
    return text


def test_a_childs_operations_raise_and_its_parents_go_on() -> None:
    comm = current().comm
    if comm.size == 1:
        return
    mine = torch.full((1000,), float(dear.rank()))
    sum_of_ranks = float(sum(range(comm.size)))
    uses: list[Callable[[], Any]] = [
        lambda: dear.allreduce(torch.ones(3)),
        lambda: comm.run(all_reduce(mine.clone(), mine.clone())),
        lambda: comm.post((comm.rank + 1) % comm.size, b"x"),
        lambda: comm.split(0),
    ]
    comm.run(barrier())
    for use in uses:
        if comm.rank == 0:
            assert _in_child(use).startswith(comm_core.Error.__name__)
        total = torch.empty_like(mine)
        comm.run(all_reduce(mine, total))
        assert bool((total == sum_of_ranks).all())
    assert dear.allreduce(torch.ones(3), op=dear.Sum).tolist() == [float(comm.size)] * 3
    if comm.rank == 0:
        assert _in_child(comm.close) == "" == _in_child(comm.abandon)
    comm.run(barrier())


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_child_cannot_train_on(strategy: str) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = WRAP[strategy](torch.optim.Adam(model.parameters()), model)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    for _ in range(2):
        train()
    if dear.size() > 1 and dear.rank() == 0:
        assert "forked child" in _in_child(train)
    with torch.no_grad():
        model(torch.ones(3, 4))
    before = model.weight.detach().clone()
    if dear.size() > 1 and dear.rank() == 0:
        assert "forked child" in _in_child(train)
        if strategy in ("dear-layerwise", "oss"):  # whose state the other ranks have parts of
            assert "forked child" in _in_child(optimizer.state_dict)
    assert torch.equal(model.weight, before)
    train()
    weights = dear.allgather_object(model.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)


@pytest.mark.parametrize("strategy", PACKAGES)
def test_a_child_has_final_values(strategy: str) -> None:
    """Right after step(), when the parent's are still on their way."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.01), model)
    reading, writing = os.pipe()
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((3, 300), float(dear.rank() + step))).square().mean().backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.write(writing, struct.pack("d", _fingerprint(model)))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "the child hung or crashed"
        assert struct.unpack("d", os.read(reading, 8))[0] == _fingerprint(model)
    os.close(reading)
    os.close(writing)


def test_what_goes_wrong_before_a_fork_is_raised_by_the_next_look() -> None:
    """A fork has nobody to raise it to."""
    model = torch.nn.Linear(4, 2)
    optimizer = WRAP["bytescheduler"](torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        gradient = model.weight.grad
        optimizer.step()
    assert gradient is not None
    gradient.mul_(2)  # while its update is still to come
    assert _in_child(lambda: None) == ""
    with pytest.raises(GradientChanged, match="after step"):
        model(torch.ones(3, 4))


@torch.no_grad()
def _fingerprint(model: torch.nn.Module) -> float:
    return float(model(torch.ones(1, 300)).double().sum())
