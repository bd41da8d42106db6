"""The carrier that goes through pinned memory and the host's transport, which works everywhere.

    device   | kernel ─┐                                                      ┌─ copy, kernel |
    host               └─▶ copy ─▶ | the host's collective, engine's thread | ┘
                        [1]                                                [2]
    [1] a thread waits for the copy and issues       [2] whoever arrives waits for the collective, not for the copy

Results are those of the host's communicator, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.cuda.communicator import Carrier
from overlap.transport.cuda.issuing import Issuer
from overlap.transport.cuda.streams import Streams
from overlap.transport.cuda.work import StagedWork
from overlap.transport.operation import NOTHING, Collective, Operation

__all__ = ["StagedCarrier"]

# What is received has memory of its own; in the other kinds it replaces what was sent.
_APART = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)


class StagedCarrier(Carrier):
    """A carrier over the communicator `host`."""

    def __init__(self, host: Communicator, streams: Streams) -> None:
        self._host, self._streams, self._issuer = host, streams, Issuer(host, streams.bind)

    def prepare(self, operation: Operation) -> Start:
        one, streams = operation, self._streams
        title = one.kind.value, one.label, one.nbytes
        sends, receives = True, one.recv is not NOTHING
        if one.kind is Collective.BROADCAST:
            sends = self._host.rank == one.root
            receives = not sends

        def start() -> Work:
            mine = streams.pinned(one.send)
            into = streams.pinned(one.recv) if one.kind in _APART else mine
            copied = streams.fetch([(mine, one.send)]) if sends else None
            pairs = ((one.recv, into),) if receives else ()  # device, host
            there = replace(one, send=mine, recv=into)
            work = self._issuer.issue(copied, lambda: self._host.start(there), title)
            return StagedWork(work, lambda stream: streams.bring(pairs, stream), streams.current)

        return start

    def flush(self) -> None:
        self._issuer.flush()

    def pending(self) -> list[Work]:
        return self._issuer.pending()

    def abandon(self) -> None:
        self._issuer.abandon()

    def close(self) -> None:
        self._issuer.close()
