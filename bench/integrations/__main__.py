"""``python -m bench.integrations``: a library's own DDP beside dear in it, in pairs, one after the other.

python -m bench.integrations --library transformers --network 1gbit          # two emulated hosts, as root
python -m bench.integrations --library accelerate --steps 10 --pairs 1       # this machine
python -m bench.integrations --library lightning --ddp 'ddp:bucket_mb={..,1,4,25,..}' ddp:bucket_mb=1,view=True

DDP's settings are searched first: those of --ddp run once each, and smaller and larger buckets while they are faster. The
fastest is in the pairs. Every loss and every step's time of all runs is kept in --json. Six pairs give an interval.

A worker is a module that trains as the library's users do. It is given a JSON object with `method` (dear, ddp, or none for
one process with the whole batch), `ddp` (arguments of torch's DistributedDataParallel), `workers`, `steps`, `output`. There
rank 0 writes `loss` (of each step, over the whole batch) and `seconds` (since training began, at the end of each step).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.emulation.cluster import ClusterError
from bench.integrations.report import of_pair, of_search, report, step_seconds
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.methods.spec import parse_spec, refuse_unknown
from bench.program import at_least, end_in_order
from bench.sweep.search import beyond, expand, searches
from bench.train import launcher
from bench.train.cores import Busy, busy_share, core_ticks, look, stolen_share, told, worst
from bench.train.origin import today
from bench.train.settings import Settings, check

#: The worker of each library.
WORKERS = {
    "accelerate": "bench.integrations.accelerate",
    "lightning": "bench.integrations.lightning",
    "transformers": "bench.integrations.transformers",
}
#: Options of the method ``ddp`` by the names of torch's constructor, and those that each library hands on to it.
CONSTRUCTOR = {"bucket_mb": "bucket_cap_mb", "view": "gradient_as_bucket_view", "static_graph": "static_graph"}
TAKEN = {
    "accelerate": ("bucket_mb", "view", "static_graph"),
    "lightning": ("bucket_mb", "view", "static_graph"),
    "transformers": ("bucket_mb", "static_graph"),
}
TRIES = 3  # of a run that fails: processes of torch's own sometimes do not end in order
#: What is tried of DDP's settings.
DDP = {
    "accelerate": ["ddp:bucket_mb={..,1,4,25,..}", "ddp:bucket_mb={..,1,4,..},view=True,static_graph=True"],
    "lightning": ["ddp:bucket_mb={..,1,4,25,..}", "ddp:bucket_mb={..,1,4,..},view=True,static_graph=True"],
    "transformers": ["ddp:bucket_mb={..,1,4,25,..}", "ddp:bucket_mb={..,1,4,..},static_graph=True"],
}


def constructor(library: str, spec: str) -> dict[str, Any]:
    """The arguments of torch's DistributedDataParallel in a text like ``"ddp:bucket_mb=4"``.

    Raises ``ValueError`` for another method, and for what the library does not hand on.
    """
    name, options = parse_spec(spec)
    if name != "ddp":
        raise ValueError(f"--ddp is the library's own DDP, with options: ddp:bucket_mb=4, …, and not {spec!r}")
    refuse_unknown(f"DDP in {library}", options, TAKEN[library])
    method(spec)  # it refuses values that mean nothing
    return {CONSTRUCTOR[option]: value for option, value in options.items()}


def run(spec: str, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses and times of one method."""
    network = arguments.network if workers > 1 else "local"
    settings = Settings(
        method=spec, workers=workers, network=network, launcher=arguments.launcher, timeout=arguments.timeout
    )
    check(settings)
    name = parse_spec(spec)[0]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.json"
        task = {"method": name, "workers": arguments.workers, "steps": arguments.steps, "output": str(output)}
        task["ddp"] = constructor(arguments.library, spec) if name == "ddp" else {}
        launcher.launch(settings, method(spec), ["-m", WORKERS[arguments.library], json.dumps(task)])
        curve: dict[str, Any] = json.loads(output.read_text())
        return curve


def search(specs: list[str], measure: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each setting of DDP took, by its text. One alone is not tried before the pairs."""
    planned = [Settings(method=spec) for several in specs for spec in expand(several)]
    going_on = searches(specs, planned)
    found: dict[str, dict[str, Any]] = {}
    if len(planned) == 1 and not going_on:
        return found

    def seconds_of(one: Settings) -> float | None:
        return step_seconds(found[one.method]) if one.method in found else None

    left = planned
    while left:
        for one in left:
            found[one.method] = measure(one.method)
        left = [one for each in going_on for one in beyond(each, seconds_of) if one.method not in found]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=list(WORKERS), required=True)
    parser.add_argument(
        "--ddp",
        nargs="+",
        metavar="SETTINGS",
        help="of its own DDP that are tried (default: buckets, views, static_graph)",
    )
    parser.add_argument("--workers", type=at_least(1), default=2)
    parser.add_argument("--network", default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …")
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], default="torchrun", help="of both methods")
    parser.add_argument("--steps", type=at_least(3), default=20)
    parser.add_argument("--pairs", type=at_least(1), default=3, help="of runs, the two methods in turn")
    parser.add_argument("--one-process", action="store_true", help="also the losses of one process on the whole batch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--busy", action="store_true", help="measure while others use the machine, and mark the result")
    parser.add_argument("--json", type=Path, help="write all losses and times here")
    arguments = parser.parse_args()
    if (arguments.library, arguments.launcher) == ("lightning", "mpi"):
        parser.error("under mpirun, processes of Lightning's own DDP do not all end in order: take --launcher torchrun")
    end_in_order()
    specs = arguments.ddp or DDP[arguments.library]
    pairs: list[dict[str, Any]] = []
    shares: list[dict[str, float | None]] = []

    def measure(spec: str, workers: int = arguments.workers, tries: int = TRIES) -> dict[str, Any]:
        before, begun = look(allowed=arguments.busy), core_ticks()
        try:
            curve = run(spec, workers, arguments)
        except (ClusterError, launcher.LauncherError) as error:
            if tries == 1:
                raise
            sys.stderr.write(f"bench.integrations: {spec}: {error}; once more\n")
            return measure(spec, workers, tries - 1)
        cores = begun, core_ticks()
        shares.append({"busy_before": before, "cores_busy": busy_share(*cores), "cores_stolen": stolen_share(*cores)})
        return curve

    try:
        for several in specs:
            for spec in expand(several):
                constructor(arguments.library, spec)
        searched = search(specs, measure)
        best = min(searched, key=lambda spec: step_seconds(searched[spec]), default=specs[0])
        if searched:
            print(of_search(searched), flush=True)
        for number in range(arguments.pairs):
            order = [("ddp", best), ("dear", "dear")]
            curves = {name: measure(spec) for name, spec in order[:: 1 - 2 * (number % 2)]}
            pairs.append({name: curves[name] for name, _ in order})
            print(of_pair(pairs[-1]), flush=True)
        alone = measure("none", 1) if arguments.one_process else None
    except (ValueError, OSError, Busy, MethodUnavailable, ClusterError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.integrations: {error}\n")
        return 2
    print(report(pairs, alone, best))
    busy = worst(shares)
    print(told(busy["cores_busy"], busy["busy_before"], busy["cores_stolen"]))
    if arguments.json is not None:
        about = {name: getattr(arguments, name) for name in ("library", "workers", "network", "launcher", "steps")}
        left = {**about, **busy, "origin": today().to_dict()}
        left |= {"tried": specs, "ddp": best, "searched": searched, "pairs": pairs, "one_process": alone}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(left))
    return 0


if __name__ == "__main__":
    sys.exit(main())
