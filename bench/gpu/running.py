"""Runs a command under a limit: at the limit it is interrupted, then killed with all that it started. Its output stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GRACE", "Ended", "run"]

GRACE = 5.0  # seconds from the interrupt to the kill
_PATIENCE = 5.0  # with who was killed
_QUIET = 3  # looks in a row; a process that is just becoming another program shows no environment
_MARK = "DEAR_BENCH_GPU_CHECK"  # in the environment of all that a check starts


@dataclass(frozen=True)
class Ended:
    """`outcome` is "passed", "failed", or "stopped" at the limit; `reason` is empty where it passed."""

    outcome: str
    reason: str = ""


def run(
    command: Sequence[str], log: Path, env: Mapping[str, str], where: Path, seconds: float, grace: float = GRACE
) -> Ended:
    """Run `command` in the folder `where`; what it prints is added to `log`."""
    mark = f"{_MARK}={os.getpid()}-{time.monotonic_ns()}"
    marked = {**env, **dict([mark.split("=")])}
    try:
        out = log.open("ab")
    except OSError as error:
        return Ended("failed", str(error))
    with out:
        try:
            process = subprocess.Popen(
                command, cwd=where, env=marked, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Ended("failed", str(error))
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _interrupt(process, grace)
            status = None
        finally:  # also where this program itself is told to end
            _clear(mark)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
    if status is None:
        return Ended("stopped", f"over its limit of {seconds:.3g} s; {_last_line(log)}")
    return Ended("passed") if status == 0 else Ended("failed", f"exit status {status}; {_last_line(log)}")


def _interrupt(process: subprocess.Popen[bytes], grace: float) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)


def _clear(mark: str) -> None:
    """Kill what was started with `mark` in its environment, in whatever session it is and whoever its parent is by now.

    Who hangs in a driver cannot be killed, and is left behind.
    """
    deadline, quiet = time.monotonic() + _PATIENCE, 0
    while time.monotonic() < deadline and quiet < _QUIET:
        found = _marked(mark)
        quiet = 0 if found else quiet + 1
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"its last line: {lines[-1].strip()}" if lines else "it printed nothing"
