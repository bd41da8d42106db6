"""The format of events in a Chrome trace (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MAIN_TRACK", "Event", "EventMaker"]

Event = dict[str, Any]

#: The track of the thread that started the timeline.
MAIN_TRACK = 0


@dataclass(frozen=True, slots=True)
class EventMaker:
    """Makes one rank's events. `offset` (seconds) turns a moment of ``time.monotonic()`` into the trace's own time."""

    rank: int
    offset: float

    def _microseconds(self, moment: float) -> float:
        return round((moment + self.offset) * 1e6, 1)

    def span(self, name: str, category: str, track: int, started: float, ended: float, **args: Any) -> Event:
        """An event that lasted."""
        times = {"ts": self._microseconds(started), "dur": round((ended - started) * 1e6, 1)}
        event = {"name": name, "cat": category, "ph": "X", "pid": self.rank, "tid": track, **times}
        return {**event, "args": args} if args else event

    def mark(self, name: str, moment: float) -> Event:
        """An event at a moment, shown across all tracks."""
        ts = self._microseconds(moment)
        return {"name": name, "ph": "i", "s": "g", "pid": self.rank, "tid": MAIN_TRACK, "ts": ts}

    def rank_name(self) -> Event:
        return {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}

    def track_name(self, track: int, name: str) -> Event:
        return {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": track, "args": {"name": name}}
