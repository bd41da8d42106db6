"""``python -m bench.accuracy``: the loss over wall time, method by method, on the same batches in the same order.

python -m bench.accuracy --task gpt2 --methods dear ddp horovod:operations=gloo --network 1gbit --launcher torchrun
python -m bench.accuracy --task cnn --methods dear dear:backward_passes_per_step=12 co2 --steps 600 --rates
python -m bench.accuracy --task cnn --methods co2:outer=acco --steps 600 --rates --add

Methods are compared after as many steps, each of which takes one batch on every rank. With a --network, which makes them
take longer, --add may give others more or fewer of them: those that fit in the same time. It also gives methods that are
there the seeds that they lack, and draws and reports anew what lacks none.

With --rates, each method first tries all learning rates of one grid, without the network, and is measured with its best.
That is the rate of the optimizer that it wraps: an outer learning rate stays what the method's name says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.accuracy import search
from bench.accuracy.curve import draw, report
from bench.accuracy.ranks import DIVERGED, diverged, gathered
from bench.accuracy.report import markdown
from bench.accuracy.stored import curve, stored, whole
from bench.accuracy.tasks import TASKS
from bench.emulation.cluster import ClusterError
from bench.methods.method import Method, MethodUnavailable
from bench.methods.registry import method
from bench.program import at_least, end_in_order
from bench.train import launcher
from bench.train.cores import Busy, busy_share, core_ticks, look
from bench.train.cores import told as cores_told
from bench.train.origin import today
from bench.train.settings import Settings, check

Curves = dict[str, dict[str, Any]]


class Diverged(RuntimeError):
    """A gradient of a run was not finite."""


def prepare(spec: str, arguments: argparse.Namespace) -> tuple[Settings, Method]:
    """The settings and the method of one run.

    Raises ``ValueError``, ``MethodUnavailable`` or ``LauncherError`` for one that cannot run.
    """
    asked = {name: getattr(arguments, name) for name in ("workers", "network", "launcher", "timeout")}
    settings = Settings(method=spec, **asked)
    check(settings)
    chosen = method(spec)
    chosen.look()
    launcher.pick(settings, chosen)
    return settings, chosen


def run(settings: Settings, chosen: Method, task: dict[str, Any], *, busy: bool) -> dict[str, Any]:
    """One run of a `task` (its name, steps, seed, rate), and the code that it is of.

    Raises :class:`Busy` unless `busy`, and :class:`Diverged`, as methods of ours refuse gradients that are not finite.
    """
    before, cores = look(allowed=busy), core_ticks()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.json"
        argv = ["-m", "bench.accuracy.worker", json.dumps({"method": settings.method, **task, "output": str(output)})]
        try:
            launcher.launch(settings, chosen, argv)
        except launcher.LauncherError:
            told = diverged(output, settings.workers)
            if told is None:
                raise
            raise Diverged(f"{settings.method} diverged at learning rate {task['rate']:g}: {told}") from None
        made = gathered(output, settings.workers)
    during = busy_share(cores, core_ticks())
    about = f"{settings.method}, seed {task['seed']}, learning rate {task['rate']:g}"
    print(f"bench.accuracy: {about}: {made['seconds'][-1]:.0f} s; {cores_told(during, before)}", file=sys.stderr)
    if settings.network == "local":
        made["seconds"] = made["seconds"][-1:]  # ranks share the machine with whatever else runs
    return {**made, "origin": today().to_dict(), "busy_before": before, "cores_busy": during}


def trial(settings: Settings, chosen: Method, task: dict[str, Any]) -> dict[str, Any]:
    """A run of the search, whose seconds do not count: without the network, and beside whatever else runs."""
    try:
        made = run(replace(settings, network="local"), chosen, task, busy=True)
    except Diverged as error:
        sys.stderr.write(f"bench.accuracy: {error}\n")
        return {"rate": task["rate"], DIVERGED: str(error)}
    return {
        "rate": made["rate"],
        "end_loss": search.mean_of_end(made["loss"]),
        "origin": made["origin"],
        "seconds": made["seconds"][-1],
    }


def measured(curves: Curves) -> Curves:
    """Those that have a run; of others there is a search, at most."""
    return {name: one for name, one in curves.items() if one["runs"]}


def leave(curves: Curves, arguments: argparse.Namespace) -> None:
    """Write the numbers, the picture and the report of what has been run so far; the next run may fail."""
    arguments.output.with_suffix(".json").write_text(json.dumps(stored(curves)))
    ready = measured(curves)
    if not ready:
        return
    started = f", under {arguments.launcher}" if arguments.launcher else ""
    about = f"{arguments.task}, {arguments.workers} workers, {arguments.network}{started}"
    timed = arguments.network != "local"
    draw(ready, about, arguments.output, timed=timed)
    runs = {name: one["runs"] for name, one in ready.items()}
    searches = {name: one["search"] for name, one in ready.items() if "search" in one}
    steps = count([len(one["loss"]) for one in ready.values()], "step")
    seeds = count([len(made) for made in runs.values()], "seed")
    text = markdown(f"{about}; {steps}, {seeds}.", runs, timed=timed, searches=searches)
    arguments.output.with_suffix(".md").write_text(text)


def count(numbers: Sequence[int], thing: str) -> str:
    """A range as text: the least and the largest of `numbers`, with the unit `thing`."""
    least, most = min(numbers), max(numbers)
    return f"{least:,} to {most:,} {thing}s" if least < most else f"{most:,} {thing}{'s' if most > 1 else ''}"


def earlier(arguments: argparse.Namespace) -> Curves:
    """The earlier results that `--add` adds to.

    Raises ``ValueError`` where its steps, or the learning rates that were searched, are others than those asked for.
    """
    file = arguments.output.with_suffix(".json")
    curves = whole(json.loads(file.read_text()))
    for name, one in curves.items():
        steps = len(one["loss"]) if one["runs"] else arguments.steps
        # Methods of other steps are compared over seconds, on a network; seeds of one method are averaged.
        comparable = steps == arguments.steps or (arguments.network != "local" and name not in arguments.methods)
        if not comparable:
            raise ValueError(
                f"{file} has {steps} steps of {name}, and --steps {arguments.steps} is asked for: pass --steps {steps}, "
                "or another --output"
            )
        _same_search(file, name, one, arguments)
        one["runs"] = [{"origin": one["origin"], **run} for run in one["runs"]]  # of before each run had its own
    return curves


def _same_search(file: Path, name: str, one: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Raises ``ValueError`` unless a method's search in a file is a part, or all, of the one that is asked for."""
    made, asked = search.grid_of(one["search"]) if "search" in one else [], arguments.rates or []
    grows = bool(made) and name in arguments.methods
    if made != asked and not (set(made) <= set(asked) and (grows or not one["runs"])):
        has, want = (
            f"--rates {' '.join(f'{rate:g}' for rate in rates)}" if rates else "no --rates" for rates in (made, asked)
        )
        raise ValueError(
            f"{file} has {has} of {name}, and {want} is asked for: methods share one grid; pass {has}, or another --output"
        )
    if made and name in arguments.methods and one["search"]["steps"] != arguments.search_steps:
        raise ValueError(
            f"{file} has a search of {one['search']['steps']} steps of {name}, and {arguments.search_steps} are asked for: "
            f"pass --search-steps {one['search']['steps']}, or another --output"
        )


