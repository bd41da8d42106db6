"""``python -m dear.predict --model bert --workers 64 --network 10gbit``: what each schedule would take, by simulation.

A profile says how long each layer takes and how many bytes its gradients have. The network is rings between hosts, and
within them; ranks are equal. What is not known is given as a range. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from overlap.plan.assignment import assign_owners
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import METHODS, SIZES_MB, Guess, Method, Prediction, predict
from overlap.plan.simulation.network import Link, Medium
from overlap.plan.simulation.profile import Profile, from_text, known, load
from overlap.plan.simulation.schedules import all_reduced, decoupled, negotiated
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload, fused, owned

__all__ = ["NETWORKS", "guesses", "main", "merged", "methods", "owned_by_rank", "table"]

_KINDS = ("likely", "best", "worst")
# Gbit/s, and microseconds that a message takes besides its bytes: likely, best, worst. Those of Ethernet are for TCP, where
# all-reduces of 8 to 64 workers on 10 Gbit/s have been measured to take 30 to 60 us a turn (MG-WFBP's and DeAR's papers).
NETWORKS: dict[str, tuple[float, tuple[float, float, float]]] = {
    "100mbit": (0.1, (100, 50, 200)),
    "1gbit": (1, (100, 50, 200)),
    "2.5gbit": (2.5, (60, 30, 120)),
    "10gbit": (10, (40, 20, 60)),
    "25gbit": (25, (30, 15, 50)),
    "100gbit": (100, (20, 10, 40)),
    "100gbit-ib": (100, (3, 2, 8)),
    "200gbit-ib": (200, (3, 2, 8)),
}
WITHIN: dict[str, tuple[float, tuple[float, float, float]]] = {
    "pcie": (96, (10, 5, 20)),
    "nvlink": (2400, (5, 3, 10)),
}
_PAYLOAD = (0.9, 0.95, 0.8)  # the share of a link's rate that collectives reach
_DERIVED = (1.0, 0.8, 1.3)  # of the seconds of a profile that was not measured
_MEASURED = (1.0, 0.97, 1.03)
_THREAD = (Costs(5e-6, 2e-5), Costs(), Costs(1.5e-5, 6e-5))  # hooks and issuing; a GPU computes meanwhile
_POWERS = range(1, 13)
MB = 2**20
_COPY = 1.7e-10  # seconds of a byte, on a CPU; a GPU copies it in a hundredth of that


def guesses(profile: Profile, network: str, within: str) -> list[Guess]:
    """Three guesses of a job: the likely one, the best and the worst."""
    pace = _DERIVED if profile.source.startswith("derived") else _MEASURED

    def link(rates: tuple[float, tuple[float, float, float]], kind: int) -> Link:
        gbit, microseconds = rates
        return Link.of_gbit(gbit, microseconds[kind] * 1e-6, _PAYLOAD[kind])

    return [
        Guess(pace[kind], _THREAD[kind], link(NETWORKS[network], kind), link(WITHIN[within], kind))
        for kind in range(len(_KINDS))
    ]


def methods(copy: float = 0.0) -> dict[str, Method]:
    """The methods that can be predicted: those of the simulation, MG-WFBP and oss.

    `copy`: seconds of a byte that Horovod's thread copies in memory.
    """
    horovod = partial(negotiated, threshold=128 * MB, cycle=1e-3, copy=copy)
    return {**METHODS, "Horovod": horovod, "mgwfbp": merged, "oss": owned_by_rank}


def _methods(profile: Profile) -> dict[str, Method]:
    return methods(_COPY if " cpu" in profile.device else 0.0)


def merged(work: Workload, network: Medium) -> Run:
    """Simulate a step of ``mgwfbp``, with buckets by MG-WFBP's own rule."""
    from mgwfbp.merge import least_bytes, merge
    from overlap.plan.cost_model import CostModel

    start, one = network.all_reduce(1).latency, network.all_reduce(MB).transfer / MB
    cost = CostModel(start, one, work.costs.per_bucket)
    tensors = [(index, size) for index, layer in reversed(list(enumerate(work.layers))) for size in layer.tensors[::-1]]
    sizes, seconds, before = [size for _, size in tensors], [], len(work.layers)
    for index, _ in tensors:
        seconds.append(sum(layer.backward for layer in work.layers[index:before]))
        before = index
    groups = merge(sizes, seconds, cost, merge_below=least_bytes(sizes, seconds, cost))
    buckets = [
        Bucket(tensors[group.tensors[-1]][0], tensors[group.tensors[0]][0], group.nbytes, len(group.tensors))
        for group in groups
    ]
    return all_reduced(work, network, buckets)


def owned_by_rank(work: Workload, network: Medium, threshold: float | None = None) -> Run:
    """Simulate a step of ``oss``, with buckets of at most `threshold` bytes (None: the best of its planner's sizes)."""
    from oss.optimizer import Oss

    sizes = [size for layer in work.layers for size in layer.tensors]
    owners = assign_owners(sizes, [0] * network.workers)

    def simulated(threshold: float) -> Run:
        buckets = owned(work.layers, fused(work.layers, threshold), owners, network.workers)
        return decoupled(work, network, buckets, lanes=Oss.lanes)

    limits = [mb * MB for mb in SIZES_MB] if threshold is None else [threshold]
    return min(map(simulated, limits), key=lambda run: run.step)


