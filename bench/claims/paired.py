"""Views of two methods in the same processes (read ``docs/results/paired``, else pure)."""

from __future__ import annotations

import json
import statistics

from bench.claims.source import Source, table
from bench.paired.result import Paired
from bench.train.origin import UNCOMMITTED

__all__ = ["PAIRED"]

_WHERE = ("task", "workers", "network", "launcher", "transport")
_OVER = {"auto": "as it comes", "tcp": "TCP", "mpi": "MPI", "gloo": "gloo"}


def _closest(source: Source) -> list[Paired]:
    """Of the files that a source names, those with the other method's best setting, for every place where they ran."""
    found: dict[tuple[object, ...], Paired] = {}
    for name in source.words:
        one = Paired(**json.loads((source.folder / "paired" / f"{name}.json").read_text()))
        where = tuple(one.about[key] for key in _WHERE)
        if where not in found or one.ratio() > found[where].ratio():
            found[where] = one
    return list(found.values())


def paired(source: Source) -> str:
    """paired NAME …: files of ``docs/results/paired``; of several settings of the other method, its best one."""
    cells = []
    for one in _closest(source):
        low, median, high = statistics.quantiles(one.ratios(), n=4)
        mark = "\\*" if UNCOMMITTED in one.about["origin"]["commit"] else ""
        places = [str(one.about[key]) for key in ("task", "workers", "network", "launcher")]
        ratio, blocks = f"{median:.2f}", str(len(one.ratios()))
        cpu = f"{one.ratio('cpu_seconds'):.2f}"
        cells.append(
            [
                *places,
                _OVER[one.about["transport"]] + mark,
                f"`{one.second}`",
                ratio,
                f"{low:.2f} – {high:.2f}",
                blocks,
                cpu,
            ]
        )
    return table(
        ["task", "hosts", "network", "started by", "bytes", "other", "step", "quartiles", "blocks", "processor time"],
        cells,
    )


def pair(source: Source) -> str:
    """pair NAME …: the step of the first method over the other's, with its best setting."""
    (one,) = _closest(source)
    return f"{one.ratio():.2f}"


PAIRED = (pair, paired)
