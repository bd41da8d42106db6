"""Views of runs inside other libraries (read ``docs/results/integrations``, else pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.claims.source import Source, table, with_interval
from bench.integrations.report import ratio, side
from bench.sweep.report import BUSY_MARK
from bench.train.cores import was_busy
from bench.train.origin import UNCOMMITTED

__all__ = ["INTEGRATIONS"]

_NAMES = {"transformers": "Trainer", "accelerate": "Accelerate", "lightning": "Lightning"}
_COLUMNS = {"ddp": "its own DDP", "dear": "`dear`", "one_process": "one process, the whole batch"}


def _found(source: Source, name: str) -> dict[str, Any]:
    return source.raw(f"integrations/{name}.json")


def integrations(source: Source) -> str:
    """integrations NAME …: files of ``docs/results/integrations``, each a library's own DDP at its best beside dear."""
    cells = []
    for name in source.words:
        found = _found(source, name)
        mark = "\\*" * (UNCOMMITTED in found["origin"]["commit"]) + BUSY_MARK * was_busy(found)
        place = [_NAMES[found["library"]] + mark, str(found["workers"]), found["network"], found["launcher"]]
        seconds = [f"{side(found['pairs'], name):.3f}" for name in ("ddp", "dear")]
        told = with_interval(ratio(found["pairs"]))
        cells.append([*place, f"`{found['ddp']}`", str(len(found["searched"])), *seconds, told.cell, str(told.n)])
    head = ["library", "hosts", "network", "started by", "its own DDP", "settings tried", "its step, s"]
    return table([*head, "with `dear`, s", "ratio", "n"], cells)


def losses(source: Source) -> str:
    """losses NAME STEP …: of the first pair in ``docs/results/integrations/NAME.json``, and of one process."""
    name, *steps = source.words
    found = _found(source, name)
    curves = {**found["pairs"][0], "one_process": found["one_process"]}
    cells: list[Sequence[str]] = [
        [step, *(f"{curves[name]['loss'][int(step) - 1]:.6f}" for name in _COLUMNS)] for step in steps
    ]
    return table(["step", *_COLUMNS.values()], cells)


INTEGRATIONS = (integrations, losses)
