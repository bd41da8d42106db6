"""What the watchdog reports while every rank answers, without any other rank."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from overlap.health.deadlock import Standing
from overlap.health.watchdog import Watchdog
from overlap.transport.work import Line


class _Operation:
    """Asked for at time 0."""

    seconds = 0.0

    def describe(self) -> str:
        return "allreduce 'lost'"


class _Ended(Exception):
    pass


def _end(_status: int) -> None:
    raise _Ended


class _Clock:
    """Second by second, a watchdog judges an operation that does not end; rank 1 answers where it is told so."""

    def __init__(self, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watchdog, self.operation, self.now, self.asked = watchdog, _Operation(), 100.0, list[float]()
        self.answers = lambda second: False
        monkeypatch.setattr("overlap.health.watchdog.time.monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog, "_ask_all", self._ask)

    def _ask(self) -> dict[int, Standing | None]:
        self.asked.append(self.operation.seconds)
        here = self.watchdog._standing()
        return {0: here, 1: here if self.answers(self.operation.seconds) else None}

    def run(self, until: int) -> None:
        for second in range(1, until + 1):
            self.now, self.operation.seconds = 100.0 + second, float(second)
            self.watchdog._judge(self.operation)


def test_a_rank_that_does_not_answer_ends_the_job_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = _Clock(_watchdog(), monkeypatch)
    with caplog.at_level(logging.WARNING, "dear"), pytest.raises(_Ended):
        clock.run(70)
    assert clock.operation.seconds == 61
    assert clock.asked == [31, 35, 39, 43, 47, 51, 55, 59, 61]
    assert "rank 1: no answer" in caplog.text
    assert "rank(s) [1] on b will not come" in caplog.text


@pytest.mark.parametrize(("from_", "to", "ends"), [(40, 61, False), (61, 80, False), (61, 90, True), (31, 70, True)])
def test_a_rank_that_does_not_answer_for_a_while_is_not_lost(
    from_: int, to: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter is busy: it compiles, say, or loads a file."""
    clock = _Clock(_watchdog(), monkeypatch)
    clock.answers = lambda second: not from_ <= second < to
    if ends:
        with pytest.raises(_Ended):
            clock.run(120)
    else:
        clock.run(120)


def test_who_waits_is_told_apart_from_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    comm: Any = SimpleNamespace(rank=0, size=1, abort=_end, pending=list, lines=dict)
    limits = {"warn_after": 3.0, "abort_after": 0.0}
    operation = _Operation()
    operation.seconds = 4.0
    for mine in (True, False):
        watchdog = Watchdog(comm, SimpleNamespace(), "here", **limits)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "dear"):
            watchdog._judge(operation, mine)
    said = [record.getMessage().split(". All ranks")[0] for record in caplog.records]
    assert said == ["rank 0 has waited 4 s for allreduce 'lost'", "allreduce 'lost' has waited 4 s"]


def test_an_operation_goes_on_being_reported_after_the_time_at_which_dead_ranks_end_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def abort(_status: int) -> None:
        raise AssertionError("every rank answers")

    comm: Any = SimpleNamespace(rank=0, size=1, abort=abort, pending=list, lines=dict)
    limits = {"warn_after": 3.0, "abort_after": 6.0}
    watchdog = Watchdog(comm, SimpleNamespace(), "here", **limits)  # type: ignore[arg-type]
    operation = _Operation()
    with caplog.at_level(logging.WARNING, "dear"):
        for second in range(1, 21):
            operation.seconds = float(second)
            monkeypatch.setattr("overlap.health.watchdog.time.monotonic", lambda now=100.0 + second: now)
            watchdog._judge(operation)
    waited = [int(record.getMessage().split(" has waited ")[1].split()[0]) for record in caplog.records]
    assert waited == [4, 7, 10, 13, 16, 19]


def _watchdog(rank: int = 0, *, warn_after: float = 0.0, abort_after: float = 60.0) -> Watchdog:
    comm: Any = SimpleNamespace(rank=rank, size=1, abort=_end, pending=list, lines=dict)
    others: Any = SimpleNamespace()
    watchdog = Watchdog(comm, others, "here", warn_after=warn_after, abort_after=abort_after)
    watchdog.connected(["a", "b"], warn_after=warn_after, abort_after=abort_after)
    return watchdog


