"""A timeline: a Chrome trace, recorded while training, of what is on the wire and what the script does meanwhile.

    listener of all communicators ─▶ operations, issue to done, bytes ─┐
    Work.wait() that has to wait ──▶ waits ────────────────────────────┼─▶ queues ─▶ writer thread ─▶ file
    torch's hooks for everybody ───▶ forward, backward, step, modules ─┘

While nothing is recorded none of it exists: no hook, no thread, and one `is None` per operation.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque

from overlap.trace.events import MAIN_TRACK, Event, EventMaker
from overlap.trace.file import TraceFile
from overlap.trace.operations import Operations
from overlap.trace.phases import Phases

__all__ = ["Timeline", "path_for", "start", "stop"]

log = logging.getLogger("dear")

_FLUSH_SECONDS = 0.2


def path_for(template: str, rank: int) -> str | None:
    """The file of this rank: each rank has one where `template` has ``{rank}``, else only rank 0 (pure)."""
    if "{rank}" in template:
        return template.replace("{rank}", str(rank))
    return template if rank == 0 else None


class Timeline:
    """A recording of this rank, until :meth:`close`.

    Args:
        file: where events go, at the latest a fifth of a second after they happened.
        rank: this rank, the trace's "process".
        epoch: the wall-clock time (seconds) that is 0 in the trace, the same on all ranks.
        mark_cycles: mark the beginning of every optimizer step across all tracks.

    A file that is full, or a disk that is, ends the recording with a warning and never the training.
    """

    def __init__(self, file: TraceFile, rank: int, epoch: float, *, mark_cycles: bool = False) -> None:
        self._file, self._mark_cycles = file, mark_cycles
        self._make = EventMaker(rank, time.time() - time.monotonic() - epoch)
        self._spans: deque[Event] = deque([self._make.rank_name(), self._make.track_name(MAIN_TRACK, "training")])
        self._main_thread = threading.get_ident()
        self._numbers = itertools.count(1)
        self._ended = False  # nothing more is taken in
        self._closing = threading.Event()
        self._phases = Phases(self._span, self._step_begins)
        self._operations = Operations(lambda name, started, ended: self._span(name, "wait", started, ended))
        self._thread = threading.Thread(target=self._run, name="dear-timeline", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        return self._file.path

    # - Taking in, on the threads of the script

    def _span(self, name: str, category: str, started: float, ended: float) -> None:
        if not self._ended:
            main = threading.get_ident() == self._main_thread
            track = MAIN_TRACK if main else threading.get_native_id()
            self._spans.append(self._make.span(name, category, track, started, ended))

    def _step_begins(self) -> None:
        number = next(self._numbers)
        if self._mark_cycles and not self._ended:
            self._spans.append(self._make.mark(f"CYCLE {number}", time.monotonic()))

    # - Writing, on the timeline's own thread, and the rest on the thread that closes

    def _run(self) -> None:
        while not self._ended and not self._closing.wait(_FLUSH_SECONDS):
            self._flush()

    def _flush(self, *, closing: bool = False) -> None:
        events = [self._spans.popleft() for _ in range(len(self._spans))]
        events += self._operations.finished(self._make, closing=closing)
        try:
            if not self._file.append(events):
                self._end_early("the file has reached its limit")
        except OSError as error:
            self._end_early(str(error))

    def _end_early(self, reason: str) -> None:
        self._ended = True
        self._operations.stop_listening()
        log.warning("timeline %s ends here: %s", self.path, reason)
        try:
            self._file.append([self._make.mark(f"timeline ends here: {reason}", time.monotonic())], last_words=True)
        except OSError:
            log.debug("and even that could not be written", exc_info=True)

    def close(self) -> None:
        """Write what is left; operations still in flight are marked as unfinished."""
        self._phases.remove()
        self._operations.stop_listening()
        self._closing.set()
        self._thread.join()
        if not self._ended:
            self._flush(closing=True)
        self._ended = True
        self._file.close()

    def abandon(self) -> None:
        """Drop the recording in a forked child: it is the parent's."""
        self._ended = True
        self._phases.remove()
        self._operations.stop_listening()


_current: Timeline | None = None


def start(template: str, rank: int, epoch: float, *, mark_cycles: bool, max_bytes: int) -> None:
    """Begin to record into the file that :func:`path_for` names. Local; on ranks without a file it does nothing.

    Raises ``RuntimeError`` while another recording goes on, and ``OSError`` where the file cannot be written.
    """
    global _current
    if _current is not None:
        raise RuntimeError(f"a timeline is being recorded to {_current.path} already: call stop_timeline() first")
    path = path_for(template, rank)
    if path is not None:
        _current = Timeline(TraceFile(path, max_bytes), rank, epoch, mark_cycles=mark_cycles)


def stop() -> None:
    """End the recording and write the rest. Without a recording it does nothing."""
    global _current
    if _current is not None:
        timeline, _current = _current, None
        timeline.close()


def _forget_in_child() -> None:
    global _current
    if _current is not None:
        _current.abandon()
        _current = None


os.register_at_fork(after_in_child=_forget_in_child)
