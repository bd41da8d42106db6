"""Who posts and who finishes, in which order, and what happens after a failure."""

from __future__ import annotations

import threading

import pytest

import comm_core
from overlap.transport.torch.worker_thread import PendingWork, Task, WorkerThread

MAIN = threading.main_thread()


class Recorded(Task):
    """Writes down what happens to it; its finish goes on when the test says so."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        self.name, self.log, self.error = name, log, error
        self.started, self.go_on = threading.Event(), threading.Event()

    def post(self) -> None:
        self.log.append(f"post {self.name} in {'caller' if threading.current_thread() is MAIN else 'thread'}")
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self.started.set()
        assert self.go_on.wait(10)
        self.log.append(f"finish {self.name}")

    def ask(self) -> None:
        pass

    def fail(self) -> None:
        self.log.append(f"fail {self.name}")


@pytest.fixture
def log() -> list[str]:
    return []


def work(label: str = "") -> PendingWork:
    return PendingWork("all_reduce", label, 0, 2, 8)


def test_the_caller_posts_what_is_alone(log: list[str]) -> None:
    worker, task = WorkerThread("test"), Recorded("A", log)
    pending = worker.submit(work(), task)
    assert log == ["post A in caller"]
    assert not pending.done()
    with pytest.raises(comm_core.TimeoutError, match=r"all_reduce.*running"):
        pending.wait(0.01)
    task.go_on.set()
    pending.wait(10)
    pending.wait(10)  # as often as you like
    worker.close()
    assert log == ["post A in caller", "finish A"]
    assert pending.done()
    assert worker.pending() == []


def test_nothing_is_posted_before_the_operation_ahead_has_finished(log: list[str]) -> None:
    worker = WorkerThread("test")
    a, b = Recorded("A", log), Recorded("B", log)
    works = [worker.submit(work(), task) for task in (a, b)]
    assert worker.pending() == works
    assert a.started.wait(10)
    assert log == ["post A in caller"]
    b.go_on.set()
    a.go_on.set()
    for pending in works:
        pending.wait(10)
    worker.close()
    assert log == ["post A in caller", "finish A", "post B in thread", "finish B"]


def test_after_a_failure_everything_later_fails_and_names_it_and_nothing_is_posted(log: list[str]) -> None:
    worker = WorkerThread("test")
    first = worker.submit(work("one"), Recorded("A", log, ValueError("no wire")))
    second = worker.submit(work("two"), Recorded("B", log))
    with pytest.raises(comm_core.TransportError, match=r"^all_reduce 'one' \([^)]*\): no wire$"):
        first.wait(10)
    with pytest.raises(
        comm_core.TransportError, match=r"^all_reduce 'two' .*not begun; .*: all_reduce 'one' .*no wire$"
    ):
        second.wait(10)
    worker.close()
    assert log == ["post A in caller", "fail A"]
    with pytest.raises(comm_core.InvalidUsage, match="closed"):
        worker.submit(work(), Recorded("C", log))


def test_an_interrupt_while_posting_reaches_the_caller(log: list[str]) -> None:
    worker = WorkerThread("test")
    with pytest.raises(KeyboardInterrupt):
        worker.submit(work(), Recorded("A", log, KeyboardInterrupt()))
    worker.close()
    assert log == ["post A in caller", "fail A"]


def test_closing_carries_out_what_was_issued(log: list[str]) -> None:
    worker, task = WorkerThread("test"), Recorded("A", log)
    pending = worker.submit(work(), task)
    threading.Timer(0.05, task.go_on.set).start()
    worker.close()
    assert pending.done()
    assert log[-1] == "finish A"
