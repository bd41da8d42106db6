"""``python -m bench.paired``: two methods in the same processes, in turn, on emulated hosts, as root.

    python -m bench.paired dear ddp:bucket_mb=4 --task gpt2 --launcher torchrun
    python -m bench.paired dear ddp --task narrow --steps 60 --launcher mpi --transport mpi
    python -m bench.paired dear:residency=host dear --ranks-per-host 2

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
from bench.emulation.cluster import Cluster, ClusterError, network
from bench.methods.method import Method, MethodUnavailable
from bench.methods.registry import method
from bench.paired.result import Paired, joined, markdown
from bench.program import at_least, end_in_order, write_json
from bench.train.cores import Busy, busy_share, core_ticks, look
from bench.train.launcher import LauncherError, environment, pick
from bench.train.origin import today
from bench.train.settings import Settings

__all__ = ["main", "run"]


def run(options: argparse.Namespace) -> Paired:
    """One start of the processes.

    Raises ``ValueError``, ``ClusterError``, :class:`MethodUnavailable`, or :class:`Busy` where others use the machine.
    """
    methods = [method(spec) for spec in (options.first, options.second)]
    ranks = options.ranks_per_host
    settings = Settings(workers=options.workers * ranks, network=options.network, launcher=options.launcher)
    for one in methods:
        one.look()
        pick(settings, one)  # the launcher is theirs, too
    env = {
        "DEAR_TRANSPORT": options.transport,
        **environment(settings, methods[0]),
        **_of_both(methods, options.transport),
    }
    names = ("first", "second", "task", "blocks", "steps")
    told = json.dumps({name: getattr(options, name) for name in names})
    busy, cores = look(allowed=options.busy), core_ticks()
    with tempfile.TemporaryDirectory() as folder, Cluster(options.workers, options.network, ranks) as cluster:
        output = Path(folder) / "paired.json"
        start = cluster.run_mpi if options.launcher == "mpi" else cluster.run_torch
        start(["-m", "bench.paired.worker", str(output), told], env=env, timeout=options.timeout)
        found = json.loads(output.read_text())
    about = {name: getattr(options, name) for name in ("task", "workers", "ranks_per_host", "network", "launcher")}
    about |= {"transport": env["DEAR_TRANSPORT"], "steps": options.steps, "origin": today().to_dict()}
    about |= {"busy_before": busy, "cores_busy": busy_share(cores, core_ticks())}
    return Paired(options.first, options.second, about, found["seconds"], found["cpu_seconds"], found["sent_bytes"])


def _of_both(methods: Sequence[Method], transport: str) -> dict[str, str]:
    """The environment of methods that share their processes. Raises ``ValueError`` where they want different ones."""
    first, second = (one.environment for one in methods)
    if type(methods[0]) is type(methods[1]) and first != second:
        raise ValueError(
            f"the same processes cannot have {first or 'no variables'} for one method and {second or 'none'} for the other:"
            " compare by benchmarks.py"
        )
    both = {**first, **second}
    if transport not in ("auto", both.get("DEAR_TRANSPORT", transport)):
        raise ValueError(f"--transport {transport} and a method with transport={both['DEAR_TRANSPORT']}: leave one out")
    return both


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.paired", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", nargs="?", default="dear", metavar="METHOD")
    parser.add_argument("second", nargs="?", default="ddp", metavar="METHOD", help="that it is compared with")
    parser.add_argument("--task", default="gpt2", choices=list(TASKS))
    parser.add_argument("--workers", type=at_least(2), default=2, help="hosts")
    parser.add_argument("--ranks-per-host", type=at_least(1), default=1)
    parser.add_argument(
        "--network", type=network, default="1gbit", help="rate of the links: 1gbit, 100mbit, 1gbit+20ms, …"
    )
    parser.add_argument("--launcher", choices=["torchrun", "mpi"], default="torchrun")
    parser.add_argument("--transport", choices=["auto", "tcp", "mpi", "gloo"], default="auto", help="DEAR_TRANSPORT")
    parser.add_argument("--blocks", type=at_least(4), default=10)
    parser.add_argument("--steps", type=at_least(1), default=20, help="in a block")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="starts of the processes; six have an interval")
    parser.add_argument("--busy", action="store_true", help="measure while others use the machine, and mark the result")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    end_in_order()
    try:
        found = joined([run(options) for _ in range(options.repeats)])
    except (ValueError, Busy, ClusterError, LauncherError, MethodUnavailable) as error:
        sys.stderr.write(f"bench.paired: {error}\n")
        return 2
    print(markdown(found))
    if options.json is not None:
        write_json(options.json, asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
