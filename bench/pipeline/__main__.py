"""``python -m bench.pipeline``: pipelines beside data parallelism on emulated hosts, beside torch's own, as root.

    python -m bench.pipeline --stages 2 --data 2                   # four hosts: a step of both, in turn
    python -m bench.pipeline --stages 4 --data 1 --mb 0.1 --methods dear   # the bubble, and what calls cost
    python -m bench.pipeline --methods ddp-over-dear ddp           # torch's pipelining over our rings, beside gloo

Stages sleep for as long as they would compute, so that two cores can stand for several hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.emulation.cluster import Cluster, ClusterError, network
from bench.pipeline.result import METHODS, Pipelines, markdown
from bench.program import at_least, end_in_order, write_json
from bench.train.origin import today

__all__ = ["main", "run"]

_TOLD = ("stages", "data", "chunks", "schedule", "mb", "ms", "layers", "rows", "blocks", "steps", "warm_up", "methods")


def run(options: argparse.Namespace) -> Pipelines:
    """Raises ``ValueError`` or ``ClusterError``."""
    told = {name: getattr(options, name) for name in (*_TOLD, "bucket_mb", "timeline")}
    env = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Cluster(options.stages * options.data, options.network) as cluster:
        output = Path(folder) / "pipeline.json"
        worker = ["-m", "bench.pipeline.worker", str(output), json.dumps(told)]
        cluster.run_torch(worker, env=env, timeout=options.timeout)
        found = json.loads(output.read_text())
    about = {name: told[name] for name in (*_TOLD, "bucket_mb")} | {"network": options.network}
    return Pipelines(about | {"origin": today().to_dict()}, found["computing"], found["seconds"])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=at_least(1), default=2)
    parser.add_argument("--data", type=at_least(1), default=2, help="ranks that train the same stage")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    parser.add_argument("--mb", type=float, default=12.0, help="of a stage's parameters, MB of 2^20 bytes")
    parser.add_argument("--ms", type=float, default=25.0, help="for which a stage computes with each micro-batch")
    parser.add_argument("--layers", type=at_least(1), default=12, help="of a stage")
    parser.add_argument("--rows", type=at_least(1), default=8, help="of a micro-batch; 1 KB each goes between stages")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="of DDP")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["dear", "ddp"])
    parser.add_argument(
        "--network", type=network, default="1gbit", help="rate of the links: 1gbit, 100mbit, 1gbit+20ms, …"
    )
    parser.add_argument("--blocks", type=at_least(4), default=8)
    parser.add_argument("--steps", type=at_least(1), default=10, help="in a block")
    parser.add_argument("--warm-up", type=at_least(1), default=12, help="steps before the first block")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--timeline", metavar="FILE", help="record steps of dear; {rank} in the name gives every rank one"
    )
    options = parser.parse_args(argv)
    if options.timeline is not None and "dear" not in options.methods:
        parser.error("--timeline records dear, which --methods leaves out")
    options.timeline = options.timeline and str(Path(options.timeline).absolute())
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    end_in_order()
    try:
        found = run(options)
    except (ValueError, ClusterError) as error:
        sys.stderr.write(f"bench.pipeline: {error}\n")
        return 2
    print(markdown(found))
    if options.json is not None:
        write_json(options.json, asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
