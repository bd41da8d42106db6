"""Starts jobs of several ranks, ends them in time, and shows the traceback of the rank that failed first."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests import forkserver, notes

ROOT = Path(__file__).resolve().parent.parent
_TAG = "DEAR_TEST_JOB"
_NAME = 15  # characters that Linux keeps of a process's name
_SHOWN = 16_000  # characters of a failed job's output
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0  # with a rank that should have ended its job, since its test took too long


class JobFailed(AssertionError):
    """A job exited with an error or did not end in time."""


@dataclass(frozen=True)
class Result:
    """What a finished job left."""

    command: str
    returncode: int
    output: str  # stdout and stderr of all ranks, as they came
    seconds: float
    timed_out: bool
    inside: str = ""  # of a job that did not end: where every thread of its ranks was, below Python too; needs gdb
    killed_in: str = ""  # the test in which a rank died by a signal, as far as the launcher says so
    ended_in: str = ""  # the first test in which a rank was when the job ended, unless all ranks had come to the end

    def check(self) -> Result:
        """Raise :class:`JobFailed` with the first failing rank's traceback unless the job succeeded."""
        if self.returncode == 0 and not self.timed_out:
            return self
        what = f"did not end within {self.seconds:.0f} s" if self.timed_out else f"exited with {self.returncode}"
        where = f" in {self.failed_test()}" if self.failed_test() not in (None, self._named()) else ""
        raise JobFailed(f"{self.command}\n{what}{where}\n{self.first_failure()}\n{self.inside}")

    def failed_test(self) -> str | None:
        """The test that the first failing rank names, or in which it died; else the one in which the job ended."""
        return self.killed_in or self._named() or self.ended_in or None

    def _named(self) -> str | None:
        found = re.search(
            r"^rank \d+ of \d+ failed: (\S+\.py::.+) (?:\((?:setup|call|teardown)\)|is not over after .* s)$",
            self.output,
            re.MULTILINE,
        )
        return found.group(1) if found else None

    def first_failure(self) -> str:
        """From the first line that announces a failing rank, else the end of the output."""
        found = re.search(r"^rank \d+ of \d+ failed.*", self.output, re.MULTILINE | re.DOTALL)
        text = found.group(0) if found else self.output
        # Those that are ended with it show all of their stacks, and much of these is pytest.
        text = _stacks_once(re.sub(r"^  File \".*/(_?pytest|pluggy)/.*\n", "", text, flags=re.MULTILINE))
        return text[:_SHOWN] if found else text[-_SHOWN:]


def _stacks_once(text: str) -> str:
    """`text` without the stacks that it has already shown: dozens of threads may wait at one place (pure)."""
    shown = set[str]()

    def stack(found: re.Match[str]) -> str:
        is_new = found[1] not in shown
        shown.add(found[1])
        return found[0] if is_new else ""

    return re.sub(r"^Thread 0x[0-9a-f]+ .*\n((?:  File .*\n)*)\n?", stack, text, flags=re.MULTILINE)


def command_for(launcher: str, nranks: int, argv: Sequence[str]) -> list[str]:
    """The command line that starts `argv` (arguments of Python) on `nranks` ranks."""
    if launcher == "mpi":
        return [str(ROOT / "scripts" / "mpirun"), "-np", str(nranks), sys.executable, *argv]
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nranks)]
        return [sys.executable, *run, *(["--no-python", sys.executable] if argv[0] == "-m" else []), *argv]
    if launcher == "dearrun":
        return [sys.executable, "-m", "dearrun", "-np", str(nranks), sys.executable, *argv]
    if launcher == "restarts":
        return [sys.executable, "-m", "dearrun", "-np", str(nranks), "--restarts", "2", sys.executable, *argv]
    if launcher == "single":
        return [sys.executable, *argv]
    raise ValueError(f"launcher should be mpi, torchrun, dearrun, restarts or single and is {launcher!r}")


