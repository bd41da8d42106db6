"""A relay for TCP connections, as a network between a job and its store that a test can break."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable
from enum import Enum

__all__ = ["Network", "Relay"]

_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset
_LOOK_SECONDS = 0.05


class Network(Enum):
    WHOLE = "whole"
    RESETS = "resets"
    """Connections are reset, those that are open and new ones."""
    DROPS = "drops"
    """One way: what the store sends is lost, and nobody is told."""


class Relay:
    """Listens at `port`, and connects whoever comes to `target`, which is asked for with each connection."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self.network = Network.WHOLE
        self._other: dict[socket.socket, socket.socket] = {}  # the two sides of each connection
        self._stores: set[socket.socket] = set()  # those that lead to the target
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._selector.register(self._server, selectors.EVENT_READ)
        self.port: int = self._server.getsockname()[1]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in list(self._other):
            one.close()
        self._server.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if self.network is Network.RESETS:
                while self._other:
                    self._drop(next(iter(self._other)))
            for key, _ in self._selector.select(_LOOK_SECONDS):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj in self._other:
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._server.accept()
        if self.network is Network.RESETS:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        store = socket.create_connection(self._target())
        self._stores.add(store)
        for one, other in ((client, store), (store, client)):
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data and (self.network is Network.WHOLE or source not in self._stores):
                self._other[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(source)

    def _drop(self, one: socket.socket) -> None:
        """Close the connection on both sides."""
        for side in (one, self._other.pop(one)):
            self._selector.unregister(side)
            self._other.pop(side, None)
            self._stores.discard(side)
            if self.network is Network.RESETS:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            side.close()
