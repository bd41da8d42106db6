"""``dear.run``: calls a function in every rank of a job of its own, and returns what they return."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import logging
import os
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO, TypeVar

import comm_core
from dearrun import cli, command, mpirun, options, pickling
from dearrun.course import Course
from dearrun.errors import LaunchError, RankError
from dearrun.exchange import VARIABLE, Answer, Exchange
from dearrun.hosts import others
from dearrun.inherited import without_launcher
from overlap.job import cores
from overlap.transport import unpickling

__all__ = ["run"]

T = TypeVar("T")

log = logging.getLogger("dear")

_WORKER = (sys.executable, "-m", "dearrun.function")
_LOOK_SECONDS = 0.2
_END_SECONDS = 60.0  # until a job that was told to end is killed: dearrun itself waits for less


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout: float = 120.0,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    verbose: bool = False,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    mpi_args: str = "",
    network_interface: str | None = None,
) -> list[T]:
    """Start `np` ranks, call ``func(*args, **kwargs)`` in each of them, and return their results in the order of ranks.

    The function calls ``dear.init()`` as a script does. It may be defined anywhere, also in a notebook: it travels by
    cloudpickle, with what it refers to, and so do arguments, results and exceptions. What ranks print is shown. Ctrl-C ends
    them all.

    Args:
        func: called in each rank.
        args: its arguments, the same in each rank.
        kwargs: its named arguments.
        np: how many ranks; None: all slots of the hosts.
        hosts: as ``dearrun -H``: "host1:2,host2:2"; None: this machine.
        hostfile: as ``dearrun -hostfile``, instead of `hosts`.
        env: variables for the ranks, beside those of this process.
        start_timeout: seconds, in which all ranks have to have started.
        ssh_port: as ``dearrun -p``.
        ssh_identity_file: as ``dearrun -i``.
        output_filename: as ``dearrun --output-filename``: a folder for what ranks print.
        verbose: show the command that starts the ranks.
        use_mpi: over MPI, by dearrun; False: over torch.distributed, by torchrun, on this machine alone; None: over MPI
            where comm_core has it and an mpirun is found.
        use_gloo: the same from the other side, as in Horovod: True is ``use_mpi=False``. Both False is both None.
        mpi_args: as ``dearrun --mpi-args``.
        network_interface: as ``dearrun --network-interface``.

    Raises:
        RankError: a rank raised, or ended without an answer. The other ranks are ended.
        LaunchError: the ranks could not be started, in one sentence that says why; or both launchers are asked for.
        SettingError: an environment variable does not hold what it should.
    """
    environ = without_launcher(os.environ) | dict(env or {})
    wanted = _over_mpi(use_mpi, use_gloo)
    over_mpi = _has_mpi(environ) if wanted is None else wanted
    flags = _flags(
        {
            "-np": np,
            "-H": hosts,
            "-hostfile": hostfile,
            "-p": ssh_port,
            "-i": ssh_identity_file,
            "--mpi-args=": mpi_args or None,
            "--network-interface": network_interface,
            "--output-filename": output_filename,
        }
    )
    names: list[str] = []
    if over_mpi:
        flags += ["--verbose"] if verbose else []
        flags += [word for name in env or {} for word in ("-x", name)]
        job = cli.prepare(_parsed([*flags, *_WORKER]), environ).job
        ranks = job.workers
        if job.hosts:
            names = others(job.hosts, socket.gethostname())
        elif mpirun.in_allocation(environ):
            raise LaunchError("this is an allocation of a scheduler: name its hosts, hosts='host1:2,host2:2'")
        start = [sys.executable, "-m", "dearrun", "--tag-output=others", "-x", VARIABLE, *flags, *_WORKER]
    else:
        start, ranks = _torchrun(flags, np, output_filename, verbose)
        threads = cores.among(cores.cores(), [cores.cores()] * ranks, cores.limit())
        environ["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(threads)  # else torchrun says 1
    call = pickling.dumps((func, tuple(args), dict(kwargs or {})))
    exchange = Exchange(pickling.dumps((sys.path, pickling.lines_of(func), call)), names)
    environ[VARIABLE] = exchange.variable
    try:
        with _started(start, environ) as process:
            answers = _answers(exchange, process, ranks, start_timeout)
    finally:
        exchange.close()
    return [_result(answers[rank]) for rank in range(ranks)]


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = options.parser()
    parser.exit_on_error = False  # type: ignore[attr-defined]
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise LaunchError(str(error)) from error


def _over_mpi(use_mpi: bool | None, use_gloo: bool | None) -> bool | None:
    """What the caller wants; None: what is there."""
    if use_mpi and use_gloo:
        raise LaunchError(
            "use_mpi=True and use_gloo=True contradict each other: ranks talk over MPI (use_mpi=True) or over "
            "torch.distributed's gloo (use_gloo=True); give one of them, or neither"
        )
    if use_mpi is False and use_gloo is False:
        return None  # as in Horovod, whose own defaults these are
    return use_mpi if use_gloo is None else not use_gloo


def _has_mpi(environ: Mapping[str, str]) -> bool:
    if not comm_core.mpi_available():
        return False
    try:
        mpirun.find(environ, cli.VENV)
    except LaunchError:
        return False
    return True


def _flags(values: Mapping[str, Any]) -> list[str]:
    """dearrun's, of those that are given. One that ends with = may have a value that looks like a flag."""
    words: list[str] = []
    for flag, value in values.items():
        if value is not None:
            words += [f"{flag}{value}"] if flag.endswith("=") else [flag, str(value)]
    return words


