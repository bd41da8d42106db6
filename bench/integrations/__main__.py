"""``python -m bench.integrations``: a library's own DDP beside dear in it, in pairs, one after the other.

python -m bench.integrations --library transformers --network 1gbit          # two emulated hosts, as root
python -m bench.integrations --library accelerate --steps 10 --pairs 1       # this machine

A worker is a module that trains as the library's users do. It is given a JSON object with `method` (dear, ddp, or none for
one process with the whole batch), `workers`, `steps` and `output`. There rank 0 writes `loss` (of each step, over the whole
batch) and `seconds` (since training began, at the end of each step).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.emulation.cluster import ClusterError
from bench.integrations.report import of_pair, report
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.program import at_least, end_in_order
from bench.train import launcher
from bench.train.origin import today
from bench.train.settings import Settings, check

#: The worker of each library.
WORKERS = {
    "accelerate": "bench.integrations.accelerate",
    "lightning": "bench.integrations.lightning",
    "transformers": "bench.integrations.transformers",
}
METHODS = ("ddp", "dear")


def run(name: str, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses and times of one method."""
    start = None if name == "ddp" else arguments.launcher  # the libraries' own DDP is torch.distributed's
    network = arguments.network if workers > 1 else "local"
    settings = Settings(method=name, workers=workers, network=network, launcher=start, timeout=arguments.timeout)
    check(settings)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.json"
        task = {"method": name, "workers": arguments.workers, "steps": arguments.steps, "output": str(output)}
        launcher.launch(settings, method(name), ["-m", WORKERS[arguments.library], json.dumps(task)])
        curve: dict[str, Any] = json.loads(output.read_text())
        return curve


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=list(WORKERS), required=True)
    parser.add_argument("--workers", type=at_least(1), default=2)
    parser.add_argument("--network", default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …")
    parser.add_argument(
        "--launcher", choices=["mpi", "torchrun"], default="torchrun", help="of dear; DDP is under torchrun always"
    )
    parser.add_argument("--steps", type=at_least(3), default=20)
    parser.add_argument("--pairs", type=at_least(1), default=3, help="of runs, the two methods in turn")
    parser.add_argument("--one-process", action="store_true", help="also the losses of one process on the whole batch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--json", type=Path, help="write all losses and times here")
    arguments = parser.parse_args()
    end_in_order()
    pairs: list[dict[str, Any]] = []
    try:
        for _ in range(arguments.pairs):
            pairs.append({name: run(name, arguments.workers, arguments) for name in METHODS})
            print(of_pair(pairs[-1]), flush=True)
        alone = run("none", 1, arguments) if arguments.one_process else None
    except (ValueError, OSError, MethodUnavailable, ClusterError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.integrations: {error}\n")
        return 2
    print(report(pairs, alone))
    if arguments.json is not None:
        left = {"library": arguments.library, "pairs": pairs, "one_process": alone, "origin": today().to_dict()}
        arguments.json.write_text(json.dumps(left))
    return 0


if __name__ == "__main__":
    sys.exit(main())
