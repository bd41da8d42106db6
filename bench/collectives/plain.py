"""The limit of a ring: plain TCP between the same ranks, with the same messages in the same pattern, and no arithmetic.

In a ring of P ranks, each sends a P-th of the buffer to the next one and receives one from the rank before it, P - 1 times
for a reduce-scatter or an all-gather, and twice as often for an all-reduce. The next part leaves when one has arrived.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Callable

from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["ROUNDS", "PlainRing"]

#: How often each of P ranks sends a part in the ring of an operation, in multiples of P - 1.
ROUNDS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}
_STRIPE_BYTES = 2**16  # of a part, at least, for each of several connections
_PATIENCE_SECONDS = 60.0


class PlainRing:
    """Connections from each rank to the next one, and from the one before it. Made and used on every rank.

    `meet` is an address that all ranks reach: each takes the one of its own from which it does.
    """

    def __init__(self, comm: Communicator, meet: str, connections: int) -> None:
        self._size = comm.size
        with socket.create_server((_own_address(meet), 0), backlog=connections) as listener:
            listener.settimeout(_PATIENCE_SECONDS)
            following = allgather_object(comm, listener.getsockname())[(comm.rank + 1) % comm.size]
            self._out = [socket.create_connection(following, _PATIENCE_SECONDS) for _ in range(connections)]
            for number, connection in enumerate(self._out):
                connection.sendall(bytes([number]))
            self._in = _accepted(listener, connections)
        for connection in (*self._out, *self._in):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self._sent, self._received = bytearray(), bytearray()

    def pass_on(self, nbytes: int, rounds: int) -> None:
        """Send, and receive, the parts of a buffer of `nbytes` bytes: `rounds` times the P - 1 of them."""
        part = max(1, nbytes // self._size)
        if len(self._sent) < part:
            self._sent, self._received = bytearray(part), bytearray(part)
        for _ in range(rounds * (self._size - 1)):
            self._exchange(memoryview(self._sent)[:part], memoryview(self._received)[:part])

    def _exchange(self, sent: memoryview, received: memoryview) -> None:
        """One part to the next rank and one from the rank before, in both directions at once."""
        count = max(1, min(len(self._out), len(sent) // _STRIPE_BYTES))
        cuts = [len(sent) * number // count for number in range(count + 1)]
        stripes = [slice(*ends) for ends in itertools.pairwise(cuts)]
        sending = {one: sent[stripe] for one, stripe in zip(self._out, stripes, strict=False)}
        receiving = {one: received[stripe] for one, stripe in zip(self._in, stripes, strict=False)}
        while sending or receiving:
            moved = [_moved(sending, one, socket.socket.send) for one in list(sending)]
            moved += [_moved(receiving, one, socket.socket.recv_into) for one in list(receiving)]
            if not any(moved) and not any(select.select(list(receiving), list(sending), [], _PATIENCE_SECONDS)):
                raise ConnectionError(f"plain TCP between ranks: nothing moved for {_PATIENCE_SECONDS:g} s")

    def close(self) -> None:
        for connection in (*self._out, *self._in):
            connection.close()


def _own_address(meet: str) -> str:
    """This host's address from which it reaches `meet`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meet, 9))
        return str(probe.getsockname()[0])


def _accepted(listener: socket.socket, count: int) -> list[socket.socket]:
    """So many connections, in the order of the numbers that each begins with."""
    arrived = {}
    for _ in range(count):
        connection, _ = listener.accept()
        connection.settimeout(_PATIENCE_SECONDS)
        arrived[connection.recv(1)] = connection
    return [arrived[number] for number in sorted(arrived)]


def _moved(
    left: dict[socket.socket, memoryview], one: socket.socket, move: Callable[[socket.socket, memoryview], int]
) -> int:
    """Move what goes at once of what is `left` for a connection; the number of bytes."""
    try:
        count = move(one, left[one])
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionError("plain TCP between ranks: a connection was closed")
    left[one] = left[one][count:]
    if not left[one]:
        del left[one]
    return count
