"""Run a sweep of benchmarks and report it.

    python benchmarks.py                                    configs/sweeps/default.toml, into logs/default/
    python benchmarks.py configs/sweeps/paper-fusion.toml
    python benchmarks.py configs/sweeps/paper-fusion.toml --only model=resnet50 --only workers=2
    python benchmarks.py --report                           report what is there, run nothing

Each run waits until other processes leave the machine alone, and says how busy its cores were. A sweep that was stopped
goes on where it stopped; results of another commit, torch or DEAR_*, HOROVOD_*, … variables are
measured again. Failed runs are tried again, now and at the next start.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from bench.program import ROOT, at_least, end_in_order
from bench.sweep.bars import judge
from bench.sweep.failures import Failures
from bench.sweep.journal import Journal, Occupied, alone
from bench.sweep.plots import draw
from bench.sweep.report import write
from bench.sweep.runner import run_all
from bench.sweep.summary import group
from bench.sweep.table import Sweep, read, select
from bench.train.cores import Busy, look
from bench.train.origin import UNCOMMITTED, today

DEFAULT = ROOT / "configs" / "sweeps" / "default.toml"


def report(sweep: Sweep, journal: Journal, failures: Failures, folder: Path, check_bars: bool) -> int:
    """Write the report, say where it is and what it judges; 1 where a run failed, or a bar did that should be checked."""
    runs = (*sweep.runs, *sweep.beyond(journal.seconds))
    results = [result for result in map(journal.get, runs) if result is not None]
    failed = failures.of(runs, journal)
    missing = [one.settings for one in failed if journal.get(one.settings) is None]
    groups = group(results)
    verdicts = judge(groups, sweep.bars, missing, sweep.left_out)
    write(folder, sweep.title, results, groups, verdicts, failed, draw(groups, folder))
    for verdict in verdicts:
        print(f"{verdict.word if verdict.passes else verdict.word.upper():<10}  {verdict.text}")
    print(f"{len(results)} of {len(runs)} runs have a result: {folder / 'reports.md'}, reports.json and pictures")
    passes = all(verdict.passes for verdict in verdicts) or not check_bars
    return 0 if passes and not any(one.tries for one in failed) else 1


def run(sweep: Sweep, folder: Path, arguments: argparse.Namespace) -> int:
    """Run what is left, and report it all."""
    journal, failures = (
        Journal(folder / "results.jsonl", today(), keep=arguments.keep),
        Failures(folder / "failures.jsonl"),
    )
    if arguments.fresh:
        every = (*sweep.runs, *sweep.beyond(journal.seconds))
        dropped = journal.forget(every, folder / "forgotten.jsonl")
        if dropped:
            say(f"forgot {dropped} results, which are in {folder / 'forgotten.jsonl'} now")
    others = journal.others(sweep.runs)
    if others:
        say(f"{others} results are of other code or another environment, and are measured again (--keep reuses them)")
    if os.geteuid() != 0 and any(run.network != "local" for run in sweep.runs):
        say("runs with emulated links need root and will be reported as failed")
    if UNCOMMITTED in today().commit:
        say("the code has changes that are not committed: docs may not quote these results (python -m bench.claims)")
    end_in_order()
    try:
        looking = partial(look, allowed=arguments.busy)
        run_all(sweep.runs, journal, failures, folder, arguments.tries, look=looking)
        tried = set(sweep.runs)
        while left := [one for one in sweep.beyond(journal.seconds) if one not in tried]:
            run_all(left, journal, failures, folder, arguments.tries, look=looking)
            tried.update(left)
    except KeyboardInterrupt:
        say("stopped; the same command goes on with what is left")
        return 130
    except Busy as error:
        say(f"stopped: {error}; the same command goes on with what is left")
        return 2
    return report(sweep, journal, failures, folder, arguments.check_bars)


def say(text: str) -> None:
    print(f"benchmarks.py: {text}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", nargs="?", type=Path, default=DEFAULT, help="a table (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder of results (default: logs/NAME)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SETTING=VALUE", help="a part of it: workers=2, …"
    )
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="of each run, in turn (default: the table's)")
    parser.add_argument("--busy", action="store_true", help="run while others use the machine, and mark the results")
    parser.add_argument("--tries", type=int, default=2, help="how often a failing run is tried")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these runs")
    parser.add_argument("--keep", action="store_true", help="reuse results of other code and environments too")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--check-bars", action="store_true", help="exit with 1 unless every bar was judged and met")
    arguments = parser.parse_args()
    folder = (arguments.output or ROOT / "logs" / arguments.sweep.stem).resolve()
    try:
        sweep = select(read(arguments.sweep, arguments.repeats), arguments.only)
        if arguments.check_bars and not sweep.bars:
            raise ValueError(f"{arguments.sweep} has no [[bars]] that --check-bars could check")
        if arguments.fresh and arguments.report:
            raise ValueError("--report runs nothing: --fresh would leave it nothing to report")
        if arguments.report and not (folder / "results.jsonl").exists():
            raise ValueError(f"there is nothing to report in {folder}: no results.jsonl, which a sweep leaves there")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        say(str(error))
        return 2
    if arguments.report:  # it changes no result, and may look on while a sweep is running
        journal = Journal(folder / "results.jsonl", today(), keep=True)
        return report(sweep, journal, Failures(folder / "failures.jsonl"), folder, arguments.check_bars)
    try:
        with alone(folder):
            return run(sweep, folder, arguments)
    except Occupied as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
