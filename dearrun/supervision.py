"""Runs mpirun beside dearrun: hands signals on, copies stderr, and ends as mpirun does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dearrun import mpirun
from dearrun.reports import Reports

__all__ = ["supervise"]

_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_LAST_WORDS_SECONDS = 1.0  # that stderr is read after mpirun's end: a process that it left behind may keep it open
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1


def supervise(program: str, command: Sequence[str], environ: Mapping[str, str], reports: Reports) -> NoReturn:
    """Run `program`, an mpirun, and end as it did; where it ended with 0, as `reports` say."""
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
    copier = threading.Thread(target=_copy, args=(incoming, reports), daemon=True)
    copier.start()
    code = _ended(child, heard)
    copier.join(_LAST_WORDS_SECONDS)
    if code == 0:
        code, said = reports.verdict()
        if said:
            sys.stderr.write(f"dearrun: {said}\n")
    if code < 0:
        _end_by(-code)
    sys.exit(code)


def _copy(incoming: int, reports: Reports) -> None:
    """stderr as it comes, without the reports in it. Also where nobody reads it any more, since reports count."""
    while chunk := os.read(incoming, _CHUNK):
        _write(reports.without(chunk))
    _write(reports.rest())


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]


def _ended(child: int, heard: set[signal.Signals]) -> int:
    """The exit code of `child`, negative where a signal ended it. Until then signals are handed on.

    What the kernel sends, such as SIGINT for Ctrl-C, goes to the whole process group: `child` got it as well.
    """
    while True:
        info = signal.sigwaitinfo(heard)
        if info.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:  # by a process
            os.kill(child, info.si_signo)


def _end_by(number: int) -> None:
    """End by this signal, so that whoever waits sees what mpirun ended by."""
    with contextlib.suppress(OSError):  # SIGKILL needs no handler, and takes none
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
