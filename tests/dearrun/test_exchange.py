"""How a caller and its ranks talk: who may connect and when, and what is left when the caller closes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from dearrun import exchange as module
from dearrun.errors import LaunchError
from dearrun.exchange import VARIABLE, Answer, Exchange, Hello, Lost, call, reply


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    made = Exchange(b"the call", [])
    yield made
    made.close()


def _called(exchange: Exchange, rank: int = 0) -> Connection[Any, Any]:
    connection, payload = call({VARIABLE: exchange.variable}, rank, 2)
    assert payload == b"the call"
    return connection


def _has_ended(connection: Connection[Any, Any]) -> bool:
    """Whether the other side has hung up."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while connection.poll():
            connection.recv_bytes()
        return False
    return True


def _events(exchange: Exchange, count: int) -> list[Hello | Answer | Lost]:
    return [exchange.events.get(timeout=30) for _ in range(count)]


def test_a_rank_says_that_it_is_there_what_it_has_to_say_and_when_it_goes(exchange: Exchange) -> None:
    connection = _called(exchange, 1)
    reply(connection, b"result", "trace", "summary")
    connection.close()
    assert _events(exchange, 3) == [Hello(1, 2), Answer(1, b"result", "trace", "summary"), Lost(1)]


def test_no_connection_is_left_open_when_the_caller_closes() -> None:
    """Of ranks at work, and of somebody who has not said yet who it is."""
    exchange = Exchange(b"the call", [])
    place = json.loads(exchange.variable)["places"][0]
    before = threading.active_count()
    connections = [_called(exchange), _called(exchange, 1), Client(place)]
    exchange.close()
    assert all(_has_ended(connection) for connection in connections)
    assert threading.active_count() < before
    for connection in connections:
        connection.close()


def test_ranks_may_leave_while_the_caller_closes() -> None:
    for _ in range(100):
        exchange = Exchange(b"the call", [])
        connections = [_called(exchange, rank) for rank in range(4)]
        together = threading.Barrier(2)

        def leave(connections: list[Connection[Any, Any]] = connections, together: Any = together) -> None:
            together.wait()
            for connection in connections:
                connection.close()

        thread = threading.Thread(target=leave)
        thread.start()
        together.wait()
        exchange.close()
        thread.join()


def test_a_rank_tries_every_place_until_the_caller_is_there(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first place is another host's, and the second one is not there yet."""
    told = json.loads(exchange.variable)
    place, later = told["places"][0], str(tmp_path / "later")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        os.symlink(place, later)

    monkeypatch.setattr("dearrun.exchange.time.sleep", sleep)
    variable = json.dumps({**told, "places": [str(tmp_path / "nowhere"), later]})
    connection, payload = call({VARIABLE: variable}, 0, 1)
    connection.close()
    assert (payload, len(waited)) == (b"the call", 1)


def test_a_rank_that_cannot_reach_its_caller_says_where_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 0.0)
    place = str(tmp_path / "nowhere")
    with pytest.raises(LaunchError, match=rf"^rank 3 cannot reach the caller of dear.run at \['{place}'\]: "):
        call({VARIABLE: json.dumps({"places": [place], "key": "00"})}, 3, 4)


def test_a_caller_with_too_many_open_files_lets_ranks_in_later(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = Listener.accept, iter([OSError(errno.EMFILE, "Too many open files")])

    def accepting(listener: Any) -> Any:
        for failure in failures:
            raise failure
        return accept(listener)

    monkeypatch.setattr(Listener, "accept", accepting)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.0)
    exchange = Exchange(b"the call", [])
    with Client(json.loads(exchange.variable)["places"][0]) as connection:
        assert connection.poll(30), "it is asked for the key"
    exchange.close()


def test_a_caller_with_too_many_open_files_can_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def dup(_descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    exchange = Exchange(b"the call", [])
    connection = _called(exchange)
    monkeypatch.setattr(os, "dup", dup)
    exchange.close()
    assert _has_ended(connection)
    connection.close()


def test_a_long_folder_for_temporary_files_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    exchange = Exchange(b"the call", [])
    place = Path(json.loads(exchange.variable)["places"][0])
    _called(exchange).close()
    exchange.close()
    assert not place.parent.exists()
