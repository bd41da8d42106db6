"""A communicator for models on a device: its tensors take a carrier, all others the host's communicator.

    bucket on the device ─▶ carrier: NCCL | pinned memory and the host's transport | nothing, for a rank alone
    losses, flags, pickled objects, letters ─▶ host

Each of the two keeps the order in which it was given its operations, and they never meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from comm_core import Unsupported
from overlap.transport.checks import checked
from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.cuda.route import refuse_capture
from overlap.transport.cuda.streams import Streams
from overlap.transport.operation import Collective, Operation
from overlap.transport.stamps import Stamps

__all__ = ["Carrier", "DeviceCommunicator"]


class Carrier(ABC):
    """Moves flat tensors of one device, in a dtype that comm_core knows. What is under way is the host's, if anything."""

    #: Whether each operation is one of the host's communicator, which counts it and tells a timeline.
    through_host = True

    @abstractmethod
    def prepare(self, operation: Operation) -> Start:
        """As :meth:`.Communicator.prepare`, of one that was checked, but no barrier."""

    def flush(self) -> None:  # noqa: B027
        """Have everything issued on the host's communicator that goes there, before something else is."""

    def pending(self) -> list[Work]:
        """The unfinished operations that the host's communicator does not know of."""
        return []

    def abandon(self) -> None:  # noqa: B027
        """End, with an error, unfinished operations that the host's communicator does not know of. On every rank."""

    def close(self) -> None:  # noqa: B027
        """Wait for what was issued. On every rank."""


class DeviceCommunicator(Communicator):
    """The communicator `host`, with a carrier for tensors of the streams' kind of device.

    Close the carrier, then `host`.
    """

    rounds = False

    def __init__(self, host: Communicator, carrier: Carrier, streams: Streams) -> None:
        self._host, self._carrier, self._streams = host, carrier, streams
        self.streams = streams
        self.rank, self.size, self.backend, self.name = host.rank, host.size, host.backend, host.name
        self._kind = streams.kind
        self.place = torch.device(streams.kind, streams.device)
        self.host_waits = carrier.through_host

    @property
    def shard_rank(self) -> int:
        return self._host.shard_rank

    @property
    def shard_size(self) -> int:
        return self._host.shard_size

    def stamps(self) -> Stamps:
        return self._streams.stamps(on_streams=not self._carrier.through_host)

    def prepare(self, operation: Operation) -> Start:
        what = operation.kind.value
        if operation.kind is Collective.BARRIER or operation.send.device.type != self._kind:
            start = self._host.prepare(operation)

            def issue() -> Work:
                self._carrier.flush()
                return start()

            return issue
        if operation.wide is not None:
            raise Unsupported(f"{what}: a carrier of a device rounds nothing; cast on the device before and after")
        carry = self._carrier.prepare(checked(operation, *self.place_of(operation), self._kind))

        def start_there() -> Work:
            reason = refuse_capture(self._streams.capturing())
            if reason is not None:
                raise Unsupported(f"{what}: {reason}")
            work = carry()
            if self._carrier.through_host:
                return work
            self._host.issued += 1  # who leases the channel compares how many there were on each rank
            return self._issued(work)

        return start_there

    # - The host's alone: a tensor of the device is refused there

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        raise Unsupported(
            "a communicator for the tensors of a device is not split; split the host's, and give it a carrier"
        )

    def post(self, peer: int, payload: bytes) -> Work:
        return self._host.post(peer, payload)

    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        return self._host.receive_post(timeout)

    def pending(self) -> list[Work]:
        return [*self._host.pending(), *self._carrier.pending()]

    def abort(self, code: int) -> None:
        self._host.abort(code)

    def abandon(self) -> None:
        self._carrier.abandon()

    def close(self) -> None:
        self._carrier.close()
