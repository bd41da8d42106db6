"""Run a sweep of benchmarks and report it.

    python benchmarks.py                                    configs/sweeps/default.toml, into logs/default/
    python benchmarks.py configs/sweeps/paper-fusion.toml
    python benchmarks.py configs/sweeps/paper-fusion.toml --only model=resnet50 --only workers=2
    python benchmarks.py --report                           report what is there, run nothing

A sweep that was stopped goes on where it stopped; results of another commit, torch or DEAR_*, HOROVOD_*, … variables are
measured again. Failed runs are tried again, now and at the next start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from bench.cluster import ROOT
from bench.sweep.bars import judge
from bench.sweep.journal import Journal
from bench.sweep.origin import today
from bench.sweep.plots import draw
from bench.sweep.report import write
from bench.sweep.runner import Failure, run_all
from bench.sweep.summary import group
from bench.sweep.table import Sweep, read, select

DEFAULT = ROOT / "configs" / "sweeps" / "default.toml"


def report(sweep: Sweep, journal: Journal, failures: list[Failure], folder: Path) -> bool:
    """Write the report, say where it is and what it judges; whether every bar passes."""
    results = [result for result in map(journal.get, sweep.runs) if result is not None]
    missing = [run for run in sweep.runs if journal.get(run) is None]
    groups = group(results)
    verdicts = judge(groups, sweep.bars, missing, sweep.left_out)
    write(folder, sweep.title, results, groups, verdicts, failures, draw(groups, folder))
    for verdict in verdicts:
        print(f"{verdict.word if verdict.passes else verdict.word.upper():<10}  {verdict.text}")
    print(f"{len(results)} of {len(sweep.runs)} runs have a result: {folder / 'reports.md'}, reports.json and pictures")
    return all(verdict.passes for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", nargs="?", type=Path, default=DEFAULT, help="a table (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder of results (default: logs/NAME)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SETTING=VALUE", help="a part of it: workers=2, …"
    )
    parser.add_argument("--tries", type=int, default=2, help="how often a failing run is tried")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--keep", action="store_true", help="reuse results of other code and environments too")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--check-bars", action="store_true", help="exit with 1 unless every bar was judged and met")
    arguments = parser.parse_args()
    folder = (arguments.output or ROOT / "logs" / arguments.sweep.stem).resolve()
    try:
        sweep = select(read(arguments.sweep), arguments.only)
    except (OSError, ValueError) as error:
        print(f"benchmarks.py: {error}", file=sys.stderr)
        return 2
    if arguments.check_bars and not sweep.bars:
        print(f"benchmarks.py: {arguments.sweep} has no [[bars]] that --check-bars could check", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    past = folder / "results.jsonl"
    if arguments.fresh:
        past.unlink(missing_ok=True)
    journal = Journal(past, today(), keep=arguments.keep or arguments.report)
    if arguments.report:
        met = report(sweep, journal, [], folder)
        return 1 if arguments.check_bars and not met else 0
    if os.geteuid() != 0 and any(run.network != "local" for run in sweep.runs):
        print("benchmarks.py: runs with emulated links need root and will be reported as failed", file=sys.stderr)
    others = journal.others(sweep.runs)
    if others:
        print(f"benchmarks.py: {others} results are of other code or another environment, and are measured again "
              "(--keep reuses them)", file=sys.stderr)  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended in order
    try:
        failures = run_all(sweep.runs, journal, folder, arguments.tries)
    except KeyboardInterrupt:
        print("benchmarks.py: stopped; the same command goes on with what is left", file=sys.stderr)
        return 130
    met = report(sweep, journal, failures, folder)
    return 1 if failures or (arguments.check_bars and not met) else 0


if __name__ == "__main__":
    sys.exit(main())
