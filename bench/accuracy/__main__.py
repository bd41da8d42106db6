"""``python -m bench.accuracy``: the loss over wall time, method by method, on the same batches in the same order.

python -m bench.accuracy --task gpt2 --methods dear ddp horovod --workers 2 --network 1gbit
python -m bench.accuracy --task cnn --methods dear co2 co2:outer_frequency=3 --steps 600 --seeds 3
python -m bench.accuracy --task cnn --methods co2:outer=acco --steps 600 --seeds 3 --add

Methods are compared after as many steps. With a --network, which makes them take longer, --add may give others more or
fewer of them: those that fit in the same time. It also gives methods that are there the seeds that they lack.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.accuracy.curve import draw, report
from bench.accuracy.report import markdown
from bench.accuracy.tasks import TASKS
from bench.emulation.cluster import ClusterError
from bench.methods.method import Method, MethodUnavailable
from bench.methods.registry import method
from bench.program import at_least, end_in_order
from bench.train import launcher
from bench.train.origin import today
from bench.train.settings import Settings, check


def prepare(spec: str, arguments: argparse.Namespace) -> tuple[Settings, Method]:
    """The settings and the method of one run.

    Raises ``ValueError`` or ``MethodUnavailable`` for one that cannot run.
    """
    settings = Settings(method=spec, workers=arguments.workers, network=arguments.network, timeout=arguments.timeout)
    check(settings)
    chosen = method(spec)
    chosen.look()
    return settings, chosen


def run(spec: str, seed: int, settings: Settings, chosen: Method, arguments: argparse.Namespace) -> dict[str, Any]:
    """One method's losses and times by one seed, and the code that they are of."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.json"
        task = {"method": spec, "task": arguments.task, "steps": arguments.steps, "seed": seed}
        argv = ["-m", "bench.accuracy.worker", json.dumps({**task, "output": str(output)})]
        launcher.launch(settings, chosen, argv)
        made: dict[str, Any] = json.loads(output.read_text())
    print(f"bench.accuracy: {spec}, seed {seed}: {made['seconds'][-1]:.0f} s", file=sys.stderr)
    return {**made, "origin": today().to_dict()}


def curve(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method's `runs`, one for each seed, with the curve of the first, which is drawn."""
    return {**{key: runs[0][key] for key in ("loss", "seconds", "origin")}, "runs": runs}


def leave(curves: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the numbers, the picture and the report of what has been run so far; the next run may fail."""
    arguments.output.with_suffix(".json").write_text(json.dumps(curves))
    about = f"{arguments.task}, {arguments.workers} workers, {arguments.network}"
    timed = arguments.network != "local"
    draw(curves, about, arguments.output, timed=timed)
    runs = {name: one["runs"] for name, one in curves.items()}
    steps = count([len(one["loss"]) for one in curves.values()], "step")
    seeds = count([len(made) for made in runs.values()], "seed")
    text = markdown(f"{about}; {steps}, {seeds}.", runs, timed=timed)
    arguments.output.with_suffix(".md").write_text(text)


def count(numbers: Sequence[int], thing: str) -> str:
    """A range as text: the least and the largest of `numbers`, with the unit `thing`."""
    least, most = min(numbers), max(numbers)
    return f"{least:,} to {most:,} {thing}s" if least < most else f"{most:,} {thing}{'s' if most > 1 else ''}"


def earlier(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The earlier results that `--add` adds to.

    Raises ``ValueError`` where its steps are others than those that are asked for.
    """
    file = arguments.output.with_suffix(".json")
    curves: dict[str, dict[str, Any]] = json.loads(file.read_text())
    for name, one in curves.items():
        steps = len(one["loss"])
        # Methods of other steps are compared over seconds, on a network; seeds of one method are averaged.
        comparable = steps == arguments.steps or (arguments.network != "local" and name not in arguments.methods)
        if not comparable:
            raise ValueError(
                f"{file} has {steps} steps of {name}, and --steps {arguments.steps} is asked for: pass --steps {steps}, "
                "or another --output"
            )
        one["runs"] = [{"origin": one["origin"], **run} for run in one["runs"]]  # of before each run had its own
    return curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--methods", nargs="+", default=["dear", "ddp"], metavar="METHOD")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--network", default="local", help="local, or the rate of emulated links: 1gbit, 100mbit, …")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--seeds", type=at_least(1), default=1, help="so many runs of each method, with other batches")
    parser.add_argument("--add", action="store_true", help="to what the output has: methods, and seeds of them")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("accuracy.png"),
        help="the picture; beside it numbers, .json, and tables, .md",
    )
    arguments = parser.parse_args()
    end_in_order()
    curves: dict[str, dict[str, Any]] = {}
    try:
        prepared = {spec: prepare(spec, arguments) for spec in arguments.methods}  # all of them, before any is trained
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        if arguments.add:
            curves = earlier(arguments)
        for spec, (settings, chosen) in prepared.items():
            runs = curves[spec]["runs"] if spec in curves else []
            for seed in range(len(runs) + 1, arguments.seeds + 1):
                runs.append(run(spec, seed, settings, chosen, arguments))
                curves[spec] = curve(runs)
                leave(curves, arguments)
    except (ValueError, OSError, MethodUnavailable, ClusterError, launcher.LauncherError) as error:
        sys.stderr.write(f"bench.accuracy: {error}\n")
        return 2
    finally:
        if curves:
            print(report(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