def run_ranks(
    nranks: int,
    argv: Sequence[str],
    launcher: str = "mpi",
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    real_start: bool = False,
    stuck: Callable[[], bool] = lambda: False,
) -> Result:
    """Run ``python argv`` on `nranks` ranks; never longer than `timeout` seconds, and nothing is left behind.

    A job that does not end, or is `stuck`, is aborted rank by rank, so that every rank prints the stacks of its threads
    first. Its processes import from this checkout. They are forked (`tests.forkserver`), or with `real_start` start and end
    as a user's do.
    """
    tag = uuid.uuid4().hex
    # Jobs of a test may themselves run under a launcher of the test's caller; they are no part of that job.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes: what one has compiled, the next one reads
    inherited.pop("PYTHONUNBUFFERED", None)  # it writes a line in pieces, between which other ranks write theirs
    path = os.pathsep.join(filter(None, [inherited.get("PYTHONPATH"), str(ROOT)]))
    environ = {
        **inherited,
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        **(env or {}),
        _TAG: tag,
    }
    environ = forkserver.environment(environ, real_start=real_start)
    command = command_for(launcher, nranks, argv)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+b") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ, cwd=cwd, start_new_session=True
        )
        timed_out, inside = False, ""
        try:
            _await(process, started + timeout, stuck)
        except subprocess.TimeoutExpired:
            timed_out = True
            inside = "\n".join(_native_stacks(pid) for pid in _job_pids(tag))
            for pid in _job_pids(tag):
                _signal(pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            for pid in _job_pids(tag):
                _signal(pid, signal.SIGKILL)
            process.wait()
        sink.seek(0)
        output = sink.read().decode(errors="replace")
    seconds = time.monotonic() - started
    return Result(" ".join(command), process.returncode, output, seconds, timed_out, inside)


def _await(process: subprocess.Popen[bytes], until: float, stuck: Callable[[], bool]) -> None:
    """Raises ``subprocess.TimeoutExpired`` where it has not ended `until` then (``time.monotonic()``), or is stuck."""
    while True:
        left = until - time.monotonic()
        try:
            process.wait(max(0.0, min(left, _LOOK_SECONDS)))
            return
        except subprocess.TimeoutExpired:
            if left <= _LOOK_SECONDS or stuck():
                raise


def run_suite(
    nranks: int,
    argv: Sequence[str],
    launcher: str,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[Result]:
    """Run pytest under `tests.spmd_plugin` in every rank; a red test costs that test, not those behind it.

    A failing test ends its job, since ranks are not at the same place any more; the next job begins behind it. So does a
    test in which a rank dies, or takes too long and cannot even say so: ranks note which test they are in. All jobs
    together take no longer than `timeout` seconds. Only the last one may have succeeded.
    """
    results: list[Result] = []
    until, behind = time.monotonic() + timeout, ""
    while True:
        results.append(_run_behind(behind, nranks, argv, launcher, until=until, env=env, cwd=cwd))
        failed = results[-1].failed_test()
        if failed is None or failed == behind or time.monotonic() >= until:
            return results
        behind = failed


def _run_behind(
    test: str,
    nranks: int,
    argv: Sequence[str],
    launcher: str,
    *,
    until: float,
    env: Mapping[str, str] | None,
    cwd: Path,
) -> Result:
    """A job of the tests behind that one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**(env or {}), "DEAR_SPMD_AFTER": test, "DEAR_SPMD_NOTES": name}

        def stuck() -> bool:
            return notes.overdue(notes.read(folder), time.time(), _PATIENCE_SECONDS)

        left = until - time.monotonic()
        result = run_ranks(nranks, argv, launcher, timeout=left, env=environ, cwd=cwd, stuck=stuck)
        left_behind = notes.read(folder)
        killed_in = "" if result.timed_out else notes.killed(left_behind, result.output)  # else it was done here
        return replace(result, killed_in=killed_in, ended_in=notes.first(left_behind))


def run_script(
    folder: Path,
    text: str,
    ranks: int = 2,
    launcher: str = "mpi",
    *arguments: str,
    real_start: bool = False,
    timeout: float = 240,
    **env: str,
) -> Result:
    """Run `text` as a script of `ranks` processes, in `folder`, with these variables; see :func:`run_ranks`."""
    script = folder / "script.py"
    script.write_text(text)
    argv = [str(script), *arguments]
    return run_ranks(ranks, argv, launcher, timeout=timeout, env=env, cwd=folder, real_start=real_start)


def _job_pids(tag: str) -> Iterator[int]:
    """Of processes that were started with the tag, and of those that were forked for one of these."""
    needle, name = f"{_TAG}={tag}".encode(), tag[:_NAME].encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes() or (entry / "comm").read_bytes().strip() == name:
                    yield int(entry.name)


def _native_stacks(pid: int) -> str:
    """What Python's own stacks do not show: the engine's thread, and what a call into comm_core waits for."""
    gdb = shutil.which("gdb")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if gdb is not None and b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            asked = [gdb, "-q", "-batch", "-ex", "thread apply all bt 16", "-p", str(pid)]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
            lines = [line[:200] for line in said.splitlines() if line.startswith(("#", "Thread"))]
            return "\n".join([f"process {pid}:", *lines])
    return ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
