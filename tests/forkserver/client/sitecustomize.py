"""Python runs this before a script: it has a server fork the process, and ends as that ended (`tests/forkserver`).

Where no server can do so, nothing happens, and the process starts as ever.
"""

from __future__ import annotations

import array
import contextlib
import marshal
import os
import resource
import signal
import socket
import sys
from typing import Any

_RESULT = 8  # bytes: a process's number, then how it ended
_NAMESPACES = ("ipc", "net", "uts", "mnt")
_FLAGS = ("debug", "dev_mode", "isolated", "no_site", "optimize", "safe_path", "utf8_mode")  # in the order of dir()
_PASSED_ON = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


def _program() -> tuple[str, str, list[str]] | None:
    """What Python was asked to run, and ``sys.argv``, unless it was given other options than ``-u``, ``-m`` and ``-c``."""
    words = [word for number, word in enumerate(sys.orig_argv) if number > 1 or (number == 1 and word != "-u")]
    if len(words) >= 2 and words[0] in ("-m", "-c"):
        return words[0], words[1], [words[0], *words[2:]]
    if words and not words[0].startswith("-") and os.path.isfile(words[0]):
        return "", words[0], words
    return None


def _request(kind: str, what: str, argv: list[str]) -> dict[str, Any]:
    """All that a process inherits, and what of it Python has made."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = os.umask(0)
    os.umask(umask)
    return {
        "kind": kind,
        "what": what,
        "argv": argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "flags": tuple(getattr(sys.flags, name) for name in dir(sys.flags) if name in _FLAGS),
        "unbuffered": "-u" in sys.orig_argv[1:2] or bool(os.environ.get("PYTHONUNBUFFERED")),
        "path": sys.path,
        "environ": dict(os.environb),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": list(os.sched_getaffinity(0)),
        "limits": {number: resource.getrlimit(number) for number in set(limits)},
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        "namespaces": {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES},
    }


def _files() -> list[int]:
    """The files that this process has open; the folder that is read for that is not among them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return found


def _connect(folder: str) -> socket.socket | None:
    """To the server whose turn it is with this rank."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))
    names = sorted(os.listdir(folder))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(folder, names[int(rank) % len(names)]))
    except (OSError, ValueError):
        connection.close()
        return None
    return connection


def _hand_over() -> None:
    program, folder = _program(), os.environ.get("DEAR_TESTS_FORKSERVER")
    if program is None or not folder or not os.path.isdir(folder):
        return
    files = _files()  # before there is a socket
    connection = _connect(folder)
    if connection is None:
        return
    request = marshal.dumps({**_request(*program), "files": files})
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        connection.sendall(len(request).to_bytes(_RESULT, "little") + request)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        connection.sendmsg([b"f"], [rights])
        child = _number(connection)
        if child is None or child == 0:  # the server says that it cannot
            return
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _frame: _pass_on(child, number))
        # The harness sends it to the child, too: a second one would cut short the stacks that the first makes it write.
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if sys.exc_info()[0] is not None:
            connection.close()
    _end_as(_number(connection))


def _number(connection: socket.socket) -> int | None:
    """What the server sends next; None where it has ended."""
    data = b""
    while len(data) < _RESULT:
        try:
            more = connection.recv(_RESULT - len(data))
        except ConnectionError:
            more = b""
        if not more:
            return None
        data += more
    return int.from_bytes(data, "little", signed=True)


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _end_as(status: int | None) -> None:
    """End with the child's exit status, or by the same signal."""
    if status is None:
        status = -signal.SIGKILL
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


os.environ.pop("DEAR_TESTS_PID", None)  # of the process that has started this one
_hand_over()
