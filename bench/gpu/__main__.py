"""``python -m bench.gpu --out FOLDER``: everything that one GPU can show about `dear`, in one go, into one archive.

Builds comm_core first where it is not. Each check has a limit, prints a line and leaves a log; then gpu.tar.gz is
replaced. Its first file, ``results.json``, says what passed, failed, was stopped or skipped, and why, and on which machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.gpu.archive import pack
from bench.gpu.facts import Facts
from bench.gpu.plan import Check, checks, limit
from bench.gpu.prepare import Places, ready
from bench.gpu.running import run
from bench.program import ROOT, end_in_order

__all__ = ["ARCHIVE", "main"]

ARCHIVE = "gpu.tar.gz"

_LOOK_SECONDS = 45
_WORDS = {"passed": "PASS", "failed": "FAIL", "stopped": "STOP", "skipped": "SKIP"}
_BAD = ("failed", "stopped")
_SHOWN = 8  # lines of their logs


def _look(env: dict[str, str], nccl: str | None) -> Facts:
    """What the machine has, with the carried NCCL; without it where asking that one ends badly."""
    command = [sys.executable, "-m", "bench.gpu.facts"]
    reason = ""
    for more in [{}] if nccl is None else [{"COMM_CORE_NCCL": nccl}, {}]:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env={**env, **more},
                timeout=_LOOK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            reason = f"bench.gpu.facts was not done within {_LOOK_SECONDS} s"
            continue
        if done.returncode == 0:
            said = json.loads(done.stdout.splitlines()[-1])
            return Facts(**{**said, "nccl": None if said["nccl"] is None else tuple(said["nccl"])})
        reason = f"bench.gpu.facts ended with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
    print(f"bench.gpu: what this machine has is unknown: {reason}", flush=True)
    return Facts.unknown(reason)


def _machine(found: Facts) -> dict[str, Any]:
    cards: list[str] = []
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        cards = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20).stdout.splitlines()
    return {
        "cards": cards,
        "torch": found.torch,
        "cuda": found.cuda,
        "nccl": found.nccl_about,
        "mpi": found.no_mpi or "found",
        "python": platform.python_version(),
        "host": platform.platform(),
        "cores": os.cpu_count(),
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _run(check: Check, folder: Path, env: dict[str, str], left: float) -> dict[str, Any]:
    about: dict[str, Any] = {"shows": check.shows, "command": " ".join(check.command), "environment": check.environment}
    if check.skip is not None:
        return {**about, "outcome": "skipped", "reason": check.skip}
    seconds = limit(check, left)
    if seconds is None:
        return {**about, "outcome": "skipped", "reason": "no time was left; give it more --minutes, or --only this"}
    log, started = folder / f"{check.name}.log", time.monotonic()
    # Tests are looked for in the repository; all else writes its files into the folder.
    where = ROOT if "pytest" in check.command else folder
    ended = run(check.command, log, {**env, **check.environment}, where, seconds)
    about |= {"outcome": ended.outcome, "seconds": round(time.monotonic() - started, 1), "log": log.name}
    return about if ended.outcome == "passed" else {**about, "reason": ended.reason}


def _say(name: str, result: dict[str, Any], folder: Path) -> None:
    took = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    print(f"{_WORDS[result['outcome']]} {name:24} {took:>6}  {result.get('reason', result['shows'])}", flush=True)
    log = folder / f"{name}.log"
    if result["outcome"] in _BAD and log.exists():
        for line in log.read_text(errors="replace").splitlines()[-_SHOWN:]:
            print(f"     | {line[:160]}", flush=True)


def _pack(results: dict[str, Any], folder: Path, archive: Path) -> None:
    """A disk that is full ends no check."""
    try:
        left_out = pack(results, folder, archive)
    except OSError as error:
        print(f"bench.gpu: {archive} stays what it was: {error}", file=sys.stderr)
        return
    if left_out:
        print(f"bench.gpu: {archive} has no room for {', '.join(left_out)}", file=sys.stderr)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help=f"folder for {ARCHIVE}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument("--minutes", type=float, default=8.0, help="all ends by then")
    parser.add_argument("--carried", type=Path, help="folder of what this machine lacks; see docs/gpu.md")
    chosen = parser.parse_args(arguments)
    if chosen.carried is not None and not chosen.carried.is_dir():
        parser.error(f"--carried should be a folder and is {chosen.carried}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run the checks. Returns 0: all that could be run passed; 1: something failed; 2: no GPU, or a wrong argument."""
    chosen = _arguments(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        return _checked(chosen, Path(name))


def _checked(chosen: argparse.Namespace, work: Path) -> int:
    ends = time.monotonic() + 60 * chosen.minutes
    archive, folder = chosen.out.resolve() / ARCHIVE, work / "results"
    folder.mkdir()
    places = Places(ROOT, work)
    made = _checks(Facts.unknown(""), None)
    unknown = set(chosen.only or ()) - {check.name for check in made}
    if unknown:
        print(f"bench.gpu: there is no check {', '.join(sorted(unknown))}; --list prints them", file=sys.stderr)
        return 2
    if chosen.list:
        for check in made:
            print(f"{check.name:24} {check.shows}")
        return 0
    names = [check.name for check in made if not chosen.only or check.name in chosen.only]
    print(
        f"bench.gpu: {len(names)} checks within {chosen.minutes:g} minutes: {', '.join(names)}. After each {archive} is "
        "replaced",
        flush=True,
    )
    state = ready(places, chosen.carried, folder / "prepare.log", os.environ, ends)
    found = _look(state.env, state.nccl)
    results: dict[str, Any] = {
        "machine": _machine(found),
        "comm_core": {"way": state.way, "failed": state.failed},
        "checks": {},
    }
    for name, reason in state.failed.items():
        print(f"bench.gpu: {name}: {reason}", flush=True)
    print(f"bench.gpu: comm_core is {state.way or 'not there'}", flush=True)
    _pack(results, folder, archive)
    for check in _checks(found, state.nccl):
        if check.name not in names:
            continue
        # What is there should this program be told to end meanwhile.
        results["checks"][check.name] = {"outcome": "stopped", "reason": "the whole run was told to end"}
        try:
            results["checks"][check.name] = _run(check, folder, state.env, ends - time.monotonic())
        finally:
            _pack(results, folder, archive)
        _say(check.name, results["checks"][check.name], folder)
    if any(result["outcome"] in _BAD for result in results["checks"].values()):
        return 1
    return 0 if found.no_gpu is None else 2


def _checks(found: Facts, nccl: str | None) -> list[Check]:
    workers = min((os.cpu_count() or 2) // 2, 12) if importlib.util.find_spec("xdist") is not None else 0
    return checks(sys.executable, found, _find, nccl, workers)


def _find(tool: str) -> str | None:
    return shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
