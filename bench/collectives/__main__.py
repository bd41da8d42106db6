"""``python -m bench.collectives``: every collective from 4 KB to 64 MB against torch.distributed/gloo and plain TCP.

Ours and gloo's run in the same processes, in turn, on the same tensors. Times are medians of the slowest rank; CPU is
that of all ranks' processes, per byte that crossed a link; cores are how busy all of the machine's were with ours. Bus
bandwidth is the bytes that cross each rank's link in each direction, divided by the time. Of the rings, plain TCP is timed
in turn, too: the same messages in the same pattern over as many connections (`bench.collectives.plain`). Wire time is a
stream: those bytes at the goodput of plain TCP, measured in the same run.

With --backend, ours are torch.distributed's own calls over the backend dear, with bars of their own.

With --ranks-per-host, operations in two levels are compared with one ring of all ranks instead, and what hosts send with
what one rank of each would; `bench.collectives.levels` has the terms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.collectives.bars import BACKEND_BARS, BACKEND_LEAST, judge, judge_backend
from bench.collectives.levels import LEVELLED, LevelRow, judge_levels, level_row, level_table
from bench.collectives.operations import OPERATIONS
from bench.collectives.rows import Row, row_of, table
from bench.emulation.cluster import SUBNET, Cluster, ClusterError
from bench.emulation.goodput import goodput
from bench.program import ROOT, at_least, end_in_order
from bench.train.cores import Busy, look
from bench.train.launcher import local_command
from bench.train.origin import today
from bench.train.settings import Settings

SIZES = [4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 25 * 2**20, 64 * 2**20]


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float | None, str]:
    """Measure: what each case took, goodput in bytes per second (None on the local machine), and the backend's name."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        settings = json.dumps(
            {
                "operations": arguments.ops,
                "sizes": arguments.sizes,
                "iterations": arguments.iterations,
                "ranks_per_host": arguments.ranks_per_host,
                "connections": arguments.connections,
                "meet": "127.0.0.1" if arguments.network == "local" else f"{SUBNET}.1",
                "backend": arguments.backend,
                "output": str(output),
            }
        )
        argv = ["-m", "bench.collectives.worker", settings]
        env = {"DEAR_BENCH_STORE": str(Path(folder) / "store"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env |= {"DEAR_TRANSPORT": arguments.transport, "DEAR_TCP_SOCKETS": str(arguments.connections)}
        env["OMPI_MCA_btl_tcp_links"] = str(arguments.connections)
        wire = None
        if arguments.network == "local":
            command = local_command(arguments.launcher, Settings(workers=arguments.hosts), argv, [])
            subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, timeout=arguments.timeout, check=True)
        else:
            with Cluster(arguments.hosts, arguments.network, arguments.ranks_per_host) as cluster:
                wire = goodput(cluster, arguments.connections) if arguments.hosts > 1 else None
                start = cluster.run_mpi if arguments.launcher == "mpi" else cluster.run_torch
                start(argv, env=env, timeout=arguments.timeout)
        measured = json.loads(output.read_text())
    return measured["results"], wire, measured["backend"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="default 2")
    parser.add_argument(
        "--ranks-per-host",
        type=at_least(1),
        default=1,
        help="default 1; more compares two levels with one ring, on emulated hosts",
    )
    parser.add_argument(
        "--network",
        default="local",
        help="local, or a rate for the emulated cluster: 1gbit, 1gbit+20ms with a delay, …",
    )
    parser.add_argument(
        "--connections",
        type=at_least(1),
        default=4,
        help="of TCP between two hosts, for our operations and for plain TCP (default 4, as training has)",
    )
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], default="mpi")
    parser.add_argument("--transport", choices=["auto", "tcp", "mpi", "gloo"], default="auto", help="DEAR_TRANSPORT")
    parser.add_argument(
        "--backend", action="store_true", help="ours by torch.distributed over the backend dear, from 64 KB up"
    )
    parser.add_argument(
        "--ops", nargs="+", choices=list(OPERATIONS), metavar="OP", help="default: all that are compared"
    )
    parser.add_argument("--sizes", nargs="+", type=int, metavar="BYTES", help="of the whole buffer")
    parser.add_argument("--iterations", type=int, default=100, help="pairs per case, fewer for cases that take long")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for the whole run")
    parser.add_argument("--busy", action="store_true", help="measure while others use the machine, and mark the result")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument(
        "--check-bars", action="store_true", help="exit with 1 unless every bar is met, and one was there"
    )
    arguments = parser.parse_args()
    levelled = arguments.ranks_per_host > 1
    if levelled and (arguments.network == "local" or arguments.hosts < 2):
        parser.error(
            "--ranks-per-host above 1 compares what goes between hosts: give --network 1gbit and several --hosts"
        )
    if levelled and arguments.backend:
        parser.error("--backend measures one ring: leave --ranks-per-host out")
    known = list(LEVELLED) if levelled else list(OPERATIONS)
    if arguments.ops is None:
        arguments.ops = list(BACKEND_BARS) if arguments.backend else known
    if set(arguments.ops) - set(known):
        parser.error(f"--ops: with --ranks-per-host, {', '.join(known)} are compared: what goes in two levels")
    if arguments.sizes is None:
        least = 2**20 if levelled else BACKEND_LEAST if arguments.backend else 0
        arguments.sizes = [size for size in SIZES if size >= least]
    end_in_order()
    try:
        busy = look(allowed=arguments.busy)
        results, wire, backend = run(arguments)
    except (Busy, ClusterError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"bench.collectives: {error}\n")
        return 2
    mbit = 0.0 if wire is None else wire * 8 / 1e6
    goodput_text = f"goodput {mbit:.{0 if mbit >= 20 else 2}f} Mbit/s"
    where = "this machine" if wire is None else f"{arguments.network} links, {goodput_text}"
    ranks = arguments.hosts * arguments.ranks_per_host
    print(f"{ranks} ranks, {backend}, {where}; torch {torch.__version__}, Python {platform.python_version()}")
    rows: Sequence[Row | LevelRow]
    if levelled:
        rows = two_levels = [level_row(result) for result in results]
        text, verdicts = level_table(two_levels), judge_levels(two_levels)
    else:
        rows = rings = [row_of(result, wire) for result in results]
        text, verdicts = (
            table(rings),
            judge_backend(rings) if arguments.backend else judge(rings, arguments.hosts, backend),
        )
    print(text)
    if arguments.json:
        about = {
            "hosts": arguments.hosts,
            "ranks_per_host": arguments.ranks_per_host,
            "network": arguments.network,
            "launcher": arguments.launcher,
            "backend": backend,
            "goodput": wire,
        }
        about |= {"connections": arguments.connections, "origin": today().to_dict(), "busy_before": busy}
        arguments.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    if arguments.check_bars:
        print()
        for verdict in verdicts:
            print(f"{'met   ' if verdict.met else 'MISSED'}  {verdict.text}")
        if not verdicts:
            print("no bar speaks of these operations, sizes and hosts")
        return 0 if verdicts and all(verdict.met for verdict in verdicts) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