def _searched(prepared: dict[str, tuple[Settings, Method]], curves: Curves, arguments: argparse.Namespace) -> None:
    """Have each method try the rates that it has not tried: methods in turn."""
    for rate in arguments.rates:
        for spec, (settings, chosen) in prepared.items():
            one = curves.setdefault(spec, {"runs": []})
            tries = one.setdefault("search", {"steps": arguments.search_steps, "tries": []})["tries"]
            if all(tried["rate"] != rate for tried in tries):
                task = {"task": arguments.task, "steps": arguments.search_steps, "seed": search.SEED, "rate": rate}
                tries.append(trial(settings, chosen, task))
                leave(curves, arguments)


def _learned(prepared: dict[str, tuple[Settings, Method]], curves: Curves, arguments: argparse.Namespace) -> None:
    """Measure the seeds that methods lack: methods in turn, so that what the machine does then, it does to all.

    If a search has tried more rates since, and found a better one, its seeds are measured again.
    """
    for seed in range(1, arguments.seeds + 1):
        for spec, (settings, chosen) in prepared.items():
            one = curves.setdefault(spec, {"runs": []})
            rate = search.best(one["search"]) if "search" in one else TASKS[arguments.task].arguments["lr"]
            kept = [made for made in one["runs"] if made.get("rate", rate) == rate]
            if len(kept) < seed:
                task = {"task": arguments.task, "steps": arguments.steps, "seed": seed, "rate": rate}
                busy = arguments.busy or arguments.network == "local"  # there, losses over steps are all that counts
                one.update(curve([*kept, run(settings, chosen, task, busy=busy)]))
                leave(curves, arguments)


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"should be a number above 0 and is {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--methods", nargs="+", default=["dear", "ddp"], metavar="METHOD")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--network", default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …")
    parser.add_argument("--launcher", choices=["mpi", "torchrun"], help="default: what each method prefers")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--seeds", type=at_least(1), default=3, help="so many runs of each method, with other batches")
    parser.add_argument(
        "--rates", nargs="*", type=_rate, metavar="RATE", help="search these; without numbers, the task's own grid"
    )
    parser.add_argument("--search-steps", type=at_least(1), help="of each run of the search (default: --steps)")
    parser.add_argument("--add", action="store_true", help="to what the output has: methods, and seeds of them")
    parser.add_argument("--busy", action="store_true", help="train while others use the machine, and mark the curves")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("accuracy.png"),
        help="the picture; beside it numbers, .json, and tables, .md",
    )
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.search_steps is not None and arguments.rates is None:
        parser.error("--search-steps is for a search of learning rates: give --rates, too")
    arguments.search_steps = arguments.search_steps or arguments.steps
    arguments.rates = None if arguments.rates is None else sorted(arguments.rates or TASKS[arguments.task].rates)
    end_in_order()
    curves: Curves = {}
    try:
        prepared = {spec: prepare(spec, arguments) for spec in arguments.methods}  # all of them, before any is trained
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        if arguments.add:
            curves = earlier(arguments)
            leave(curves, arguments)
        if arguments.rates is not None:
            _searched(prepared, curves, arguments)
        _learned(prepared, curves, arguments)
    except (ValueError, OSError, Busy, Diverged, MethodUnavailable, ClusterError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.accuracy: {error}\n")
        return 2
    finally:
        if ready := measured(curves):
            print(report(ready))
    return 0


if __name__ == "__main__":
    sys.exit(main())
