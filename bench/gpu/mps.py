"""``python -m bench.gpu.mps COMMAND…``: runs it under a CUDA MPS daemon of its own, so that processes share a card.

Where there is no such daemon, or the command fails under it, the command runs without, and a line says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["main"]

_DAEMON = ("nvidia-cuda-mps-control", "-f")
_START_SECONDS = 5.0
_END_SECONDS = 5.0


def _start(env: Mapping[str, str], ready: Path) -> subprocess.Popen[bytes] | str:
    """The daemon once it listens, or why there is none."""
    try:
        daemon = subprocess.Popen(_DAEMON, env=dict(env), stdin=subprocess.DEVNULL)
    except OSError as error:
        return str(error)
    deadline = time.monotonic() + _START_SECONDS
    while not ready.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            return f"it ended with {daemon.wait()}, or did not listen within {_START_SECONDS:g} s"
        time.sleep(0.05)
    return daemon


def _under(command: Sequence[str]) -> int | str:
    """The command's status under a daemon, or why there is no daemon."""
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": f"{name}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{name}/log"}
        for folder in folders.values():
            os.mkdir(folder)
        env = {**os.environ, **folders}
        daemon = _start(env, Path(name) / "pipe" / "control")
        if isinstance(daemon, str):
            return daemon
        try:
            return subprocess.call(command, env=env)
        finally:
            daemon.terminate()
            try:
                daemon.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()


def main(command: Sequence[str]) -> int:
    """The command's status."""
    found = _under(command)
    if found == 0:
        print("bench.gpu.mps: it ran under MPS", flush=True)
        return 0
    reason = found if isinstance(found, str) else f"the command ended with {found} under it"
    print(f"bench.gpu.mps: without MPS: {reason}", flush=True)
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
