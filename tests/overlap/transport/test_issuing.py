"""Operations on copies of a device's tensors are issued in order, by a thread, when the copies are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import comm_core
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
    made = Issuer(host)  # type: ignore[arg-type]
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
    issuer.settle()
    assert host.labels == ["a"]


def test_a_wait_ends_in_time(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    with pytest.raises(comm_core.TimeoutError, match=r"all_reduce 'a' .*not issued: the device has not computed"):
        work.wait(0.01)
    assert "not issued" in work.describe()
    copy.come.set()
    work.wait(10)


def test_who_waits_is_told_why_nothing_was_issued(host: Host, issuer: Issuer) -> None:
    def fail() -> Work:
        raise comm_core.TransportError("rank 1 is gone")

    copy = Copy()
    failing = issuer.issue(copy, fail, _title("a"))
    following = issuer.issue(None, host.start("b"), _title("b"))
    copy.come.set()
    with pytest.raises(comm_core.TransportError, match=r"'a' .*: rank 1 is gone"):
        failing.wait(10)
    assert failing.done()
    assert "rank 1 is gone" in str(failing.exception())
    following.wait(10)
    assert host.committed == 1


def test_a_close_issues_what_is_left_and_takes_nothing_more(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    issuer.issue(copy, host.start("a"), _title("a"))
    threading.Timer(0.05, copy.come.set).start()
    issuer.close()
    assert host.labels == ["a"]
    with pytest.raises(comm_core.InvalidUsage, match="'b': the communicator was closed"):
        issuer.issue(Copy(), host.start("b"), _title("b"))


def test_what_is_abandoned_ends_with_an_error(host: Host, issuer: Issuer) -> None:
    copy = Copy()
    work = issuer.issue(copy, host.start("a"), _title("a"))
    issuer.abandon()
    with pytest.raises(comm_core.TransportError, match="it was given up"):
        work.wait(10)
    assert host.committed == 0
    copy.come.set()