@pytest.mark.parametrize(
    ("left_for", "still", "waited", "here", "ends"),
    [
        pytest.param(6.0, 6.0, 10.0, "training", True, id="it left before it came to this"),
        pytest.param(4.0, 6.0, 10.0, "training", False, id="its threads may have come here meanwhile"),
        pytest.param(6.0, 4.0, 10.0, "training", False, id="this rank has just gone on"),
        pytest.param(6.0, 6.0, 10.0, "in shutdown", False, id="this rank leaves as well"),
        pytest.param(6.0, 0.0, 61.0, "training", False, id="this rank computes, and it has just left"),
        pytest.param(61.0, 0.0, 61.0, "training", True, id="this rank computes, and its time is over"),
        pytest.param(61.0, 0.0, 61.0, "in shutdown", False, id="its time is over, and this rank leaves as well"),
    ],
)
def test_a_rank_that_has_left_ends_the_job_where_this_one_waits_for_it(
    left_for: float, still: float, waited: float, here: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, operation = _watchdog(), _Operation()
    mine = Standing(text="", still_seconds=still, lines={"a": Line(8, ("barrier",))})
    monkeypatch.setattr("overlap.health.watchdog.time.monotonic", lambda: 100.0)
    monkeypatch.setattr(watchdog, "_standing", lambda: mine)
    monkeypatch.setattr(watchdog, "_ask_all", lambda: {0: mine, 1: Standing(text="", lines={"a": Line(7, ())})})
    watchdog._left[1] = 100.0 - left_for
    watchdog._here, operation.seconds = here, waited
    if ends:
        with pytest.raises(_Ended):
            watchdog._judge(operation)
    else:
        watchdog._judge(operation)


@pytest.mark.parametrize("state", ["connecting", "training", "in shutdown"])
def test_a_rank_that_does_not_answer_ends_the_job_in_every_state(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog, operation = _watchdog(), _Operation()
    monkeypatch.setattr(watchdog, "_ask_all", lambda: {0: watchdog._standing(), 1: None})
    watchdog._here, operation.seconds = state, 61.0
    watchdog._unanswered[1] = time.monotonic() - 30.0
    with caplog.at_level(logging.WARNING, "dear"), pytest.raises(_Ended):
        watchdog._judge(operation)
    assert "rank 1: no answer (b)\nrank(s) [1] on b will not come; aborting the job" in caplog.text


def test_what_has_ended_while_others_were_asked_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be gone by then, since they waited for no more than this."""
    watchdog, operation = _watchdog(), _Operation()
    monkeypatch.setattr(watchdog, "_ask_all", lambda: {0: watchdog._standing(), 1: None})
    watchdog._here, operation.seconds = "in shutdown", 61.0
    watchdog._unanswered[1] = time.monotonic() - 30.0
    operation.done = lambda: True  # type: ignore[attr-defined]
    watchdog._judge(operation)


def test_a_question_that_cannot_be_sent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent through a store that answers no more, say; nor is another one sent behind it."""
    monkeypatch.setattr("overlap.health.watchdog._QUESTION_SECONDS", 0.1)
    over, asked, answered = threading.Event(), list[int](), Future[Any]()
    answered.set_result(None)

    def ask(rank: int, _topic: str) -> Future[Any]:
        asked.append(rank)
        over.wait(60)
        return answered

    watchdog = _watchdog()
    watchdog._comm = SimpleNamespace(rank=0, size=2, pending=list, lines=dict)  # type: ignore[assignment]
    watchdog._peer_queries = SimpleNamespace(ask=ask)  # type: ignore[assignment]
    for _ in range(2):
        assert watchdog._ask_all()[1] is None
    assert asked == [1]
    over.set()
    assert watchdog._asking is not None
    watchdog._asking.join(60)


@pytest.mark.parametrize(
    ("still", "quiet", "patient", "given_up"),
    [(0.0, 61.0, False, True), (0.0, 61.0, True, False), (0.0, 59.0, False, False), (61.0, 61.0, False, False)],
    ids=["it loops", "this rank is out of data", "it goes on", "it waits itself"],
)
def test_who_computes_for_ever_is_given_up_where_ranks_may_be_lost(
    still: float, quiet: float, patient: bool, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, operation, gone = _watchdog(), _Operation(), list[int]()
    watchdog.give_up, watchdog.is_patient = gone.extend, lambda: patient
    mine = Standing(text="", still_seconds=61.0, lines={"a": Line(8, ("barrier",))})
    other = Standing(text="", still_seconds=still, quiet_seconds=quiet, lines={"a": Line(7, ())})
    monkeypatch.setattr(watchdog, "_standing", lambda: mine)
    monkeypatch.setattr(watchdog, "_ask_all", lambda: {0: mine, 1: other})
    monkeypatch.setattr(watchdog, "_end", lambda answers, report: False)
    operation.seconds = 61.0
    watchdog._judge(operation)
    assert gone == ([1] if given_up else [])


def test_who_is_out_of_data_is_patient(caplog: pytest.LogCaptureFixture) -> None:
    watchdog, operation = _watchdog(warn_after=3.0, abort_after=0.0), _Operation()
    operation.seconds = 4.0
    watchdog.is_patient = lambda: True
    with caplog.at_level(logging.WARNING, "dear"):
        watchdog._judge(operation)
    assert not caplog.records


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_in_which_nobody_goes_on_is_ended_by_a_rank_that_waits(rank: int) -> None:
    """The other one looks at nothing, since it has nothing under way that it could look at."""
    answers = {
        0: Standing(text="", still_seconds=60.0, lines={"a": Line(7, ())}),
        1: Standing(text="", still_seconds=60.0, lines={"a": Line(8, ("barrier",))}),
    }
    if rank == 1:
        with pytest.raises(_Ended):
            _watchdog(rank)._end(answers, "")
    else:
        assert _watchdog(rank)._end(answers, "")


def test_a_rank_can_be_told_if_its_threads_wait_for_names_alone() -> None:
    """Those that live: one that has asked for something and ended does not wait."""
    ended = threading.Thread(target=str)
    ended.start()
    ended.join()
    main = threading.main_thread().ident
    lines: dict[str, Line] = {}
    names: Any = SimpleNamespace(threads={ended.ident}, asked=2, undecided=1, pending=list, lines=lambda: lines)
    names.waits_for_a_decision = lambda thread: thread == main
    watchdog = _watchdog()
    watchdog.watch_names(names)
    assert watchdog._standing().can_be_told
    lines["set"] = Line(3, ("allreduce",))
    assert not watchdog._standing().can_be_told
    lines.clear()
    names.waits_for_a_decision = lambda thread: False
    assert not watchdog._standing().can_be_told


def test_of_a_name_on_host_and_device_the_one_that_has_come_further_counts() -> None:
    watchdog = _watchdog()
    for line in (Line(4, ("barrier",)), Line(5, ())):
        source: Any = SimpleNamespace(pending=list, lines=lambda line=line: {"a": line})
        watchdog.watch(source)
    assert watchdog._look() == {"a": Line(5, ("barrier",))}
