"""Views of two methods in the same processes (read ``docs/results/paired``, else pure)."""

from __future__ import annotations

from bench.claims.source import Source, table
from bench.paired.result import Paired
from bench.sweep.report import BUSY_MARK
from bench.train.cores import was_busy
from bench.train.origin import UNCOMMITTED

__all__ = ["PAIRED"]

_WHERE = ("task", "workers", "network", "launcher", "transport")
_OVER = {"auto": "as it comes", "tcp": "TCP", "mpi": "MPI", "gloo": "gloo"}


def _closest(source: Source) -> list[Paired]:
    """Of the files that a source names, those with the other method's best setting, for every place where they ran."""
    found: dict[tuple[object, ...], Paired] = {}
    for name in source.words:
        one = Paired(**source.raw(f"paired/{name}.json"))
        where = tuple(one.about[key] for key in _WHERE)
        if where not in found or one.ratio().value > found[where].ratio().value:
            found[where] = one
    return list(found.values())


def paired(source: Source) -> str:
    """paired NAME …: files of ``docs/results/paired``; of several settings of the other method, its best one."""
    cells = []
    for one in _closest(source):
        mark = "\\*" if UNCOMMITTED in one.about["origin"]["commit"] else ""
        mark += BUSY_MARK * was_busy(one.about)
        step = one.ratio()
        places = [str(one.about[key]) for key in ("task", "workers", "network", "launcher")]
        cpu, count = one.ratio("cpu_seconds").cell, f"{step.n} {one.counted}"
        cells.append([*places, _OVER[one.about["transport"]] + mark, f"`{one.second}`", step.cell, cpu, count])
    return table(
        ["task", "hosts", "network", "started by", "bytes", "other", "step", "processor time", "n"],
        cells,
    )


PAIRED = (paired,)
