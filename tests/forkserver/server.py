"""``python server.py SOCKET OVER``: imports torch, then forks a process for each client that asks (`tests/forkserver`).

It ends when nobody holds the other end of OVER any more.

The child leaves `_serve`, takes over what its client had, and runs the program at the end of this file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import marshal
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from typing import Any, NoReturn

_ENVIRON = dict(os.environ)  # torch changes it while it is imported
_IMPORTED = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing"),
    *("pytest", "mpi4py", "tqdm"),
)
# What libraries read while they are imported, so that it has to be as it was here; but for what is read later.
_READ_AT_IMPORT = (
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "PYTHON", "LD_PRELOAD", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
)
_READ_LATER = (
    *("PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR"),
)
_SIZE = 8  # bytes of a number on the wire, as in client/sitecustomize.py
_FILES = 250  # at most in one message, by the kernel's rule


class _Client:
    """A process that wants to be forked: first its request comes, later its child's end is told."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.child = 0  # the number of the process that was forked for it, until that has ended
        self.is_there = True

    def request(self) -> tuple[dict[str, Any] | None, list[int]]:
        """What it asks for, and the files that are to have the numbers in ``request["files"]``."""
        with contextlib.suppress(EOFError, ConnectionError):
            size = int.from_bytes(self._read(_SIZE), "little")
            wanted = marshal.loads(self._read(size))
            _, files, _, _ = socket.recv_fds(self.connection, 1, _FILES)
            return (wanted if len(files) == len(wanted["files"]) else None), list(files)
        return None, []

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.connection.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def child_ended(self) -> None:
        _, status = os.waitpid(self.child, 0)
        self.child = 0
        self.tell(os.waitstatus_to_exitcode(status))
        self.connection.close()

    def tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.sendall(number.to_bytes(_SIZE, "little", signed=True))


def _serve(listener: socket.socket, over: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Never returns but in a child, with what that has to become."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(over, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client = _Client(listener.accept()[0])
                asked = _fork_for(client)
                if client.child == 0 and asked is not None:
                    # Closed where they are known: what is collected later would close numbers that are others' by then.
                    for other in [client.connection, *(k.fileobj for k in selector.get_map().values())]:
                        if isinstance(other, socket.socket):
                            other.close()
                    selector.close()
                    return asked
                if client.child:
                    selector.register(client.connection, selectors.EVENT_READ, client)
                    selector.register(os.pidfd_open(client.child), selectors.EVENT_READ, client)
            elif key.fileobj is over:
                for client in {other.data for other in selector.get_map().values()} - {None}:
                    if client.child:
                        os.kill(client.child, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is not key.data.connection:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                if key.data.is_there:
                    selector.unregister(key.data.connection)
                key.data.child_ended()
            elif key.data.child:  # the client has ended, and nobody waits for its child
                os.kill(key.data.child, signal.SIGKILL)
                selector.unregister(key.fileobj)
                key.data.is_there = False


def _fork_for(client: _Client) -> tuple[dict[str, Any], list[int]] | None:
    """In the child, what it has to become; None in the server, where the client has a child unless that is impossible."""
    request, files = client.request()
    if request is not None and _possible(request):
        client.child = os.fork()
        if client.child == 0:
            return request, files
    for file in files:
        os.close(file)
    client.tell(client.child)
    if client.child == 0:
        client.connection.close()
    return None


def _possible(request: dict[str, Any]) -> bool:
    """Whether a fork of this process is what a start would be."""
    theirs = {os.fsdecode(name): os.fsdecode(value) for name, value in request["environ"].items()}
    return (
        not any(request["flags"])
        and request["executable"] == sys.executable
        and _at_import(theirs) == _at_import(_ENVIRON)
    )


def _at_import(environ: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    }


def _inherit(request: dict[str, Any], files: list[int]) -> None:
    """Take over all that the client's process has from whoever started it."""
    os.setsid()
    _enter(request)
    os.environ.clear()
    os.environb.update(request["environ"])
    os.environ["DEAR_TESTS_PID"] = str(request["pid"])  # by which launchers know it
    with open("/proc/self/comm", "w") as name:  # by which the harness does, since /proc tells the server's environment
        name.write(os.environ.get("DEAR_TEST_JOB", "forked"))
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.sched_setaffinity(0, request["cores"])
    for number, limit in request["limits"].items():
        resource.setrlimit(number, limit)
    _open(request["files"], files)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _enter(request: dict[str, Any]) -> None:
    """Enter those of the client's namespaces that are not this process's, the one of mounts last."""
    others = []
    for name, number in request["namespaces"].items():
        if os.stat(f"/proc/self/ns/{name}").st_ino != number:
            others.append(os.open(f"/proc/{request['pid']}/ns/{name}", os.O_RDONLY))
    for file in others:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _open(numbers: list[int], files: list[int]) -> None:
    """Give `files` these numbers, and close all others."""
    beyond = max([*numbers, *files]) + 1
    moved: list[int] = []
    for file in files:
        moved.append(beyond + len(moved))
        os.dup2(file, moved[-1])
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in moved:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def _prepare(request: dict[str, Any]) -> None:
    """Bring Python into the state in which a program of its begins."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, "strict", request["unbuffered"])  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace", True)  # type: ignore[misc]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv[:] = request["orig_argv"]
    sys.argv[:] = request["argv"]
    first = {"": os.path.dirname(os.path.realpath(request["what"])), "-m": os.getcwd(), "-c": ""}[request["kind"]]
    sys.path[:] = [first, *request["path"]]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    import numpy
    import torch

    numpy.random.seed()  # as at its import, by the system's randomness
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # It starts threads, which a real process does later: no signal may go astray there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    torch.set_num_threads(int(threads) if threads.isdigit() else len(request["cores"]))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__


def _writer(number: int, errors: str, flushed: bool) -> io.TextIOWrapper:
    buffer = open(number, "wb", closefd=False)  # noqa: SIM115
    at_once = flushed or os.isatty(number)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=at_once, write_through=flushed)


def _code(request: dict[str, Any]) -> types.CodeType:
    """The program, if it is a script or was given as text."""
    if request["kind"] == "-c":
        return compile(request["what"], "<string>", "exec", dont_inherit=True)
    path = os.path.abspath(request["what"])
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"].__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _run(request: dict[str, Any]) -> None:
    if request["kind"] == "-m":
        runpy._run_module_as_main(request["what"])  # type: ignore[attr-defined]
    else:
        exec(_code(request), sys.modules["__main__"].__dict__)


def _status(request: dict[str, Any]) -> int:
    """Run the program, tell of an exception as Python does, and return the exit status."""
    try:
        _run(request)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next  # without the frames of this file
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End as Python does, but without taking its modules apart: for those of torch that takes a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _request, _files = _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    _inherit(_request, _files)
    _prepare(_request)
    _end(_status(_request))
