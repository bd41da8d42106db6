"""``python -m bench.gpu --out FOLDER``: everything that one GPU can show about `dear`, into one folder.

Each check has a log there; ``results.json`` says what passed, failed or was skipped, and why, and on which machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import comm_core
from bench.cluster import ROOT
from bench.gpu.plan import Check, checks
from dearrun import mpirun
from dearrun.errors import LaunchError

__all__ = ["main", "missing_gpu"]

_CHECK_SECONDS = 900


def missing_gpu() -> str | None:
    """Why there is no GPU to check; None where there is one."""
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is without CUDA; install one with it"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device; is there a card, its driver, and is CUDA_VISIBLE_DEVICES empty?"
    return None


def _machine(nccl: str) -> dict[str, Any]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cards": driver.stdout.strip().splitlines(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "python": platform.python_version(),
        "host": platform.platform(),
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _run(check: Check, folder: Path) -> dict[str, Any]:
    about = {"shows": check.shows, "command": " ".join(check.command), "environment": check.environment}
    if check.skip is not None:
        return {**about, "outcome": "skipped", "reason": check.skip}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DEAR_POISON": "1", **check.environment}
    log, started = folder / f"{check.name}.log", time.monotonic()
    with log.open("w") as out:
        try:
            # Tests are looked for in the repository; all else writes its files into the folder.
            where = ROOT if "pytest" in check.command else folder
            done = subprocess.run(
                check.command,
                cwd=where,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=_CHECK_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {**about, "outcome": "failed", "reason": str(error), "log": log.name}
    seconds = round(time.monotonic() - started, 1)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        reason = f"exit status {done.returncode}: {last[0] if last else 'no output'}"
        return {**about, "outcome": "failed", "reason": reason, "seconds": seconds, "log": log.name}
    return {**about, "outcome": "passed", "seconds": seconds, "log": log.name}


def main(arguments: list[str] | None = None) -> int:
    """0: all that could be run passed; 1: something failed; 2: there is no GPU, or no such check."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for logs and results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    chosen = parser.parse_args(arguments)
    try:
        library = comm_core.find_nccl()
        nccl, version = f"{library.version_text} at {library.path}", library.version
    except comm_core.Unsupported as error:
        nccl, version = str(error), None
    try:
        has_mpirun = bool(mpirun.find(os.environ, Path(sys.prefix)))
    except LaunchError:
        has_mpirun = False
    made = checks(sys.executable, has_mpirun, version, shutil.which)
    unknown = set(chosen.only or ()) - {check.name for check in made}
    if unknown:
        print(f"bench.gpu: there is no check {', '.join(sorted(unknown))}; --list prints them", file=sys.stderr)
        return 2
    if chosen.list:
        for check in made:
            print(f"{check.name:24} {check.shows}" + (f" (skipped: {check.skip})" if check.skip else ""))
        return 0
    missing = missing_gpu()
    if missing is not None:
        print(f"bench.gpu: no GPU: {missing}", file=sys.stderr)
        return 2
    chosen.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": _machine(nccl), "checks": {}}
    for check in made:
        if chosen.only and check.name not in chosen.only:
            continue
        result = results["checks"][check.name] = _run(check, chosen.out.resolve())
        print(f"{check.name:24} {result['outcome']:8} {result.get('reason', '')}", flush=True)
        (chosen.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["outcome"] == "failed" for result in results["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
