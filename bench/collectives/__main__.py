"""``python -m bench.collectives``: every collective from 4 KB to 64 MB against torch.distributed/gloo and the wire.

Ours and gloo's run in the same processes, in turn, on the same tensors. Times are medians of the slowest rank; CPU is
that of all ranks' processes, per byte that crossed a link. Bus bandwidth is the bytes that cross each rank's link in each
direction, divided by the time. Wire time is those bytes at the goodput of plain TCP, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.bars import judge
from bench.cluster import ROOT, Cluster, ClusterError
from bench.endings import end_in_order
from bench.goodput import goodput
from bench.operations import OPERATIONS

SIZES = [4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, ratios below 1 are good."""

    operation: str
    bytes: int
    n: int
    ms: float
    low_ms: float  # quartiles of ours
    high_ms: float
    bus_mb_per_s: float
    gloo_ms: float | None
    to_gloo: float | None  # median of the ratios pair by pair
    to_wire: float | None
    cpu_to_gloo: float | None  # CPU per byte, ours to gloo's
    cpu_ns_per_byte: float


def row_of(result: dict[str, Any], goodput_bytes: float | None) -> Row:
    ours, gloo = result["seconds"]["ours"], result["seconds"].get("gloo")
    cpu = {who: sum(values) / len(values) for who, values in result["cpu_seconds"].items()}
    crossing = result["bytes"] * result["wire_share"]
    middle = statistics.median(ours)
    quartiles = statistics.quantiles(ours, n=4, method="inclusive")
    wire = crossing / goodput_bytes if goodput_bytes and crossing else None
    return Row(
        operation=result["operation"],
        bytes=result["bytes"],
        n=len(ours),
        ms=1e3 * middle,
        low_ms=1e3 * quartiles[0],
        high_ms=1e3 * quartiles[2],
        bus_mb_per_s=crossing / middle / 1e6,
        gloo_ms=1e3 * statistics.median(gloo) if gloo else None,
        to_gloo=statistics.median(a / b for a, b in zip(ours, gloo, strict=True)) if gloo else None,
        to_wire=middle / wire if wire else None,
        cpu_to_gloo=cpu["ours"] / cpu["gloo"] if gloo and cpu["gloo"] else None,
        cpu_ns_per_byte=1e9 * cpu["ours"] / (crossing * result["ranks"]) if crossing else 0.0,
    )


def _size(nbytes: int) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def table(rows: list[Row]) -> str:
    """The rows as text, one block per operation."""
    head = f"{'operation':<15}{'size':>8}{'n':>5}{'ms':>10}{'quartiles':>19}{'MB/s':>8}{'gloo ms':>10}"
    head += f"{'x gloo':>8}{'x wire':>8}{'CPU x gloo':>12}{'ns/byte':>9}"
    lines = [head]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.operation != row.operation:
            lines.append("")

        def cell(value: float | None, width: int, digits: int = 2) -> str:
            return f"{value:{width}.{digits}f}" if value is not None else f"{'n/a':>{width}}"

        spread = f"{row.low_ms:.2f} - {row.high_ms:.2f}"
        line = f"{row.operation:<15}{_size(row.bytes):>8}{row.n:>5}{row.ms:>10.2f}{spread:>19}"
        line += f"{row.bus_mb_per_s:>8.1f}{cell(row.gloo_ms, 10)}{cell(row.to_gloo, 8)}{cell(row.to_wire, 8)}"
        lines.append(line + f"{cell(row.cpu_to_gloo, 12)}{row.cpu_ns_per_byte:>9.2f}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> tuple[list[Row], float | None, str]:
    """Measure; returns rows, goodput in bytes per second (None on the local machine) and the backend's name."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        settings = json.dumps(
            {
                "operations": arguments.ops,
                "sizes": arguments.sizes,
                "iterations": arguments.iterations,
                "output": str(output),
            }
        )
        argv = ["-m", "bench.collectives_worker", settings]
        env = {"DEAR_BENCH_STORE": str(Path(folder) / "store"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        wire = None
        if arguments.network == "local":
            _run_local(argv, arguments, env)
        else:
            with Cluster(arguments.hosts, arguments.network) as cluster:
                wire = goodput(cluster) if arguments.hosts > 1 else None
                start = cluster.run_mpi if arguments.launcher == "mpi" else cluster.run_torch
                start(argv, env={**env, "GLOO_SOCKET_IFNAME": "eth0"}, timeout=arguments.timeout)
        measured = json.loads(output.read_text())
    return [row_of(result, wire) for result in measured["results"]], wire, measured["backend"]


def _run_local(argv: list[str], arguments: argparse.Namespace, env: dict[str, str]) -> None:
    ranks = str(arguments.hosts)
    if arguments.launcher == "mpi":
        command = [str(ROOT / "scripts" / "mpirun"), "-np", ranks, sys.executable, *argv]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *argv]
    subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, timeout=arguments.timeout, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="ranks, one per host (default 2)")
    parser.add_argument(
        "--network", default="local", help="local, or a rate for the emulated cluster: 1gbit, 100mbit, …"
    )
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], default="mpi")
    parser.add_argument("--ops", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS), metavar="OP")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES", help="of the whole buffer")
    parser.add_argument("--iterations", type=int, default=100, help="pairs per case, fewer for cases that take long")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for the whole run")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument(
        "--check-bars", action="store_true", help="exit with 1 unless every bar is met, and one was there"
    )
    arguments = parser.parse_args()
    end_in_order()
    try:
        rows, wire, backend = run(arguments)
    except (ClusterError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"bench.collectives: {error}\n")
        return 2
    mbit = 0.0 if wire is None else wire * 8 / 1e6
    goodput_text = f"goodput {mbit:.{0 if mbit >= 20 else 2}f} Mbit/s"
    where = "this machine" if wire is None else f"{arguments.network} links, {goodput_text}"
    print(f"{arguments.hosts} ranks, {backend}, {where}; torch {torch.__version__}, Python {platform.python_version()}")
    print(table(rows))
    if arguments.json:
        about = {"hosts": arguments.hosts, "network": arguments.network, "backend": backend, "goodput": wire}
        arguments.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    verdicts = judge(rows, arguments.hosts, backend)
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