def table(predictions: Sequence[Prediction], batch_size: int, workers: int) -> str:
    """A table of predictions, a line for each method, the fastest first."""
    lines = [f"{'method':<28} {'step ms':>9} {'from':>9} {'to':>9} {'efficiency':>10} {'samples/s':>10}  waits for"]
    for each in sorted(predictions, key=lambda prediction: prediction.step):
        rate = batch_size * workers / each.step
        lines.append(
            f"{each.method:<28} {1e3 * each.step:9.1f} {1e3 * each.best:9.1f} {1e3 * each.worst:9.1f} "
            f"{each.efficiency:10.1%} {rate:10.0f}  {each.cause}"
        )
    return "\n".join(lines)


def _head(profile: Profile, options: argparse.Namespace, first: Prediction) -> str:
    layers, nbytes = profile.layers, sum(layer.nbytes for layer in profile.layers)
    hosts = -(-options.workers // options.per_host)
    return "\n".join(
        [
            f"{profile.model} on {profile.device}, {profile.batch_size} samples a rank: {len(layers)} layers, "
            f"{nbytes / 2**20:.0f} MB of gradients.",
            f"Profile: {profile.source}.",
            f"{options.workers} rank(s) on {hosts} host(s), {options.network} between them.",
            f"One process takes {1e3 * first.alone:.1f} ms, an all-reduce of all gradients at least "
            f"{1e3 * first.wire:.1f} ms: no schedule is faster than {1e3 * first.bound:.1f} ms.",
        ]
    )


def draw(profile: Profile, options: argparse.Namespace, path: Path) -> None:
    """Draw the scaling efficiency of each method over the number of workers into `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    likely = guesses(profile, options.network, options.within)[0]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    highest, ranks = 0.0, _columns(options.per_host)
    for name, method in _methods(profile).items():
        shares = [_predicted(name, method, profile.layers, workers, options, [likely]).efficiency for workers in ranks]
        highest = max(highest, *shares)
        axes.plot(ranks, shares, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(workers) for workers in ranks])
    axes.set_ylim(0, min(1.02, 1.1 * highest))
    axes.set_xlabel("ranks")
    axes.set_ylabel("scaling efficiency")
    axes.set_title(f"{profile.model} on {profile.device}, batch {profile.batch_size}, {options.network}: simulated")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _columns(per_host: int) -> list[int]:
    """Numbers of ranks up to about 4096, each on one host or on full ones."""
    inside = [2**power for power in _POWERS if 2**power < per_host]
    return inside + [per_host * 2**power for power in range(13) if 2 <= per_host * 2**power <= 2 ** max(_POWERS)]


def _predicted(
    name: str,
    method: Method,
    layers: Sequence[Layer],
    workers: int,
    options: argparse.Namespace,
    kinds: Sequence[Guess],
) -> Prediction:
    likely, *others = kinds
    return predict(name, method, layers, workers, per_host=options.per_host, likely=likely, others=others)


def _profile(options: argparse.Namespace) -> Profile:
    if options.profile is not None:
        return from_text(options.profile.read_text())
    there = [name for name in known() if name.startswith(f"{options.model}@{options.device}:")]
    if options.batch_size is None and there:
        return load(options.model, options.device, int(there[0].rpartition(":")[2]))
    return load(options.model, options.device, options.batch_size or 32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of predictions; returns 2 where something cannot be predicted."""
    parser = argparse.ArgumentParser(prog="python -m dear.predict", description=__doc__)
    parser.add_argument("--model", default="resnet50", help=f"of a profile: {', '.join(known())}")
    parser.add_argument("--device", default="a100")
    parser.add_argument("--batch-size", type=int, help="samples a rank (default: the profile's)")
    parser.add_argument("--profile", type=Path, help="a profile of your own, instead of model, device and batch size")
    parser.add_argument("--workers", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host (default 1)")
    parser.add_argument("--network", choices=NETWORKS, default="10gbit", help="between hosts (default 10gbit)")
    parser.add_argument("--within", choices=WITHIN, default="pcie", help="within a host (default pcie)")
    parser.add_argument("--picture", type=Path, help="draw scaling efficiency over 2 to 4096 ranks into this file")
    options = parser.parse_args(arguments)
    try:
        profile = _profile(options)
        kinds = guesses(profile, options.network, options.within)
        found = [
            _predicted(name, method, profile.layers, options.workers, options, kinds)
            for name, method in _methods(profile).items()
        ]
        _say(
            _head(profile, options, found[0]),
            "",
            table(found, profile.batch_size, options.workers),
            "",
            "Simulated, not measured.",
        )
        if options.picture is not None:
            draw(profile, options, options.picture)
            _say(f"Picture: {options.picture}")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"dear.predict: {error}\n")
        return 2
    return 0


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
