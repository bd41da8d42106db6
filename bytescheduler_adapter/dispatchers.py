"""Gives each optimizer a dispatcher of its own, so that none waits for what another one's ``step()`` makes ready.

[Note: no optimizer holds up another] A parameter that this rank did not use becomes ready in its optimizer's ``step()``. If
rank 0 used it, and had told everybody to send it before something that another optimizer waits for inside its own
``step()``, the one that is called first would wait for the one that comes after it. So each has an order of its own, on a
channel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from bytescheduler_adapter.dispatcher import Dispatcher, Part, PartsWork
from overlap.job.channels import Channels
from overlap.job.groups import leader
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["Dispatchers", "Lease"]


class Lease:
    """One optimizer's use of a dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._number = dispatcher, dispatcher.register()

    def submit(self, bucket: int, parts: list[Part], label: str, credit: int) -> PartsWork:
        """See :meth:`bytescheduler_adapter.dispatcher.Dispatcher.submit`."""
        return self._dispatcher.submit(self._number, bucket, parts, label, credit)


class Dispatchers:
    """All dispatchers of a session; one whose optimizer is gone on every rank is used again.

    An issuer of the session, which ends it.
    """

    def __init__(self, channels: Channels, control: Communicator, heed: Callable[[], None]) -> None:
        """`control` connects all ranks; `heed` raises where ranks are lost."""
        self._channels, self._control, self._heed = channels, control, heed
        self._by_channel: dict[Communicator, Dispatcher] = {}

    def lease(self, topic: str, process_set: ProcessSet) -> Lease:
        """Lease a dispatcher that no other optimizer uses to the optimizer with this topic in the session.

        On every rank of the job, each with its own set. A rank outside of the set it gives has a dispatcher for itself.
        """
        colors: list[int] = []
        if process_set is not global_process_set:
            colors = allgather_object(self._control, leader(process_set, self._control.rank))
        (channel,) = self._channels.lease(1, colors)
        dispatcher = self._by_channel.get(channel)
        if dispatcher is None:
            dispatcher = self._by_channel[channel] = Dispatcher(channel)
        self._channels.hold((channel,), topic)
        return Lease(dispatcher)

    def close(self, given_up: Collection[str]) -> None:
        """See :meth:`overlap.job.services.Issuer.close`."""
        for channel, dispatcher in self._by_channel.items():
            dispatcher.close(given_up=channel.name in given_up)
        for channel, dispatcher in self._by_channel.items():
            if channel.name not in given_up:
                dispatcher.join(self._heed)

    def join(self) -> None:
        """See :meth:`overlap.job.services.Issuer.join`."""
        for dispatcher in self._by_channel.values():
            dispatcher.join()
