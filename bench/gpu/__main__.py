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
from pathlib import Path
from typing import Any

from bench.gpu.archive import pack
from bench.gpu.facts import Facts
from bench.gpu.plan import Check, checks, limit
from bench.gpu.prepare import commands, whole_library
from bench.gpu.running import run
from bench.program import ROOT, end_in_order

__all__ = ["ARCHIVE", "main"]

ARCHIVE = "gpu.tar.gz"

_BUILDING = {"scikit-build-core": "scikit_build_core", "pybind11": "pybind11"}
_PREPARE_SECONDS = 240
_WORDS = {"passed": "PASS", "failed": "FAIL", "stopped": "STOP", "skipped": "SKIP"}
_BAD = ("failed", "stopped")
_SHOWN = 8  # lines of their logs


def _look(env: dict[str, str]) -> Facts:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.facts"], capture_output=True, text=True, check=True, cwd=ROOT, env=env
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return Facts(**{**said, "nccl": None if said["nccl"] is None else tuple(said["nccl"])})


def _machine(found: Facts) -> dict[str, Any]:
    cards: list[str] = []
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        cards = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().splitlines()
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


def _prepare(folder: Path, wheels: Path | None, env: dict[str, str]) -> str | None:
    """Make comm_core importable for the processes that follow; None, or why that failed."""
    carried = sorted(wheels.glob("*.whl")) if wheels is not None else []
    has_comm_core = (
        subprocess.run(
            [sys.executable, "-c", "import comm_core"], cwd=ROOT, env=env, capture_output=True, check=False
        ).returncode
        == 0
    )
    missing = [name for name, module in _BUILDING.items() if importlib.util.find_spec(module) is None]
    try:
        todo = commands(sys.executable, ROOT, carried, has_comm_core, missing)
    except ValueError as error:
        return str(error)
    for command in todo:
        ended = run(command, folder / "prepare.log", env, ROOT, _PREPARE_SECONDS)
        if ended.outcome != "passed":
            return f"{ended.reason} ({' '.join(command)})"
    return None


def _say(name: str, result: dict[str, Any], folder: Path) -> None:
    took = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    print(f"{_WORDS[result['outcome']]} {name:24} {took:>6}  {result.get('reason', result['shows'])}", flush=True)
    if result["outcome"] in _BAD:
        for line in (folder / result["log"]).read_text(errors="replace").splitlines()[-_SHOWN:]:
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
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, for machines without a network")
    parser.add_argument("--nccl", type=Path, help="libnccl for the check of NCCL, or a folder with its parts in order")
    chosen = parser.parse_args(arguments)
    if chosen.wheels is not None and not any(chosen.wheels.glob("*.whl")):
        parser.error(f"--wheels should be a folder with wheels and is {chosen.wheels}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """0: all that could be run passed; 1: something failed; 2: there is no GPU, or an argument is wrong."""
    chosen = _arguments(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        return _checked(chosen, Path(name))


def _checked(chosen: argparse.Namespace, work: Path) -> int:
    started = time.monotonic()
    archive, folder = chosen.out.resolve() / ARCHIVE, work / "results"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    reason = _prepare(folder, chosen.wheels, env)
    if reason is not None:
        print(f"bench.gpu: comm_core could not be made ready: {reason}", file=sys.stderr)
        return 1
    try:
        nccl = None if chosen.nccl is None else str(whole_library(chosen.nccl, work))
    except ValueError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    found = _look(env if nccl is None else {**env, "COMM_CORE_NCCL": nccl})
    workers = min((os.cpu_count() or 2) // 2, 6) if importlib.util.find_spec("xdist") is not None else 0
    made = checks(sys.executable, found, shutil.which, nccl, workers)
    unknown = set(chosen.only or ()) - {check.name for check in made}
    if unknown:
        print(f"bench.gpu: there is no check {', '.join(sorted(unknown))}; --list prints them", file=sys.stderr)
        return 2
    if chosen.list:
        for check in made:
            print(f"{check.name:24} {check.shows}" + (f" (skipped: {check.skip})" if check.skip else ""))
        return 0
    results: dict[str, Any] = {"machine": _machine(found), "checks": {}}
    for check in made:
        if chosen.only and check.name not in chosen.only:
            continue
        result = results["checks"][check.name] = _run(
            check, folder, env, 60 * chosen.minutes - (time.monotonic() - started)
        )
        _say(check.name, result, folder)
        _pack(results, folder, archive)
    if any(result["outcome"] in _BAD for result in results["checks"].values()):
        return 1
    return 0 if found.no_gpu is None else 2


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
