"""Barriers, limits of time, ends of groups, and ranks that do not agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.backend.world import (
    ALL,
    BACKEND,
    OVER_GLOO,
    SEVERAL,
    all_gather_single,
    equal,
    group_of,
    init,
    meet,
    reduce_scatter_single,
)
from tests.spmd_plugin import RANK, SIZE

SHORT, PATIENCE = timedelta(seconds=0.5), 8.0
NOT_GLOO = pytest.mark.skipif(OVER_GLOO, reason="gloo does not do it")


def _still_works() -> None:
    """The default group, after what happened to another one."""
    meet()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((2,), float(SIZE)))


@pytest.mark.parametrize("waits", [False, True])
def test_nobody_leaves_a_barrier_before_all_have_come(waits: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    for turn in range(3):
        key = f"barrier-{waits}-{turn}"
        if turn == RANK:
            time.sleep(0.05)
        store.add(key, 1)
        work = dist.barrier(async_op=waits)
        if waits:
            work.wait()
        assert store.add(key, 0) == SIZE


def test_a_monitored_barrier_that_all_reach() -> None:
    """By the group's own method: torch's function is for gloo alone."""
    world = dist.group.WORLD
    assert world is not None
    for wait_all in (False, True):
        world.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all)


@SEVERAL
def test_a_monitored_barrier_names_the_rank_that_does_not_come() -> None:
    with group_of() as group:
        if RANK != SIZE - 1:
            with pytest.raises(RuntimeError, match=rf"(?i)rank.*{SIZE - 1}" if RANK == 0 else ""):
                group.monitored_barrier(SHORT, wait_all_ranks=True)
        _still_works()


# - Limits of time


@SEVERAL
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("all_reduce", True),
        ("recv", False),
        *(pytest.param(kind, True, marks=pytest.mark.full) for kind in ("broadcast", "recv", "barrier")),
        *(pytest.param(kind, False, marks=pytest.mark.full) for kind in ("all_reduce", "broadcast", "barrier")),
    ],
)
def test_a_limit_of_a_group_holds(kind: str, first: bool) -> None:
    """Also for the first operation of the group, which has to connect its ranks."""
    calls: dict[str, Callable[..., object]] = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(4), group=group),
        "broadcast": lambda group: dist.broadcast(torch.ones(4), SIZE - 1, group=group),
        "recv": lambda group: dist.recv(torch.ones(4), SIZE - 1, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
    with group_of(timeout=SHORT) as group:
        if not first:
            dist.all_reduce(torch.ones(1), group=group)
        if RANK == 0:
            begun = time.monotonic()
            with pytest.raises(RuntimeError):
                calls[kind](group)
            assert SHORT.total_seconds() * 0.5 < time.monotonic() - begun < PATIENCE
        _still_works()


@SEVERAL
def test_a_limit_is_changed() -> None:
    with group_of(timeout=timedelta(seconds=60)) as group:
        dist.all_reduce(torch.ones(1), group=group)
        group._get_backend(torch.device("cpu"))._set_default_timeout(SHORT)  # torch's function is for gloo and NCCL
        if RANK == 0:
            begun = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(4), group=group)
            assert time.monotonic() - begun < PATIENCE
        _still_works()


@SEVERAL
def test_a_wait_has_a_limit_of_its_own() -> None:
    with group_of(timeout=timedelta(seconds=60)) as group:
        if RANK == 0:
            work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
            begun = time.monotonic()
            with pytest.raises(RuntimeError):
                work.wait(SHORT)
            assert time.monotonic() - begun < PATIENCE
        _still_works()


def _reduce_twice(group: Any) -> None:
    """For the first one, a rank that has given up may have sent all that others need."""
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=group)


@SEVERAL
@NOT_GLOO
def test_a_limit_of_one_operation_ends_its_group_on_all_ranks() -> None:
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    with group_of(timeout=timedelta(seconds=60)) as group:
        dist.all_reduce(torch.ones(1), group=group)
        begun = time.monotonic()
        if RANK == 0:
            with pytest.raises(RuntimeError, match=r"0\.5 s"):
                group.allreduce([torch.ones(4)], options).wait()
        meet()
        with pytest.raises(RuntimeError):
            _reduce_twice(group)
        assert time.monotonic() - begun < PATIENCE
        _still_works()


@SEVERAL
def test_ranks_that_come_late_but_in_time() -> None:
    with group_of(timeout=timedelta(seconds=15)) as group:
        if RANK == 0:
            time.sleep(1)
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        equal(tensor, torch.full((4,), float(SIZE)))


# - Ends


def _abort(group: Any) -> None:
    if torch.__version__ >= "2.7":  # torch 2.6 aborts groups over NCCL alone
        distributed_c10d._abort_process_group(group)
    else:
        group.abort()
        dist.destroy_process_group(group)


@SEVERAL
@NOT_GLOO
def test_an_aborted_group_ends_what_waits() -> None:
    group = dist.new_group(ALL, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1), group=group)
    meet()  # a rank that aborts ends what others still wait for
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if RANK == 0 else None
    _abort(group)
    if work is not None:
        begun = time.monotonic()
        with pytest.raises(RuntimeError):
            work.wait()
        assert time.monotonic() - begun < PATIENCE
    _still_works()


def _store_of_its_own(number: int) -> dist.Store:
    return dist.PrefixStore(f"again-{number}", dist.distributed_c10d._get_default_store())


@pytest.mark.parametrize("store", ["the same", "another"])
def test_the_default_group_is_destroyed_and_made_again(store: str) -> None:
    """Under the names that the first one had in its store, or others."""
    if store == "the same" and OVER_GLOO:
        pytest.skip("gloo finds the addresses of the group before")
    for number in range(2):
        inner = dist.new_group(ALL)
        dist.all_reduce(torch.ones(3), group=inner)
        meet()
        options: dict[str, Any] = (
            {"store": _store_of_its_own(number), "rank": RANK, "world_size": SIZE} if store == "another" else {}
        )
        dist.destroy_process_group()
        assert not dist.is_initialized()
        init(**options)
        assert dist.get_backend() == BACKEND
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        equal(tensor, torch.full((2,), float(SIZE)))


def test_two_devices_have_two_backends() -> None:
    with group_of(backend=f"cpu:{BACKEND},cuda:gloo") as group:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        equal(tensor, torch.full((2,), float(SIZE)))
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        assert group._get_backend(torch.device("cpu")).name() == BACKEND


# - Ranks that do not agree: all of them are told


def _disagreements() -> dict[str, Callable[[dist.ProcessGroup], object]]:
    odd = RANK == SIZE - 1
    four = torch.ones(4)
    return {
        "sizes": lambda group: dist.all_reduce(torch.ones(5 if odd else 4), group=group),
        "dtypes": lambda group: dist.all_reduce(four.double() if odd else four, group=group),
        "dtypes of one size": lambda group: dist.all_reduce(four.int() if odd else four, group=group),
        "reductions": lambda group: dist.all_reduce(four, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group),
        "roots": lambda group: (
            dist.broadcast(four, SIZE - 1 if odd else 0, group=group),
            dist.barrier(group=group),  # each has sent its own, and waits for nobody: the next operation tells
        ),
        "operations": lambda group: dist.broadcast(four, 0, group=group) if odd else dist.all_reduce(four, group=group),
        "sizes of parts": lambda group: all_gather_single(
            torch.empty(SIZE * (3 if odd else 4)), torch.ones(3 if odd else 4), group=group
        ),
        "sizes of sums": lambda group: reduce_scatter_single(
            torch.empty(3 if odd else 4), torch.ones(SIZE * (3 if odd else 4)), group=group
        ),
    }


@SEVERAL
@NOT_GLOO
@pytest.mark.parametrize("what", list(_disagreements()))
def test_ranks_that_disagree_are_all_told(what: str) -> None:
    with group_of(timeout=timedelta(seconds=10)) as group:
        dist.barrier(group=group)
        begun = time.monotonic()
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)rank"):
            _disagreements()[what](group)
        assert time.monotonic() - begun < 5.0, "by a comparison, and not by the limit of time"
        _still_works()


@SEVERAL
@NOT_GLOO
def test_a_receiver_with_another_size_is_told() -> None:
    with group_of(timeout=timedelta(seconds=10)) as group:
        if RANK == 0:
            with pytest.raises((RuntimeError, ValueError)):
                dist.recv(torch.empty(5), SIZE - 1, group=group)
        elif RANK == SIZE - 1:
            dist.send(torch.ones(4), 0, group=group)
        _still_works()
