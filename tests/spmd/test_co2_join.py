"""Ranks out of data: averages need every rank, and whoever waits for one that has joined is told so."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch

import co2
from overlap.features.join import CannotJoin
from overlap.job.session import current
from tests.spmd.co2_training import _everywhere, _steps, _wrapped
from tests.spmd.test_uneven_refused import _end_of_a_failed_join


@pytest.fixture(autouse=True)
def _session() -> None:
    co2.init()


def test_joining_together_is_fine_and_alone_is_refused_everywhere() -> None:
    model, optimizer = _wrapped(outer_frequency=3)
    _steps(model, optimizer, range(4))
    co2.join()
    _steps(model, optimizer, range(4, 5))
    if co2.size() == 1:
        return
    go_on = co2.join if co2.rank() == 1 else functools.partial(_steps, model, optimizer, range(5, 12))
    with pytest.raises(CannotJoin, match="an average of parameters needs every rank, and ranks"):
        go_on()
    _end_of_a_failed_join()


WAITING: dict[str, tuple[dict[str, Any], int]] = {  # what rank 1 never sends, as the others have come to it, by number
    "round": ({"outer_frequency": 2}, 1),
    "own outer steps": ({"outer": "eager", "outer_frequency": 2}, 1),
    "fragment": ({"outer": "streaming-diloco", "outer_frequency": 2, "fragments": 1, "overlap_steps": 2}, 1),
    "gradients": ({"outer": "acco", "outer_frequency": 2}, 1),
    "waited fragment": ({"outer": "sparseloco", "outer_frequency": 2}, 1),
    "waited round": ({"outer": "localsgd", "outer_frequency": 2}, 1),
    "warm-up": ({"warmup_steps": 9}, 2),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("case", list(WAITING))
def test_joining_while_others_wait_for_the_rank_is_refused_everywhere(
    case: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if co2.size() == 1:
        return
    monkeypatch.setattr("co2.rounds._LOOK_SECONDS", 0.02)
    arguments, number = WAITING[case]
    model, optimizer = _wrapped(**arguments)
    rounds, waiting = optimizer._rounds, threading.Semaphore(0)
    current().peer_queries.on("test/waiting", lambda _sender, _news: waiting.release())
    _steps(model, optimizer, range(2))
    arrive = rounds.arrive

    def arrive_telling(**options: Any) -> None:
        if rounds._thread is not None and rounds._thread.event == number:
            current().peer_queries.tell(1, "test/waiting")
        arrive(**options)

    def join_late() -> None:
        for _ in range(co2.size() - 1):
            assert waiting.acquire(timeout=20), "the others wait in the round's end"
        co2.join()

    rounds.arrive = arrive_telling
    co2.barrier()
    go_on = join_late if co2.rank() == 1 else functools.partial(_steps, model, optimizer, range(2, 6))
    with pytest.raises(CannotJoin, match=r"an average of parameters needs every rank, and ranks \[1\] have joined"):
        go_on()
    rounds.arrive = arrive
    _end_of_a_failed_join()
    if ends:
        before = [value.clone() for value in model.parameters()]
        current().services["co2"].close()  # which sends the round that is missing
        assert set(co2.allgather_object(rounds.standing)) == {rounds.standing}
        assert all(torch.equal(value, kept) for value, kept in zip(model.parameters(), before, strict=True))
        return
    if co2.rank() == 1:  # or training goes on, where rank 1 has to make up for it
        _steps(model, optimizer, range(2, 3 if case == "warm-up" else 4))
    elif rounds._awaits(rounds._last_sent):
        rounds.begin()
    optimizer.average_parameters()
    assert _everywhere(model)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_joining_alone_in_a_group_is_refused_everywhere(behind: int) -> None:
    """The others of the group need the rank's part in their gradients until they have come to the average."""
    if co2.size() == 1:
        return
    model, optimizer = _wrapped(outer_frequency=4, nprocs_per_node=2)
    _steps(model, optimizer, range(2))
    joined = co2.rank() == 1
    if co2.rank() == 0:  # the other group may come to the average before
        time.sleep(0.03 * behind)
    go_on = co2.join if joined else functools.partial(_steps, model, optimizer, range(2, 9))
    with pytest.raises(CannotJoin, match=r"an average of parameters needs every rank, and ranks \[1\] have joined"):
        go_on()
    assert optimizer._rounds.events == 0 or co2.rank() > 1
    _end_of_a_failed_join()
