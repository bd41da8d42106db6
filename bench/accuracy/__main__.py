"""``python -m bench.accuracy``: the loss over wall time, method by method, on the same batches in the same order.

python -m bench.accuracy --task gpt2 --methods dear:threshold_mb=1 ddp horovod --workers 2 --network 1gbit
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import launcher
from bench.accuracy.curve import draw, report
from bench.accuracy.tasks import TASKS
from bench.cluster import ClusterError
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.settings import Settings, check


def run(spec: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One method's losses and times."""
    settings = Settings(method=spec, workers=arguments.workers, network=arguments.network, timeout=arguments.timeout)
    check(settings)
    chosen = method(spec)
    chosen.look()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.json"
        task = {"method": spec, "task": arguments.task, "steps": arguments.steps, "threads": 1, "output": str(output)}
        launcher.launch(settings, chosen, ["-m", "bench.accuracy.worker", json.dumps(task)])
        curve: dict[str, Any] = json.loads(output.read_text())
    return curve


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--methods", nargs="+", default=["dear:threshold_mb=1", "ddp"], metavar="METHOD")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--network", default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each method")
    parser.add_argument(
        "--output", type=Path, default=Path("accuracy.png"), help="the picture; numbers beside it as .json"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that emulated hosts are removed
    curves = {}
    try:
        for spec in arguments.methods:
            curves[spec] = run(spec, arguments)
    except (ValueError, MethodUnavailable, ClusterError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.accuracy: {error}\n")
        return 2
    arguments.output.with_suffix(".json").write_text(json.dumps(curves))
    draw(curves, f"{arguments.task}, {arguments.workers} workers, {arguments.network}", arguments.output)
    print(report(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
