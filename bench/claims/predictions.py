"""Views of sealed predictions beside what was measured (read ``docs/results/prediction``, else pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.claims.source import Source, table
from bench.methods.spec import parse_spec
from bench.sweep.report import BUSY_MARK
from bench.train.origin import UNCOMMITTED
from bench.train.settings import Settings
from bench.validation.judge import CLOSE, Cell, order, summary

__all__ = ["PREDICTIONS"]

_WIDE = 0.1


def _cells(source: Source) -> tuple[list[Cell], str]:
    """The cells of a file, and the mark of one whose code was not committed."""
    found = source.raw(f"prediction/{source.words[0]}.json")
    mark = "\\*" if UNCOMMITTED in found["origin"]["commit"] else ""
    return [_cell(one) for one in found["cells"]], mark


def _cell(one: dict[str, Any]) -> Cell:
    return Cell(Settings(**one["settings"]), one["predicted"], one["measured"], one["cores_busy"], one["disturbed"])


def _rows(named: dict[str, list[Cell]], mark: str) -> Iterator[list[str]]:
    for name, cells in named.items():
        found = summary(cells)
        if found is None:
            continue
        wide = sum(abs(cell.error) <= _WIDE for cell in cells)
        errors = [f"{100 * found.median:.1f} %", f"{100 * found.mean:+.1f} %", f"{100 * found.worst:+.1f} %"]
        counts = [found.within, wide, found.fast, found.slow]
        disturbed = BUSY_MARK * any(cell.disturbed for cell in cells)
        yield [f"{name}{mark}{disturbed}", str(found.count), *errors, *map(str, counts)]


def _table(of: str, named: dict[str, list[Cell]], mark: str) -> str:
    errors = ["median error", "mean, with its sign", "worst"]
    counts = [*(f"within {100 * share:.0f} %" for share in (CLOSE, _WIDE)), "too fast", "too slow"]
    return table([of, "cells", *errors, *counts], _rows(named, mark))


def predicted(source: Source) -> str:
    """predicted NAME: the errors of the predictions in ``docs/results/prediction/NAME.json``, by kinds of computation."""
    cells, mark = _cells(source)
    slept = [cell for cell in cells if not cell.real]
    named = {
        "all": cells,
        "slept": slept,
        "slept, where cores were not the limit": [cell for cell in slept if not cell.limited_by_cores],
        "real": [cell for cell in cells if cell.real],
    }
    return _table("computation", named, mark)


def predicted_methods(source: Source) -> str:
    """predicted_methods NAME: the same by method, of slept computation."""
    cells, mark = _cells(source)
    named: dict[str, list[Cell]] = {}
    for cell in cells:
        if not cell.real:
            named.setdefault(f"`{parse_spec(cell.settings.method)[0]}`", []).append(cell)
    return _table("method", named, mark)


def predicted_order(source: Source) -> str:
    """predicted_order NAME: for a sentence, how many pairs of methods are predicted in the right order.

    Of cells during which others left the machine alone.
    """
    cells, mark = _cells(source)
    if mark:
        source.mark(mark)
    found = order(cell for cell in cells if not cell.disturbed)
    return f"{found.pairs - len(found.wrong)} of {found.pairs}"


PREDICTIONS = (predicted, predicted_methods, predicted_order)
