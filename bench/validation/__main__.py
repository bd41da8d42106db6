"""``python -m bench.validation``: each cell of a table predicted, then run, and both compared.

    python -m bench.validation                                   configs/sweeps/prediction.toml, as root; about 45 minutes
    python -m bench.validation --only model=mlp --only workers=2
    python -m bench.validation --report-only --report docs/results/prediction/reports.md

A prediction uses what is known before its cell runs: the profile that layers follow, the method `none` on as many ranks,
what methods add on one rank, and a probe of the network. Nothing is fitted to a cell. What was measured is kept in
logs/prediction; a table that was stopped goes on where it stopped.
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

from bench.emulation.cluster import ClusterError
from bench.program import ROOT, end_in_order
from bench.sweep.failures import Failure
from bench.sweep.journal import Occupied, alone
from bench.sweep.report import provenance
from bench.sweep.table import Sweep, read, select
from bench.train.launcher import LauncherError
from bench.train.origin import UNCOMMITTED, today
from bench.train.settings import Settings
from bench.validation.judge import Cell
from bench.validation.measure import Unknown, Workshop
from bench.validation.report import draw, markdown

DEFAULT = ROOT / "configs" / "sweeps" / "prediction.toml"


def compare(cells: Sequence[Settings], shop: Workshop) -> tuple[list[Cell], list[Failure]]:
    """Predict every cell before measuring it."""
    found, failed = [], []
    for settings in cells:
        try:
            predicted = shop.predict(settings)
        except (Unknown, ValueError, LauncherError, ClusterError) as error:
            failed.append(Failure(settings, f"no prediction: {error}", 0))
            say(f"no prediction: {error}")
            continue
        result = shop.run(settings)
        if result is None:
            failed += shop.failures.of([settings], shop.journal)
            continue
        found.append(Cell(settings, predicted, statistics.median(result["step_seconds"]), result["cores_busy"]))
        say(f"predicted {predicted:.3f} s, measured {found[-1].measured:.3f} s: {found[-1].error:+.1%}")
    return found, failed


def leave(sweep: Sweep, shop: Workshop, arguments: argparse.Namespace) -> int:
    """Compare, and write what was asked for; returns 1 where a cell has no result."""
    cells, failed = compare(sweep.runs, shop)
    results = [result for result in map(shop.journal.get, sweep.runs) if result is not None]
    about = provenance(results) if results else "Nothing was measured."
    picture = None
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        picture = draw(cells, arguments.report.with_suffix(".png")) if cells else None
    text = markdown(sweep.title, about, cells, failed, picture)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    if arguments.json is not None:
        data = {"cells": [{**asdict(cell), "error": cell.error} for cell in cells], "origin": today().to_dict()}
        data["failures"] = [{"settings": one.settings.to_dict(), "reason": one.reason} for one in failed]
        arguments.json.write_text(json.dumps(data, indent=1))
    return 1 if failed else 0


def say(text: str) -> None:
    print(f"bench.validation: {text}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=DEFAULT, help="(default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="SETTING=VALUE", help="cells: workers=2, …")
    parser.add_argument("--output", type=Path, help="folder of what was measured (default: logs/NAME)")
    parser.add_argument("--json", type=Path, help="write every cell here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write Markdown here, and the picture beside it")
    parser.add_argument("--keep", action="store_true", help="reuse what was measured with other code, too")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is there")
    arguments = parser.parse_args()
    folder = (arguments.output or ROOT / "logs" / arguments.table.stem).resolve()
    try:
        sweep = select(read(arguments.table), arguments.only)
    except (OSError, ValueError) as error:
        say(str(error))
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.report_only:
        return leave(sweep, Workshop(folder, today(), run=False, keep=True), arguments)
    if os.geteuid() != 0:
        say("emulated links need root")
        return 2
    if UNCOMMITTED in today().commit:
        say("the code has changes that are not committed: docs should not quote these results")
    end_in_order()
    try:
        with alone(folder):
            return leave(sweep, Workshop(folder, today(), keep=arguments.keep), arguments)
    except Occupied as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
