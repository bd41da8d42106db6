"""Operations on copies of a device's tensors are issued in order, by a thread, when the copies are there."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import comm_core
from overlap.transport.cuda import issuing
from overlap.transport.cuda.issuing import Issuer
from overlap.transport.work import Work


class Copy:
    """A moment that comes when the test says so."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def done(self) -> bool:
        return self.come.is_set()

    def wait(self) -> None:
        self.come.wait()

    def order_before(self, stream: int) -> None:
        raise AssertionError


class Host:
    """Counts what is issued, as a communicator does."""

    def __init__(self) -> None:
        self.issued = self.promised = 0
        self.labels: list[str] = []
        self.waited: list[str] = []

    @property
    def committed(self) -> int:
        return max(self.issued, self.promised)

    def start(self, label: str) -> Callable[[], Work]:
        def issue() -> Any:
            self.issued += 1
            self.labels.append(label)
            return SimpleNamespace(
                wait=lambda timeout=None: self.waited.append(label),
                done=lambda: True,
                seconds=0.25,
                exception=lambda: None,
            )

        return issue


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def issuer(host: Host) -> Iterator[Issuer]:
    made = Issuer(host, lambda: None)  # type: ignore[arg-type]
    yield made
    made.close()


def _title(label: str) -> tuple[str, str, int]:
    return "all_reduce", label, 8


def test_they_are_issued_in_the_order_in_which_they_were_handed_in(host: Host, issuer: Issuer) -> None:
    """Also one that has no copy to wait for, and one whose copy came before an earlier one's."""
    first, second = Copy(), Copy()
    works = [
        issuer.issue(copy, host.start(name), _title(name)) for copy, name in ((first, "a"), (second, "b"), (None, "c"))
    ]
    second.come.set()
    time.sleep(0.02)
    assert host.labels == []
    assert host.committed == 3, "whoever ends the session knows of all"
    assert [work.label for work in issuer.pending()] == ["a", "b", "c"]
    assert not any(work.done() for work in works)
    first.come.set()
    works[2].wait(10)
    assert host.labels == ["a", "b", "c"]
    assert host.waited == ["c"]
    assert issuer.pending() == []
    assert works[2].seconds == 0.25


def test_the_thread_makes_the_device_its_current_one(host: Host) -> None:
    bound, copy = list[int](), Copy()
    issuer = Issuer(host, lambda: bound.append(threading.get_ident()))  # type: ignore[arg-type]
    work = issuer.issue(copy, host.start("a"), _title("a"))
    copy.come.set()
    work.wait(10)
    assert issuer._thread is not None
    assert bound == [issuer._thread.ident]
    issuer.close()


def test_what_has_nothing_to_wait_for_is_issued_at_once(host: Host, issuer: Issuer) -> None:
    past = Copy()
    past.come.set()
    issuer.issue(None, host.start("a"), _title("a"))
    issuer.issue(past, host.start("b"), _title("b"))
    assert host.labels == ["a", "b"]
    assert host.promised == 0


def test_others_wait_until_all_is_issued(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    issuer.issue(copy, host.start("a"), _title("a"))
    threading.Timer(0.05, copy.come.set).start()
    issuer.flush()
    assert host.labels == ["a"]


def test_a_wait_ends_in_time(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    with pytest.raises(comm_core.TimeoutError, match=r"all_reduce 'a' .*not issued: the device has not computed"):
        work.wait(0.01)
    assert "not issued" in work.describe()
    copy.come.set()
    work.wait(10)


def test_after_one_that_could_not_be_issued_none_is(host: Host, issuer: Issuer) -> None:
    """It would meet the wrong one on other ranks; whoever waits is told why, by the error itself."""

    def fail() -> Work:
        raise RuntimeError("CUDA error: device-side assert triggered")

    copy = Copy()
    failing = issuer.issue(copy, fail, _title("a"))
    following = issuer.issue(None, host.start("b"), _title("b"))
    copy.come.set()
    for work in (failing, following):
        with pytest.raises(RuntimeError, match="device-side assert"):
            work.wait(10)
        assert work.done()
        assert isinstance(work.exception(), comm_core.Error)
        assert work.describe().endswith("not issued)")
    for act in (issuer.flush, lambda: issuer.issue(None, host.start("c"), _title("c"))):
        with pytest.raises(RuntimeError, match="device-side assert"):
            act()
    assert host.labels == []
    assert host.committed == 0


def test_a_copy_that_fails_is_no_result(host: Host, issuer: Issuer) -> None:
    class Lost(Copy):
        def wait(self) -> None:
            super().wait()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copy = Lost()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    copy.come.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work.wait(10)
    assert host.labels == []


def test_who_waits_for_a_copy_does_so_in_its_own_thread(host: Host, issuer: Issuer) -> None:
    """The watchdog sees that a device computes. A wait at a lock would look like a rank that waits for others."""
    waiters = set[int]()

    class Seen(Copy):
        def wait(self) -> None:
            waiters.add(threading.get_ident())
            super().wait()

    copy = Seen()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    threading.Timer(0.05, copy.come.set).start()
    work.wait()
    assert threading.get_ident() in waiters
    copies = [Seen(), Seen()]
    waiters.clear()
    for number, one in enumerate(copies):
        issuer.issue(one, host.start(str(number)), _title(str(number)))
        threading.Timer(0.05, one.come.set).start()
    issuer.flush()
    assert threading.get_ident() in waiters


def test_nothing_is_kept_of_an_operation_that_is_over(host: Host, issuer: Issuer) -> None:
    """Its memory is pinned, and who measures keeps works for long."""

    class Memory:
        pass

    memory, copy = Memory(), Copy()
    alive = weakref.ref(memory)
    start = host.start("a")

    def issue(_memory: Memory = memory) -> Work:
        return start()

    work = issuer.issue(copy, issue, _title("a"))
    del memory, issue
    copy.come.set()
    work.wait(10)
    for _ in range(100):
        if alive() is None:
            break
        time.sleep(0.01)  # until the thread waits for the next
    assert alive() is None
    assert work.done()


def test_a_close_issues_what_is_left_and_takes_nothing_more(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    issuer.issue(copy, host.start("a"), _title("a"))
    threading.Timer(0.05, copy.come.set).start()
    issuer.close()
    assert host.labels == ["a"]
    with pytest.raises(comm_core.InvalidUsage, match="'b': the communicator was closed"):
        issuer.issue(Copy(), host.start("b"), _title("b"))


def test_a_close_gives_up_what_the_device_does_not_come_to(
    host: Host, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "_JOIN_SECONDS", 0.05)
    copy = Copy()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    issuer.close()
    with pytest.raises(comm_core.TransportError, match="it had not been issued"):
        work.wait(10)
    copy.come.set()


def test_what_is_abandoned_is_not_issued_any_more(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    time.sleep(0.02)  # the thread waits for the copy
    issuer.abandon()
    with pytest.raises(comm_core.TransportError, match="it had not been issued"):
        work.wait(10)
    copy.come.set()
    issuer.close()
    assert issuer._thread is not None
    issuer._thread.join(10)
    assert host.labels == []
    assert host.committed == 0