def _torchrun(
    flags: Sequence[str], np: int | None, output_filename: str | None, verbose: bool
) -> tuple[list[str], int]:
    """The command that starts ranks over torch.distributed, and how many. Raises :class:`LaunchError`."""
    refused = [flag for flag in flags[::2] if flag not in ("-np", "--output-filename")]
    if refused:
        raise LaunchError(
            f"{refused[0].rstrip('=')} needs MPI, and dear.run starts ranks over torch.distributed here, on this machine: "
            "install an MPI, or start torchrun on every host"
        )
    if np is None or np < 1:
        raise LaunchError(f"np should be a whole number of at least 1 and is {np}")
    worker = command.into_files(_WORKER, output_filename) if output_filename is not None else list(_WORKER)
    launcher = [sys.executable, "-m", "dearrun.torchrun", "--standalone", "--nproc-per-node", str(np)]
    start = [*launcher, "--no-python", *worker]
    if verbose:
        _write(sys.stderr, f"dear.run: {shlex.join(start)}\n")
    return start, np


@contextlib.contextmanager
def _started(start: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process that starts ranks, whose output goes to where this one's goes; nothing of it is left afterwards."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")
    own = [_is_own(sys.stdout, 1), _is_own(sys.stderr, 2)]
    out, err = (None if is_own else subprocess.PIPE for is_own in own)
    # A session of its own: Ctrl-C comes to this process alone, which then ends the job.
    process = subprocess.Popen(
        start, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, start_new_session=True
    )
    copiers = [
        threading.Thread(target=_copy, args=(pipe, stream), daemon=True)
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        if pipe is not None
    ]
    for copier in copiers:
        copier.start()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            finally:  # also where the user does not wait
                process.kill()
                process.wait()
        for copier in copiers:
            copier.join(1.0)


def _is_own(stream: TextIO, number: int) -> bool:
    """Whether it writes to the file that processes started here inherit: a notebook's does not."""
    try:
        return stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


def _copy(pipe: IO[bytes], stream: TextIO | None) -> None:
    """Until the pipe ends, whatever becomes of `stream`: ranks would block when their pipe is full."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := os.read(pipe.fileno(), 1 << 16):
        _write(stream, decoder.decode(chunk))


def _write(stream: TextIO | None, text: str) -> None:
    """Write what the stream can hold, with escapes for the rest, and nothing where it takes nothing any more."""
    with contextlib.suppress(Exception):  # a notebook's raises what it likes
        assert stream is not None, "a process without a console has none"
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def _answers(
    exchange: Exchange, process: subprocess.Popen[bytes], ranks: int, start_timeout: float
) -> dict[int, Answer]:
    """What all ranks answered. Raises :class:`RankError` for the first one that failed."""
    course = Course(ranks, start_timeout, time.monotonic())
    while not course.all_returned:
        status = process.poll()
        try:
            course.note(exchange.events.get(timeout=_LOOK_SECONDS), time.monotonic())
        except queue.Empty:
            course.require(status, time.monotonic())
    try:
        if process.wait(_END_SECONDS):
            log.warning("all ranks returned, and then their job ended with status %d", process.returncode)
    except subprocess.TimeoutExpired:
        log.warning(
            "all ranks returned, and %.0f s later some of them have not ended: they are ended now", _END_SECONDS
        )
    return course.answers


def _result(answer: Answer) -> Any:
    try:
        return unpickling.loads(answer.content)
    except Exception as error:
        said = f"what rank {answer.rank} returned cannot be unpickled here: {type(error).__name__}: {error}"
        raise RankError(said, answer.rank, {answer.rank: error}, {}) from error
