"""Starts the processes of tests in milliseconds: they are forked from one in which torch is imported.

Python runs `client/sitecustomize.py` before anything else wherever that folder is on PYTHONPATH. It hands the process over
to a server: arguments, environment, open files, namespaces and limits. The server (`server.py`) forks, and its child runs
the program. The process that asked stays, passes signals on, and ends as the child did, so launchers notice nothing.

    mpirun, torchrun, dearrun ──starts──▶ python script.py ──asks──▶ server ──forks──▶ script.py
                     ▲                     waits for it                                   │
                     └────────── ends as that did ◀────────── how it ended ◀──────────────┘

A process that cannot be forked starts as ever: with options of Python's, or with variables that torch reads when it is
imported. Tests of the start itself, or of the end, ask for that (the marker `real_start`, and `tests.harness.run_ranks`).

There are two servers, and ranks take them in turn: each has hashes of its own, as real processes have.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["CLIENT", "VARIABLE", "environment", "listening"]

VARIABLE = "DEAR_TESTS_FORKSERVER"  # the servers' folder; without it, and where it is empty, processes start as ever
CLIENT = Path(__file__).parent / "client"
SERVERS = 2
_SERVER = Path(__file__).parent / "server.py"


def environment(env: Mapping[str, str], *, real_start: bool = False) -> dict[str, str]:
    """`env` for a process that a server is to fork, or that is to start as a user's does."""
    others = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(CLIENT))]
    path = {"PYTHONPATH": os.pathsep.join(others if real_start else [str(CLIENT), *others])}
    left_out = {"DEAR_TESTS_PID", *([VARIABLE] if real_start else [])}  # the first is of who starts the process
    return {**{name: value for name, value in env.items() if name not in left_out}, **path}


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Have servers for all processes that are started meanwhile; each begins when it is asked for the first time.

    They end with this process, whatever ends it, and what they have forked ends with them.
    """
    folder = tempfile.mkdtemp(prefix="dear-forkserver-")
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(SERVERS)]
    for number, listener in enumerate(listeners):
        listener.bind(os.path.join(folder, str(number)))
        listener.listen(128)
    stop, over = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(listeners, over), name="forkserver", daemon=True)
    thread.start()
    before = dict(os.environ)
    os.environ.update(environment({**os.environ, VARIABLE: folder}))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        stop.close()
        thread.join()
        over.close()
        shutil.rmtree(folder)


def _serve(listeners: Sequence[socket.socket], over: socket.socket) -> None:
    """Begin a server when somebody comes, until the other end of `over` is closed; then end them."""
    servers: list[subprocess.Popen[bytes]] = []
    waiting = list(listeners)
    while True:
        readable, _, _ = select.select([*waiting, over], [], [])
        if over in readable:
            break
        for listener in readable:
            servers.append(_start(listener, over))
            waiting.remove(listener)
            listener.close()
    for server in servers:
        server.wait()
    for listener in waiting:
        listener.close()


def _start(listener: socket.socket, over: socket.socket) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # with one thread there is none that a fork would lack
    files = [listener.fileno(), over.fileno()]
    command = [sys.executable, str(_SERVER), *map(str, files)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, pass_fds=files, start_new_session=True)
