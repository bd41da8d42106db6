"""What a session does with communicators on which some ranks have issued more than others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlap.health.shutdown import close_all, report, uneven
from overlap.transport.communicator import Communicator


def test_communicators_are_uneven_where_two_of_their_ranks_differ() -> None:
    assert uneven([{"a": 3, "b": 1}, {"a": 3, "b": 2}, {"a": 3}]) == {"b"}
    assert uneven([{"a": 3}, {"b": 4}, {}]) == set(), "each is of one rank's group only"
    assert uneven([]) == set()


def _fake(name: str, told: list[str], *labels: str) -> Communicator:
    works = [SimpleNamespace(op="reduce_scatter", label=label) for label in labels]
    works.insert(0, SimpleNamespace(op="post", label="a letter, which goes by itself"))
    return cast(
        Communicator,
        SimpleNamespace(
            name=name,
            pending=lambda: works,
            abandon=lambda: told.append(f"abandon {name}"),
            close=lambda: told.append(f"close {name}"),
        ),
    )


def test_what_is_uneven_is_abandoned_and_everything_closed_in_order() -> None:
    told: list[str] = []
    close_all([_fake("a", told), _fake("b", told), _fake("c", told)], {"b"})
    assert told == ["close a", "abandon b", "close b", "close c"]


def test_what_is_given_up_is_named(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    caplog.set_level(logging.WARNING, logger="dear")
    report(1, [_fake("a", told, "b9"), _fake("b", told, "b0", "b1"), _fake("c", told, "b2", "b3")], {"b", "c"})
    (line,) = caplog.messages
    assert "rank 1: at shutdown, 4 operation(s) are given up that other ranks never issued" in line
    assert "reduce_scatter 'b0', reduce_scatter 'b1', reduce_scatter 'b2', …." in line
    caplog.clear()
    report(1, [_fake("a", told, "b9"), _fake("b", told)], {"b"})
    assert not caplog.messages
