"""Python's side of tests/cpp/gpu_double: a CUDA driver and an NCCL in memory, and communicators over them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import comm_core
from comm_core import Buffer, DType
from tests.cpp.build import compile_to, compiler
from tests.harness import ROOT

__all__ = ["Double", "DoubleMoment", "build", "eventually"]

DTYPES = {
    np.dtype(np.float32): DType.FLOAT32,
    np.dtype(np.float64): DType.FLOAT64,
    np.dtype(np.int16): DType.INT16,
    np.dtype(np.int64): DType.INT64,
    np.dtype(np.bool_): DType.BOOL,
}


@functools.cache
def build() -> Path:
    """Compile the double; a library that stands for libcuda and libnccl both. A process loads one."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-double-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "libgpu_double.so"
    source = ROOT / "tests" / "cpp" / "gpu_double" / "gpu_double.cpp"
    command = [compiler(), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(source)]
    compile_to(path, command)
    return path


class DoubleMoment:
    """`overlap.transport.cuda.work.Moment` in the double."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self._library, self._event = library, ctypes.c_void_p()
        library.cuEventCreate(ctypes.byref(self._event), 2)
        library.cuEventRecord(self._event, ctypes.c_void_p(stream))

    def done(self) -> bool:
        return int(self._library.cuEventQuery(self._event)) == 0

    def wait(self) -> None:
        eventually(self.done)

    def order_before(self, stream: int) -> None:
        self._library.cuStreamWaitEvent(ctypes.c_void_p(stream), self._event, 0)

    def __del__(self) -> None:
        self._library.cuEventDestroy_v2(self._event)


class Double:
    """All ranks of a job with a GPU each, in this process."""

    DEVICES = 8  # each keeps one piece of memory for good

    def __init__(self, path: Path) -> None:
        from comm_core import _nccl

        self.path, self._backend = path, _nccl
        _nccl.load(str(path), str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.double_stream.restype = ctypes.c_size_t
        self._library.double_log.restype = ctypes.c_size_t
        self._open: list[comm_core.Communicator] = []
        self._kernels: list[Any] = []
        self._failures: list[BaseException] = []

    def world(self, size: int) -> list[comm_core.Communicator]:
        """A communicator for each rank."""
        made = self._backend.unique_id()
        comms = [self._backend.connect(made, rank, size, rank) for rank in range(size)]
        self._open += comms
        self.log()
        return comms

    def split(
        self, comms: list[comm_core.Communicator], colors: list[int | None]
    ) -> list[comm_core.Communicator | None]:
        numbers = [-1 if color is None else color for color in colors]
        self._library.double_colors((ctypes.c_int * len(numbers))(*numbers), len(numbers))
        parts = [comm.split(color) for comm, color in zip(comms, colors, strict=True)]
        self._open += [part for part in parts if part is not None]
        return parts

    def stream(self) -> int:
        """A stream of the computation's."""
        return int(self._library.double_stream())

    def name(self, stream: int) -> str:
        """As the log calls it."""
        return f"s{self._library.double_number(ctypes.c_void_p(stream))}"

    def kernel(self, stream: int, target: np.ndarray, source: np.ndarray) -> None:
        """Copy `source` into `target` when the stream comes to it."""
        self._library.double_copy(
            ctypes.c_void_p(stream), ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
        )  # fmt: skip

    def call(self, stream: int, compute: Callable[[], None]) -> None:
        """Run `compute` when the stream comes to it; an exception of its fails the test at :meth:`close`."""

        def kernel() -> None:
            try:
                compute()
            except BaseException as error:
                self._failures.append(error)

        self._kernels.append(ctypes.CFUNCTYPE(None)(kernel))
        self._library.double_call(ctypes.c_void_p(stream), self._kernels[-1])

    def nap(self, stream: int, seconds: float) -> None:
        """A kernel that takes so long."""
        self._library.double_nap(ctypes.c_void_p(stream), int(1e3 * seconds))

    def moment(self, stream: int) -> DoubleMoment:
        """An event after what the stream was given so far."""
        return DoubleMoment(self._library, stream)

    def capture(self, stream: int, on: bool) -> None:
        self._library.double_capture(ctypes.c_void_p(stream), int(on))

    def run(self, seed: int = 0) -> int:
        """Let the device work until nothing moves; how many tasks are stuck."""
        return int(self._library.double_run(seed))

    @contextmanager
    def working(self) -> Iterator[None]:
        """The device works by itself meanwhile."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(0.002):
                self.run()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def fail(self, function: str, code: int) -> None:
        """The next call of `function` returns `code`."""
        self._library.double_fail(function.encode(), code)

    def hang(self, function: str) -> None:
        """The next call of `function` returns when its communicator was aborted."""
        self._library.double_hang(function.encode())

    def trouble(self, rank: int, code: int) -> None:
        """NCCL finds out that something went wrong, some time after the calls."""
        self._library.double_trouble(rank, code)

    def alive(self, what: str) -> int:
        return int(self._library.double_alive(what.encode()))

    def log(self) -> list[str]:
        """Calls since the last look, events numbered from 1 as they appear."""
        text = ctypes.create_string_buffer(1 << 20)
        self._library.double_log(text, ctypes.c_size_t(len(text)))
        lines = text.value.decode().splitlines()
        numbers: dict[str, str] = {}
        self._library.double_clear()
        return [re.sub(r"\be\d+", lambda m: numbers.setdefault(m[0], f"e{len(numbers) + 1}"), line) for line in lines]

    def close(self) -> None:
        """Close what the test made, and see that everything was given back."""
        with self.working():
            while self._open:
                self._open.pop().close()
        self.run()
        self._kernels.clear()

        def given_back() -> bool:
            self.run()
            gc.collect()
            return [self.alive("comms"), self.alive("events")] == [0, 0] and self.alive("memory") <= self.DEVICES

        eventually(given_back)
        self._library.double_reset()
        failures, self._failures = self._failures, []
        assert not failures, failures

    def memory(self, array: np.ndarray, rank: int, stream: int = 0, owner: object = None) -> Buffer:
        return Buffer(
            array.ctypes.data,
            array.size,
            DTYPES[array.dtype],
            owner=array if owner is None else owner,
            device=rank,
            stream=stream,
        )


def eventually(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another thread to bring it about."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
