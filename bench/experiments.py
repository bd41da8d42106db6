"""``python -m bench.experiments``: the published OSDP's experiments, mode by mode, on emulated hosts or this machine.

    python -m bench.experiments bert --network 1gbit -- --large --seq_length 128 --steps 3
    python -m bench.experiments gpt2 --json docs/results/osdp/gpt2.json -- --device_memory_limit 1024

What stands behind -- goes to the script, examples/osdp/train.py or train_bert.py. Modes run one after the other, on the
same data; with emulated hosts it needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.claims.experiments import difference, rendered
from bench.emulation.cluster import Cluster, ClusterError, network
from bench.program import ROOT, at_least, end_in_order, write_json
from bench.train.launcher import local_command
from bench.train.origin import today
from bench.train.settings import Settings

__all__ = ["SCRIPTS", "main", "run"]

#: The script of an experiment, and the option and the values that tell its modes.
SCRIPTS = {
    "bert": ("train_bert.py", "--mode", ("none", "group_sharding", "communication_with_groups")),
    "gpt2": ("train.py", "--fsdp_type", ("FSDP", "OSDP")),
}
_SAME = 1e-4  # of a loss: sums are in another order


def run(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What one mode measured. Raises ``ClusterError`` or ``subprocess.SubprocessError``."""
    script, option, _ = SCRIPTS[options.experiment]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        argv = [str(ROOT / "examples" / "osdp" / script), option, mode, *options.arguments, "--json", str(output)]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if options.network == "local":
            ranks = Settings(workers=options.hosts * options.ranks_per_host)
            command = local_command(options.launcher, ranks, argv, [])
            subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, timeout=options.timeout, check=True)
        else:
            with Cluster(options.hosts, options.network, options.ranks_per_host) as cluster:
                start = cluster.run_mpi if options.launcher == "mpi" else cluster.run_torch
                start(argv, env=env, timeout=options.timeout)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def _place(text: str) -> str:
    return text if text == "local" else network(text)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments",
        epilog="What stands behind -- goes to the script.",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("experiment", choices=list(SCRIPTS))
    parser.add_argument("--hosts", type=at_least(1), default=2)
    parser.add_argument("--ranks-per-host", type=at_least(1), default=2)
    parser.add_argument(
        "--network", type=_place, default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …"
    )
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], default="mpi")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    given = list(sys.argv[1:] if argv is None else argv)
    place = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:place])
    options.arguments = given[place + 1 :]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    end_in_order()
    runs = []
    for mode in SCRIPTS[options.experiment][-1]:
        try:
            runs.append(run(options, mode))
        except (ClusterError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"bench.experiments: {mode}: {error}\n")
            return 2
    found = {"network": options.network, "arguments": options.arguments, "origin": today().to_dict(), "runs": runs}
    print(rendered(found))
    if options.json is not None:
        write_json(options.json, found)
    if difference(runs) > _SAME:
        print(f"losses are not the same: they may differ by {_SAME:g}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
