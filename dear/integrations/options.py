"""``dear_options`` of the integrations: arguments of ``dear.DistributedOptimizer`` that a user of a library gives."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from overlap.optimizer.arguments import SHELL

__all__ = ["checked"]

_STRATEGIES = ("dear", "wfbp", "mgwfbp", "bytescheduler_adapter", "oss")
_NOT_HERE = {
    "optimizer": "the library makes it",
    "named_parameters": "the library's model is given",
    "backward_passes_per_step": "the library's own gradient accumulation says it",
    "process_set": "the library trains on all processes",
}


def checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `options`. Raises ``TypeError`` for names that the strategy has not, ``ValueError`` for what cannot be."""
    found = dict(options or {})
    strategy = found.get("strategy", "dear")
    if strategy == "co2":
        raise ValueError(
            "dear_options={'strategy': 'co2'}: ranks have different parameters between its averages, and the library would "
            f"evaluate and save them; take one of {_STRATEGIES}, or write the loop yourself"
        )
    if strategy not in _STRATEGIES:
        raise ValueError(f"dear_options: strategy should be one of {_STRATEGIES} and is {strategy!r}")
    for name in found:
        if name in _NOT_HERE:
            raise ValueError(f"dear_options: {name!r} is not for here, {_NOT_HERE[name]}")
    parameters = inspect.signature(importlib.import_module(strategy).DistributedOptimizer).parameters
    known = sorted({*parameters, *SHELL, "strategy"} - {"shell", *_NOT_HERE})
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"is {near[0]!r} meant?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"dear_options has no {name!r} with strategy {strategy!r}; {advice}")
    return found
