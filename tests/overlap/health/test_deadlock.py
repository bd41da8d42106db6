"""When a job is known to stand still for ever, and where threads are, without any other rank."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import dear
from overlap.health.deadlock import Standing, Verdict, behind, verdict
from overlap.health.stacks import Place, place, places
from overlap.transport.work import Line

assert dear  # a front door: its modules are ours


def _still(seconds: float = 60.0, undecided: int = 0, told: bool = False, **lines: Line) -> Standing:
    return Standing(text="", still_seconds=seconds, undecided=undecided, can_be_told=told, lines=lines)


BY_NAME = _still(undecided=1, told=True)
IDLE = Line(issued=7, unfinished=())
FIRST = Line(issued=8, unfinished=("barrier",))


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        pytest.param([BY_NAME, BY_NAME], Verdict.RAISE, id="different names"),
        pytest.param([BY_NAME, _still(undecided=1, told=True, control=IDLE)], Verdict.RAISE, id="others' names"),
        pytest.param([BY_NAME, _still(59.0, undecided=1, told=True)], Verdict.WAIT, id="not for long enough"),
        pytest.param([BY_NAME, _still(0.0)], Verdict.WAIT, id="one computes, or is in a debugger"),
        pytest.param([BY_NAME, _still(0.0, undecided=1)], Verdict.WAIT, id="one computes with an operation under way"),
        pytest.param(
            [_still(undecided=1, told=True, a=IDLE), _still(a=FIRST)], Verdict.ABORT, id="a name and a collective"
        ),
        pytest.param([_still(a=FIRST, b=IDLE), _still(a=IDLE, b=FIRST)], Verdict.ABORT, id="two collectives"),
        pytest.param([_still(a=FIRST), _still(a=FIRST)], Verdict.WAIT, id="a long transfer"),
        pytest.param(
            [_still(a=Line(9, ("barrier", "barrier"))), _still(a=FIRST)], Verdict.WAIT, id="a long transfer, one ahead"
        ),
        pytest.param([_still(a=FIRST), _still(a=Line(8, ()))], Verdict.WAIT, id="a transfer, done on one"),
        pytest.param(
            [_still(a=FIRST), _still(a=Line(8, ("reduce",)))], Verdict.ABORT, id="collectives that never match"
        ),
        pytest.param([_still(a=FIRST), _still(a=FIRST), _still(a=IDLE)], Verdict.ABORT, id="one of three never comes"),
        pytest.param([_still(a=FIRST), _still(a=FIRST), BY_NAME], Verdict.WAIT, id="a group's long transfer"),
        pytest.param([_still(), _still()], Verdict.WAIT, id="nothing that we know of"),
        pytest.param([], Verdict.WAIT, id="nobody answers"),
    ],
)
def test_a_job_is_given_up_when_no_rank_can_go_on_and_not_before(standings: list[Standing], expected: Verdict) -> None:
    assert verdict(standings, 60.0) is expected


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        pytest.param({"a": FIRST}, {"a": IDLE}, True, id="never issued"),
        pytest.param({"a": FIRST}, {"a": FIRST}, False, id="a long transfer"),
        pytest.param({"a": FIRST}, {"a": Line(8, ())}, False, id="done there"),
        pytest.param({"a": IDLE}, {"a": Line(3, ())}, False, id="done here"),
        pytest.param({"a": FIRST, "b": IDLE}, {"b": Line(0, ())}, False, id="a group it is no part of"),
        pytest.param({"a": Line(9, ("reduce", "reduce"))}, {"a": FIRST}, False, id="come to the oldest"),
    ],
)
def test_who_is_behind_has_not_issued_what_this_rank_waits_in(
    mine: dict[str, Line], theirs: dict[str, Line], expected: bool
) -> None:
    assert behind(mine, {1: theirs, 2: mine}) == ([1] if expected else [])


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["overlap.core.round", "overlap.core.step", "dear", "__main__"], Place.INSIDE),
        (["dear.api", "__main__"], Place.INSIDE),
        (["threading", "threading", "overlap.horovod.controller.operation", "__main__"], Place.AT_A_LOCK),
        (["threading", "queue", "overlap.features.join", "__main__"], Place.AT_A_LOCK),
        (["threading", "queue", "torch.utils.data.dataloader", "__main__"], Place.OUTSIDE),
        (["torch.optim.adam", "overlap.core.shards", "__main__"], Place.OUTSIDE),
        (["cmd", "pdb", "bdb", "overlap.core.round", "__main__"], Place.OUTSIDE),
        (["__main__", "overlap.core.step", "torch.optim.lbfgs", "__main__"], Place.OUTSIDE),
        (["threading", "__main__"], Place.OUTSIDE),
        ([], Place.OUTSIDE),
    ],
)
def test_who_waits_is_the_innermost_of_what_is_not_a_lock(modules: list[str], expected: Place) -> None:
    assert place(modules) is expected


def test_threads_are_found_where_they_are() -> None:
    ours = SimpleNamespace(queue=queue.SimpleQueue(), event=threading.Event())
    names = {"__name__": "overlap.somewhere", "ours": ours}
    exec("def wait():\n    ours.queue.put(1)\n    ours.event.wait()\n", names)
    thread = threading.Thread(target=names["wait"])  # type: ignore[arg-type]
    thread.start()
    ours.queue.get()
    assert thread.ident is not None
    for _ in range(5000):  # it may not have come to the wait yet
        found = places([thread.ident])
        if found == {Place.AT_A_LOCK}:
            break
        assert found == {Place.INSIDE}
        time.sleep(0.001)
    ours.event.set()
    thread.join()
    assert found == {Place.AT_A_LOCK}
    assert places([thread.ident]) == set()


def test_looking_at_a_thread_keeps_nothing_of_it_alive() -> None:
    """Tensors of a training loop would outlive it until the next garbage collection."""
    ready, go_on = threading.Event(), threading.Event()
    local: list[Callable[[], object]] = []

    class Tensor:
        pass

    def train() -> None:
        tensor = Tensor()
        local.append(weakref.ref(tensor))
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    for _ in range(3):
        assert Place.OUTSIDE in places([thread.ident, threading.get_ident()])
    go_on.set()
    thread.join()
    assert local[0]() is None
