"""Checks the arguments of ``dear.DistributedOptimizer`` that users give to an integration as ``dear_options``."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["STRATEGIES", "checked"]

#: Those that are synchronous.
STRATEGIES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss", "fsdp")
_NOT_HERE = {
    "optimizer": "the library makes it",
    "named_parameters": "the library's model is given",
    "backward_passes_per_step": "the library's own gradient accumulation says it",
    "process_set": "the library trains on all processes",
}


def checked(options: Mapping[str, Any] | None, of: str = "dear_options", *, averages: bool = False) -> dict[str, Any]:
    """A copy of `options`, checked.

    Raises ``TypeError`` for names that the strategy has not, ``ValueError`` for what cannot be.

    `of`: where the user gave them. `averages`: the integration averages the parameters of ``co2`` before it evaluates.
    """
    found = dict(options or {})
    strategy = found.get("strategy", "dear")
    if strategy == "co2" and not averages:
        raise ValueError(
            f"{of}, strategy 'co2': ranks have different parameters between its averages, and the library would "
            f"evaluate and save them; take one of {STRATEGIES}, or write the loop yourself"
        )
    known_strategies = (*STRATEGIES, "co2") if averages else STRATEGIES
    if strategy not in known_strategies:
        raise ValueError(f"{of}: strategy should be one of {known_strategies} and is {strategy!r}")
    for name in found:
        if name in _NOT_HERE:
            raise ValueError(f"{of}: {name!r} is not for here, {_NOT_HERE[name]}")
    parameters = inspect.signature(importlib.import_module(strategy).DistributedOptimizer).parameters
    known = sorted({*parameters, "strategy"} - {"others", *_NOT_HERE})
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"is {near[0]!r} meant?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{of} has no {name!r} with strategy {strategy!r}; {advice}")
    return found
