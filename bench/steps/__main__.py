"""``python -m bench.steps``: every step from the first on, method by method, on emulated hosts, as root.

    python -m bench.steps --methods dear dear:threshold_mb=3 ddp --steps 200        what the first steps cost, in sum
    python -m bench.steps --then 500mbit --after 40 --steps 120                     the network changes while it trains

Other benchmarks measure once a method has settled; here nothing is left out. The methods run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.emulation.cluster import Cluster, ClusterError, parse_rate
from bench.methods.method import MethodUnavailable
from bench.methods.registry import method
from bench.program import at_least, end_in_order
from bench.steps.course import Course, draw, markdown
from bench.steps.worker import ASK, DONE
from bench.train.cores import Busy, busy_share, core_ticks, look, told, worst
from bench.train.launcher import LauncherError, environment, pick
from bench.train.origin import today
from bench.train.settings import Settings, to_argv

_NAP = 0.02


def _change(cluster: Cluster, rate: str, folder: Path, over: threading.Event) -> None:
    """Give the links another rate as soon as the ranks ask for it; they give up where that fails."""
    while not over.wait(_NAP):
        if (folder / ASK).exists():
            try:
                cluster.set_rate(rate)
            except ClusterError as error:
                sys.stderr.write(f"bench.steps: {error}\n")
                return
            (folder / DONE).touch()
            return


def run(settings: Settings, steps: int, then: str | None, after: int) -> Course:
    """Raises ``ClusterError``, ``LauncherError`` or :class:`MethodUnavailable`."""
    chosen = method(settings.method)
    chosen.look()
    over = threading.Event()
    with tempfile.TemporaryDirectory() as name, Cluster(settings.workers, settings.network) as cluster:
        folder = Path(name)
        watcher = threading.Thread(target=_change, args=(cluster, then, folder, over), daemon=True)
        if then is not None:
            watcher.start()
        argv = ["-m", "bench.steps.worker", name, str(steps), str(after if then else 0), *to_argv(settings)]
        start = cluster.run_mpi if pick(settings, chosen) == "mpi" else cluster.run_torch
        try:
            start(argv, env=environment(settings, chosen), timeout=settings.timeout)
        finally:
            over.set()
            if then is not None:
                watcher.join()
        found = json.loads((folder / "course.json").read_text())
    pairs = {name: [tuple(one) for one in found[name]] for name in ("settings", "planned")}
    return Course(**{**found, **pairs})


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["dear", "dear:threshold_mb=3", "ddp"], metavar="METHOD")
    parser.add_argument("--steps", type=at_least(20), default=200)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--milliseconds", type=at_least(1), default=760, help="of computation in a step, slept through")
    parser.add_argument("--workers", type=at_least(2), default=2)
    parser.add_argument("--network", default="1gbit", help="rate of the links: 1gbit, 100mbit, 1gbit+20ms, …")
    parser.add_argument("--then", metavar="RATE", help="rate that they have later")
    parser.add_argument("--after", type=at_least(1), default=40, metavar="STEPS", help="how many steps before")
    parser.add_argument("--busy", action="store_true", help="run while others use the machine, and mark the result")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="written together with a picture")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    for name in ("network", "then"):
        text = getattr(options, name)
        try:
            delay = parse_rate(text)[1] if text is not None else 0.0
        except ValueError as error:
            parser.error(f"--{name}: {error}")
        if delay and options.then:
            parser.error(f"--{name} {text}: links with a delay keep their rate; leave the delay out, or --then")
    if options.then and options.after >= options.steps:
        parser.error(f"--after {options.after} leaves none of {options.steps} steps on the other network")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    end_in_order()
    emulated = f"{options.model}@even:{options.milliseconds}"
    base = Settings(model=options.model, workers=options.workers, network=options.network, emulate_compute=emulated)
    courses: list[Course] = []
    shares: list[dict[str, float | None]] = []
    failed = False
    for spec in options.methods:
        begun = time.monotonic()
        try:
            busy, cores = look(allowed=options.busy), core_ticks()
            courses.append(run(replace(base, method=spec), options.steps, options.then, options.after))
            shares.append({"busy_before": busy, "cores_busy": busy_share(cores, core_ticks())})
        except (ValueError, Busy, ClusterError, LauncherError, MethodUnavailable) as error:
            sys.stderr.write(f"bench.steps: {spec}: {error}\n")
            failed = True
            continue
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"bench.steps: {spec} took {took}; {told(shares[-1]['cores_busy'], busy)}", file=sys.stderr)
    if not courses:
        return 2
    change = f", {options.then} after {options.after} steps" if options.then else ""
    about = (
        f"{options.steps} steps of {emulated} on {options.workers} hosts, {options.network}{change}; from the first on, "
        f"one run of each method; {os.cpu_count()} cores."
    )
    picture = None if options.report is None else options.report.with_suffix(".png")
    text = markdown(about, courses, picture and picture.name)
    print(text)
    if options.report is not None and picture is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
        draw(courses, picture)
    if options.json is not None:
        data: dict[str, Any] = {"about": about, "origin": today().to_dict(), **worst(shares)}
        data |= {"courses": [asdict(course) for course in courses]}
        options.json.write_text(json.dumps(data, indent=1))
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
