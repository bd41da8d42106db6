"""The carrier of a rank that is alone: copies on the stream of the computation."""

from __future__ import annotations

from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.cuda.communicator import Carrier
from overlap.transport.cuda.work import StagedWork
from overlap.transport.operation import Operation, barrier

__all__ = ["AloneCarrier"]


class AloneCarrier(Carrier):
    """A `Carrier` for a `host` communicator of one rank. Results are there when an operation was issued.

    What the host's communicator is given is the empty operation of that kind, so that it is counted and recorded.
    """

    def __init__(self, host: Communicator) -> None:
        assert host.size == 1, "more ranks exchange something"
        self._host = host

    def prepare(self, operation: Operation) -> Start:
        send, recv, counted = operation.send, operation.recv, self._host.prepare(barrier(label=operation.label))

        def start() -> Work:
            if recv.data_ptr() != send.data_ptr():
                recv.copy_(send)
            return StagedWork(counted(), lambda _stream: None, lambda: 0)

        return start
