"""Records what communicators are asked to do, for a timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from overlap.trace.events import Event, EventMaker
from overlap.transport.communicator import Communicator, Work
from overlap.transport.work import WatchedWork

__all__ = ["Operations", "WaitSpan"]

_FIRST_LANE = 1000  # communicator k has the tracks from 1000 (k + 1) on

#: Takes (name, started, ended) of a wait on the calling thread.
WaitSpan = Callable[[str, float, float], None]


class _RecordedWork(WatchedWork):
    """Tells `on_wait` of its waits."""

    __slots__ = ("_on_wait", "issued")

    def __init__(self, work: Work, on_wait: WaitSpan) -> None:
        super().__init__(work)
        self._on_wait = on_wait
        self.issued = time.monotonic() - work.seconds

    def _watched(self, wait: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            wait()
        finally:
            self._on_wait(f"wait {self.title}", started, time.monotonic())


class _Channel:
    """The operations of one communicator. Those in flight together get tracks of their own, as low as possible."""

    def __init__(self, name: str, first_lane: int) -> None:
        self._name, self._first_lane = name, first_lane
        self._busy_until: list[float] = []
        self.queue: deque[_RecordedWork] = deque()  # in order of issue

    def _lane(self, started: float, ended: float) -> int:
        for lane, until in enumerate(self._busy_until):
            if until <= started:
                self._busy_until[lane] = ended
                return lane
        self._busy_until.append(ended)
        return len(self._busy_until) - 1

    def finished(self, make: EventMaker, closing: bool) -> list[Event]:
        events: list[Event] = []
        while self.queue and (closing or self.queue[0].done()):
            work = self.queue.popleft()
            args: dict[str, object] = {"bytes": work.nbytes, "communicator": self._name}
            if not work.done():
                args["unfinished"] = True
            elif work.exception() is not None:
                args["failed"] = str(work.exception())
            ended = work.issued + work.seconds
            known = len(self._busy_until)
            lane = self._lane(work.issued, ended)
            track = self._first_lane + lane
            if lane == known:
                events.append(make.track_name(track, f"{self._name}, {lane + 1}"))
            events.append(make.span(work.title, work.op, track, work.issued, ended, **args))
        return events


class Operations:
    """Listens to all communicators of this process from construction to :meth:`stop_listening`."""

    def __init__(self, on_wait: WaitSpan) -> None:
        self._on_wait = on_wait
        self._channels: dict[str, _Channel] = {}
        Communicator.listener = self._heard

    def _heard(self, comm: Communicator, work: Work) -> Work:
        recorded = _RecordedWork(work, self._on_wait)
        channel = self._channels.get(comm.name)
        if channel is None:
            channel = _Channel(comm.name, _FIRST_LANE * (len(self._channels) + 1))
            self._channels[comm.name] = channel
        channel.queue.append(recorded)
        return recorded

    def stop_listening(self) -> None:
        Communicator.listener = None

    def finished(self, make: EventMaker, *, closing: bool = False) -> list[Event]:
        """Events of the operations that are done since the last call, up to each communicator's first that still runs.

        When `closing`, of everything: what still runs is marked as unfinished.
        """
        return [event for channel in list(self._channels.values()) for event in channel.finished(make, closing)]
