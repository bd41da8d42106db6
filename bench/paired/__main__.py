"""``python -m bench.paired``: two methods in the same processes, in turn, on emulated hosts, as root.

    python -m bench.paired dear ddp:bucket_mb=4 --task gpt2 --launcher torchrun
    python -m bench.paired dear ddp --task narrow --steps 60 --launcher mpi --transport mpi

What a busy machine does to the one, it does to the other: ratios mean something where times do not. Both really learn a
task of ``bench.accuracy``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.accuracy.tasks import TASKS
from bench.emulation.cluster import Cluster, ClusterError, parse_rate
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.paired.result import Paired, markdown
from bench.program import at_least, end_in_order
from bench.train.launcher import LauncherError, environment
from bench.train.origin import today
from bench.train.settings import Settings

__all__ = ["main", "run"]


def run(options: argparse.Namespace) -> Paired:
    """Raises ``ValueError``, ``ClusterError`` or :class:`MethodUnavailable`."""
    methods = [method(spec) for spec in (options.first, options.second)]
    for one in methods:
        one.look()
    settings = Settings(method=options.first, workers=options.workers, network=options.network)
    env = {**methods[1].environment, **environment(settings, methods[0]), "DEAR_TRANSPORT": options.transport}
    names = ("first", "second", "task", "blocks", "steps")
    told = json.dumps({name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory() as folder, Cluster(options.workers, options.network) as cluster:
        output = Path(folder) / "paired.json"
        start = cluster.run_mpi if options.launcher == "mpi" else cluster.run_torch
        start(["-m", "bench.paired.worker", str(output), told], env=env, timeout=options.timeout)
        found = json.loads(output.read_text())
    about = {name: getattr(options, name) for name in ("task", "workers", "network", "launcher")}
    about |= {"transport": options.transport, "steps": options.steps, "origin": today().to_dict()}
    return Paired(options.first, options.second, about, found["seconds"], found["cpu_seconds"])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.paired", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", nargs="?", default="dear", metavar="METHOD")
    parser.add_argument("second", nargs="?", default="ddp", metavar="METHOD", help="that it is compared with")
    parser.add_argument("--task", default="gpt2", choices=list(TASKS))
    parser.add_argument("--workers", type=at_least(2), default=2)
    parser.add_argument("--network", default="1gbit", help="rate of the links: 1gbit, 100mbit, 1gbit+20ms, …")
    parser.add_argument("--launcher", choices=["torchrun", "mpi"], default="torchrun")
    parser.add_argument("--transport", choices=["auto", "tcp", "mpi", "gloo"], default="auto", help="DEAR_TRANSPORT")
    parser.add_argument("--blocks", type=at_least(4), default=10)
    parser.add_argument("--steps", type=at_least(1), default=20, help="in a block")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        parse_rate(options.network)
    except ValueError as error:
        parser.error(f"--network: {error}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    end_in_order()
    try:
        found = run(options)
    except (ValueError, ClusterError, LauncherError, MethodUnavailable) as error:
        sys.stderr.write(f"bench.paired: {error}\n")
        return 2
    print(markdown(found))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
