"""``python -m bench.validation``: a table of cells predicted, the predictions sealed, the cells run, and both compared.

    python -m bench.validation --seal          as root: measures what predictions need, and predicts every cell
    git add docs/results/prediction/sealed.json && git commit
    python -m bench.validation                 as root: runs the cells, which needs that commit
    python -m bench.validation --report-only --report docs/results/prediction/sealed.md

A prediction uses what is known before its cell runs: the profile that layers follow, the method `none` on as many ranks,
what methods add on one rank, and a probe of the network. Nothing is fitted to a cell. --report-only also predicts anew from
what is in the sealed file, and says whether the same comes out. What was measured is kept in logs/NAME; a table that was
stopped goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.program import ROOT, end_in_order
from bench.sweep.failures import Failure
from bench.sweep.journal import Occupied, alone
from bench.sweep.report import provenance
from bench.sweep.table import Sweep, read, select
from bench.train.cores import Busy, was_busy
from bench.train.origin import UNCOMMITTED, today
from bench.train.settings import Settings
from bench.validation import seal as seals
from bench.validation.facts import Unknown
from bench.validation.judge import Cell
from bench.validation.measure import Runs, Workshop
from bench.validation.report import draw, markdown
from bench.validation.seal import Commitment, Seal, SealError, commitment, predicted

DEFAULT = ROOT / "configs" / "sweeps" / "sealed.toml"


def seal(sweep: Sweep, arguments: argparse.Namespace, folder: Path) -> int:
    """Predict all cells, of which nothing is run, and write the sealed file; returns 1 where a cell has no prediction."""
    shop, missing = Workshop(folder, today(), keep=arguments.keep, busy=arguments.busy), {}
    for cell in sweep.runs:
        try:
            shop.measure(cell)
        except Unknown as error:
            missing[cell] = str(error)
    predictions = tuple((cell, missing.get(cell) or predicted(cell, shop.facts)) for cell in sweep.runs)
    sealed = Seal(arguments.table.read_text(), today(), shop.facts, predictions)
    seals.write(sealed, arguments.sealed)
    for cell, value in predictions:
        if isinstance(value, str):
            say(f"no prediction of {cell.method}, {cell.emulate_compute or cell.model}, {cell.workers} hosts: {value}")
    count = sum(not isinstance(value, str) for _, value in predictions)
    say(f"{count} of {len(predictions)} cells are predicted; {arguments.sealed} has SHA-256 {sealed.sha256}")
    say("commit it now: cells run only after that")
    return 0 if count == len(predictions) else 1


def compare(
    cells: Sequence[Settings], sealed: Seal, since: Commitment | None, runs: Runs, *, run: bool
) -> tuple[list[Cell], list[Failure]]:
    """Run the cells that have a sealed prediction, unless they are there, and compare.

    What ran before `since`, where the seal is in a commit, is no measurement of a prediction.
    """
    found, failed = [], []
    for cell in cells:
        expected = sealed.of(cell)
        if isinstance(expected, str):
            failed.append(Failure(cell, f"no prediction: {expected}", 0))
            continue
        result = runs.measure(cell) if run else runs.journal.get(cell)
        if result is None:
            failed.append(Failure(cell, runs.reason(cell), 0))
            continue
        if since is not None and result.get("begun", "") <= since.at.isoformat():
            failed.append(Failure(cell, f"it ran before its prediction was sealed, in commit {since}", 0))
            continue
        measured = statistics.median(result["step_seconds"])
        found.append(Cell(cell, expected, measured, result["cores_busy"], was_busy(result)))
        say(f"predicted {expected:.3f} s, measured {found[-1].measured:.3f} s: {found[-1].error:+.1%}")
    return found, failed


def report(
    sweep: Sweep, sealed: Seal, since: Commitment | None, about: str, runs: Runs, arguments: argparse.Namespace
) -> int:
    """Compare, and write what was asked for; returns 1 where a cell has no result. `about`: the seal, in a sentence."""
    cells, failed = compare(sweep.runs, sealed, since, runs, run=not arguments.report_only)
    results = [result for result in map(runs.journal.get, sweep.runs) if result is not None]
    origin = provenance(results) if results else "Nothing was measured."
    picture = None
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        picture = draw(cells, arguments.report.with_suffix(".png")) if cells else None
    text = markdown(sweep.title, f"{origin} {about}", cells, failed, picture)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json is not None:
        data = {"cells": [{**asdict(cell), "error": cell.error} for cell in cells], "origin": today().to_dict()}
        data["failures"] = [{"settings": one.settings.to_dict(), "reason": one.reason} for one in failed]
        data["seal"] = {"sha256": sealed.sha256, "about": about}
        arguments.json.write_text(json.dumps(data, indent=1))
    return 1 if failed else 0


def checked(sealed: Seal, arguments: argparse.Namespace) -> tuple[Commitment | None, str]:
    """The commit of a seal that runs may be held to, and what a report says of it.

    Raises :class:`SealError` for any other, but for one that is to be used although it is :code:`--uncommitted`.
    """
    since = None if arguments.uncommitted else commitment(arguments.sealed)
    if sealed.table != arguments.table.read_text():
        raise SealError(f"{arguments.table} is not the table that {arguments.sealed} was made of: seal anew")
    now = today()
    if str(sealed.origin) != str(now) and not arguments.keep:
        raise SealError(
            f"predictions were sealed with {sealed.origin}, and this is {now}: check that out, seal anew, or say --keep"
        )
    where = f"in commit {since}" if since is not None else "in no commit"
    return since, f"{_told(sealed)}, {where}, before any cell ran."


def recomputed(sealed: Seal, arguments: argparse.Namespace) -> tuple[Commitment | None, str]:
    """The commit of a seal, if it is in one, and what a report says of it: whether the same follows by computing again."""
    others = sealed.recomputed()
    for cell in others:
        say(f"another prediction follows for {cell.method}, {cell.emulate_compute or cell.model}, {cell.workers} hosts")
    count = sum(not isinstance(value, str) for _, value in sealed.predictions)
    same = "all are equal" if not others else f"{len(others)} differ, and were sealed with other code"
    since = None
    try:
        since = commitment(arguments.sealed)
        where = f"in commit {since}"
    except SealError as error:
        where = f"in no commit ({error})"
    again = f"Computed again from what was sealed with them, of {count} predictions {same}."
    return since, f"{_told(sealed)}, {where}. {again}"


def _told(sealed: Seal) -> str:
    return f"Predictions were sealed with {sealed.origin}, SHA-256 {sealed.sha256}"


def say(text: str) -> None:
    print(f"bench.validation: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=DEFAULT, help="(default: %(default)s)")
    parser.add_argument("--seal", action="store_true", help="predict, and run none of the cells")
    parser.add_argument("--sealed", type=Path, metavar="FILE", help="default: docs/results/prediction/NAME.json")
    parser.add_argument("--only", action="append", default=[], metavar="SETTING=VALUE", help="cells: workers=2, …")
    parser.add_argument("--output", type=Path, help="folder of what was measured (default: logs/NAME)")
    parser.add_argument("--json", type=Path, help="write every cell here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write Markdown here, and the picture beside it")
    parser.add_argument(
        "--uncommitted",
        action="store_true",
        help="run the cells of a sealed file that is in no commit; the report says so",
    )
    parser.add_argument("--keep", action="store_true", help="reuse what was measured with other code, too")
    parser.add_argument(
        "--busy", action="store_true", help="measure while others use the machine, and mark the results"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is there")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.seal and (arguments.report_only or arguments.report or arguments.json):
        parser.error("--seal runs no cells, so there is nothing to report")
    if arguments.uncommitted and (arguments.seal or arguments.report_only):
        parser.error("--uncommitted is for running cells, and here none runs")
    name = arguments.table.stem
    arguments.sealed = arguments.sealed or ROOT / "docs" / "results" / "prediction" / f"{name}.json"
    folder = (arguments.output or ROOT / "logs" / name).resolve()
    try:
        sweep = select(read(arguments.table), arguments.only)
        sealed = None if arguments.seal else seals.read(arguments.sealed)
        if sealed is not None:
            since, about = recomputed(sealed, arguments) if arguments.report_only else checked(sealed, arguments)
    except (OSError, ValueError, SealError) as error:
        say(str(error))
        return 2
    if not arguments.report_only and os.geteuid() != 0:
        say("emulated links need root")
        return 2
    if not arguments.report_only and UNCOMMITTED in today().commit:
        say("the code has changes that are not committed: docs should not quote these results")
    end_in_order()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder):
            if sealed is None:
                return seal(sweep, arguments, folder)
            # Cells that ran before are of another seal: this one has a folder of its own.
            keep = arguments.keep or arguments.report_only
            runs = Runs(folder / sealed.sha256[:12], today(), keep=keep, busy=arguments.busy)
            return report(sweep, sealed, since, about, runs, arguments)
    except (Occupied, Busy) as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
