"""Runs mpirun beside dearrun: forwards signals, copies stderr, and ends as mpirun does, or without it after a while.

mpirun ends workers by SIGTERM, then by SIGKILL. Some do not go even then: a process that waits for a disk or a device that
does not answer (state D). So dearrun waits for a while only, and says which workers are left.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dearrun import mpirun
from dearrun.meeting import Meeting
from dearrun.reports import Place, Reports

__all__ = ["supervise", "told"]

_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}  # after them mpirun ends all workers
_PATIENCE_SECONDS = 30.0  # with an mpirun that was told to end: a worker may save a checkpoint meanwhile
_AFTER_FAILURE_SECONDS = 10.0  # with one whose job has failed, which ends workers at once wherever it reaches them
_KILLED_SECONDS = 5.0  # until what was sent SIGKILL has to be gone
_LAST_WORDS_SECONDS = 1.0  # that stderr is read after mpirun's end: a process that it left behind may keep it open
_LOOK_SECONDS = 0.5
_FIRST_LOOK_SECONDS = 0.05  # what a short script does is over soon
_NAP_SECONDS = 0.05
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1


def supervise(
    program: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    reports: Reports,
    meeting: Meeting | None,
    *,
    failure_ends: bool,
    before_lines: bytes,
) -> NoReturn:
    """Run `program`, an mpirun, and end as it did; where it ended with 0, as `reports` say.

    `meeting` is given for a job whose workers should meet: there, or by ``dear.init()``.
    `failure_ends` says whether this mpirun ends the whole job once a worker has failed.
    `before_lines` is written before lines of stderr: what makes room on a terminal where a progress bar may be.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started dearrun may ignore it: then nobody could be awaited
    heard = {*_FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    incoming, outgoing = os.pipe()
    libc = ctypes.CDLL(None)
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(outgoing, 2)
            if sys.platform == "linux":  # a dearrun that is killed takes its job with it
                os.set_inheritable(incoming, True)  # else mpirun's last words to nobody would end it before its workers
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != mine:
                    os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
            mpirun.become(program, command, environ)
        except BaseException as error:
            os.write(2, f"dearrun: {program} does not run: {error}\n".encode())
            os._exit(127)
    os.close(outgoing)
    copier = threading.Thread(target=_copy, args=(incoming, reports, before_lines), daemon=True)
    copier.start()

    def look() -> None:
        if meeting is not None:
            meeting.look(next((place.process for _, place in _mine(reports)), None))

    def workers() -> list[int]:
        return [place.process for _, place in _mine(reports)]

    code, killed = _ended(child, heard, reports if failure_ends else None, look, workers)
    copier.join(_LAST_WORDS_SECONDS)
    left = _left(reports)
    if killed:
        elsewhere = {rank: place for rank, place in reports.left().items() if place.host != os.uname().nodename}
        left |= dict.fromkeys(elsewhere.items(), "")
    if left:
        code = code if code > 0 else 1
        sys.stderr.write(f"dearrun: {told(left)}\n")
    elif code == 0:
        code, said = reports.verdict()
        if code == 0 and meeting is not None and meeting.missed():
            said = reports.strangers()
        if said:
            sys.stderr.write(f"dearrun: {said}\n")
    if killed:
        code = 1
    if code < 0:
        _end_by(-code)
    sys.exit(code)


def _copy(incoming: int, reports: Reports, before_lines: bytes) -> None:
    """stderr as it comes, without the reports in it. Also where nobody reads it any more, since reports count."""
    at_begin = True  # of a line
    while chunk := os.read(incoming, _CHUNK):
        text = reports.without(chunk)
        if text:
            _write(before_lines + text if at_begin else text)
            at_begin = text.endswith(b"\n")
    _write(reports.rest())


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]


def _ended(
    child: int,
    heard: set[signal.Signals],
    reports: Reports | None,
    look: Callable[[], None],
    workers: Callable[[], Collection[int]] = tuple,
) -> tuple[int, bool]:
    """The exit code of `child`, negative where a signal ended it, and whether it had to be killed.

    Until then signals are handed on. What the kernel sends, such as SIGINT for Ctrl-C, goes to the whole process group:
    `child` got it as well. If it has not ended a while after such a signal, or after a worker has failed, as `reports` may
    say, it is killed, and so is what it has started on this machine, but for `workers`, which are looked at later.
    Meanwhile `look` is called now and then, more often at first.
    """
    until, patience, killed, pause = math.inf, _PATIENCE_SECONDS, False, _FIRST_LOOK_SECONDS
    while True:
        info = signal.sigtimedwait(heard, pause)
        pause = min(_LOOK_SECONDS, pause * 1.05)
        look()
        done, status = os.waitpid(child, os.WNOHANG)  # whatever woke this thread: another one may have taken SIGCHLD
        if done:
            return os.waitstatus_to_exitcode(status), killed
        now = time.monotonic()
        if until == math.inf and reports is not None and reports.failed:
            patience = _AFTER_FAILURE_SECONDS
            until = now + patience
        if now >= until and not killed:
            sys.stderr.write(f"dearrun: mpirun did not end within {patience:g} s and is killed\n")
            # With what would stay behind: ssh to a host that answers no more.
            for process in (child, *_below(child, workers())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            killed = True
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        if info.si_code <= 0:  # by a process
            os.kill(child, info.si_signo)
        if info.si_signo in _ENDING:
            until = min(until, now + _PATIENCE_SECONDS)


def _below(process: int, spared: Collection[int]) -> list[int]:
    """Processes of this machine that `process` has started, and that these have, but those that are `spared`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each and child not in spared]
    return found[1:]


def _mine(reports: Reports) -> list[tuple[int, Place]]:
    """The workers of this machine that have begun and not ended, as far as reported."""
    here = os.uname().nodename
    return [(rank, place) for rank, place in reports.left().items() if place.host == here]


def _left(reports: Reports) -> dict[tuple[int, Place], str]:
    """The workers of this machine that are there after mpirun's end, and after SIGKILL: their states."""
    mine = _mine(reports)
    now = time.monotonic()
    patience, until = now + _LAST_WORDS_SECONDS, now + _LAST_WORDS_SECONDS + _KILLED_SECONDS
    while True:
        found = {worker: state for worker in mine if (state := _state(worker[1])) not in ("", "Z", "X")}
        if not found or time.monotonic() >= until:
            return found
        if time.monotonic() >= patience:
            for _, place in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.process, signal.SIGKILL)
        time.sleep(_NAP_SECONDS)


def _state(place: Place) -> str:
    """Of the process there, a letter as in ps; empty where it is gone."""
    try:
        fields = Path(f"/proc/{place.process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[0] if int(fields[19]) == place.began else ""


def told(left: Mapping[tuple[int, Place], str]) -> str:
    """A message about workers that are left, each with its state, which is empty on another host (pure)."""
    names = [
        f"rank {rank} (process {place.process} on {place.host}{f', state {state}' if state else ''})"
        for (rank, place), state in left.items()
    ]
    return f"the job has ended, and workers are left that could not be killed: {', '.join(names)}"


def _end_by(number: int) -> None:
    """End by this signal, so that whoever waits sees what mpirun ended by."""
    with contextlib.suppress(OSError):  # SIGKILL needs no handler, and takes none
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
