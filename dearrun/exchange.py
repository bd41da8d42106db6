"""Carries functions and results between the caller of :func:`dearrun.run.run` and its ranks.

Ranks connect to a socket of the caller's. On one machine that is a file in a folder of its own, which only its user may
enter; with several hosts it is a TCP port. Both sides prove that they have the key of this call before anything is read: it
is made anew for each, and ranks get it in their environment. What is read then is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from dearrun.addresses import own_toward
from dearrun.errors import LaunchError

__all__ = ["VARIABLE", "Answer", "Exchange", "Hello", "Lost", "call", "reply"]

#: Holds where the caller is and the key, in the environment of ranks.
VARIABLE = "DEARRUN_CALLER"
_PATH_BYTES = 60  # of the folder for temporary files: the whole name of a socket has 107
_CONNECT_SECONDS = 60.0
_HELLO_BYTES = 4096
_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Hello:
    """Event: a rank has connected. `size` is how many ranks its launcher says there are."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Event: a rank's result, or its exception.

    `content` is the pickled result, or where it has a `traceback`, the pickled exception.
    """

    rank: int
    content: bytes
    traceback: str = ""
    summary: str = ""  # the last line of the traceback


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a rank's connection has ended, before or after its answer."""

    rank: int


class Exchange:
    """The caller's side of the connections to its ranks. `events` are what ranks have done, as they come."""

    def __init__(self, payload: bytes, names: Sequence[str]) -> None:
        """`names`: other hosts, from which ranks will connect."""
        self._payload, self._key = payload, secrets.token_bytes(32)
        self.events: queue.SimpleQueue[Hello | Answer | Lost] = queue.SimpleQueue()
        self._folder = ""
        if names:
            self._listener = Listener(("", 0), "AF_INET", backlog=4096)
            port = self._listener.address[1]
            places: list[Any] = [[address, port] for address in own_toward(names)]
        else:
            short = len(os.fsencode(tempfile.gettempdir())) <= _PATH_BYTES
            self._folder = tempfile.mkdtemp(prefix="dear-run-", dir=None if short else "/tmp")
            places = [os.path.join(self._folder, "caller")]
            self._listener = Listener(places[0], "AF_UNIX", backlog=4096)
        self.variable = json.dumps({"places": places, "key": self._key.hex()})
        self._closed = False
        self._lock = threading.Lock()  # whoever is served, as long as that is open
        self._served: dict[Connection[Any, Any], threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no more ranks, and close all connections."""
        self._closed = True
        _shut(self._listener._listener._socket.fileno())  # type: ignore[attr-defined]  # ends accept()
        self._accepting.join()
        self._listener.close()
        with self._lock:
            serving = tuple(self._served.values())
            for connection in self._served:
                _shut(connection.fileno())
        for thread in serving:
            thread.join()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN_SECONDS)  # such as too many open files
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._served[connection] = thread
            thread.start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        rank = None
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            told = json.loads(connection.recv_bytes(_HELLO_BYTES))
            rank = int(told["rank"])
            self.events.put(Hello(rank, int(told["size"])))
            connection.send_bytes(self._payload)
            told = json.loads(connection.recv_bytes())
            self.events.put(Answer(rank, connection.recv_bytes(), told["traceback"], told["summary"]))
            connection.recv_bytes()  # nothing comes but the end
        except Exception:
            # Also of strangers, who do not know the key.
            if rank is not None:
                self.events.put(Lost(rank))
        finally:
            with self._lock:  # close() shuts what is open
                del self._served[connection]
                connection.close()


def _shut(descriptor: int) -> None:
    """Whoever waits on this socket is woken."""
    shared = socket.socket(fileno=descriptor)
    try:
        with contextlib.suppress(OSError):
            shared.shutdown(socket.SHUT_RDWR)
    finally:
        shared.detach()


def call(environ: Mapping[str, str], rank: int, size: int) -> tuple[Connection[Any, Any], bytes]:
    """Connect to the caller, on a rank; returns the connection, and the pickled function to call.

    Raises :class:`LaunchError` where it cannot be reached.
    """
    told = json.loads(environ[VARIABLE])
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        for place in told["places"]:
            address = place if isinstance(place, str) else tuple(place)
            try:
                connection = Client(address, authkey=bytes.fromhex(told["key"]))
            except (OSError, EOFError, AuthenticationError) as error:
                problem: Exception = error
                continue
            connection.send_bytes(json.dumps({"rank": rank, "size": size}).encode())
            return connection, connection.recv_bytes()
        if time.monotonic() >= until:
            raise LaunchError(f"rank {rank} cannot reach the caller of dear.run at {told['places']}: {problem}")
        time.sleep(0.2)


def reply(connection: Connection[Any, Any], content: bytes, traceback: str = "", summary: str = "") -> None:
    """Send an :class:`Answer` to the caller."""
    connection.send_bytes(json.dumps({"traceback": traceback, "summary": summary}).encode())
    connection.send_bytes(content)
