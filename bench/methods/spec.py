"""The notation of a method with its options, and which of the options only tune it (pure)."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["family_of", "meant", "parse_spec", "refuse_unknown"]

# Options that only tune a method: sizes of what travels, times of cycles, layouts in memory. Any other makes another
# method of it: what is left out here is compared under a name of its own, and not as the fastest of its method.
_SEARCHED = frozenset(
    {
        *("threshold_mb", "num_nearby_layers", "num_groups", "tune"),
        *("merge_below_kb", "profile_steps", "partition_mb", "credit_mb"),
        *("bucket_mb", "view", "static_graph", "parameter_view", "overlap"),
        *("reshard", "unit_layers", "prefetch"),
        *("fusion_mb", "cycle_ms", "autotune", "sample_steps", "yield_when_idle", "operations"),
    }
)
# Values that say what is so anyway.
_PLAIN: Mapping[str, Any] = {
    "eager": False,
    "policy": "rsag",
    "exclude_parts": "",
    "strategy": "dear",
    "gather_dtype": None,
    "asc": False,
}


def family_of(spec: str) -> str:
    """The method with the options that make it another one: ``"dear:eager=True"`` of ``"dear:threshold_mb=4,eager=True"``.

    Settings of the searched options are of one family, of which the fastest counts.
    """
    name, options = parse_spec(spec)
    own = sorted(key for key in options if not (key in _SEARCHED or (key in _PLAIN and options[key] == _PLAIN[key])))
    return ":".join([name, ",".join(f"{key}={options[key]}" for key in own)]) if own else name


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"ddp:bucket_mb=4"`` to ``("ddp", {"bucket_mb": 4})``; values are Python literals, else text."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals or not key:
            raise ValueError(f"an option of a method is written name=value; {spec!r} holds {part!r}")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return name, options


def refuse_unknown(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ``ValueError`` for names that `where`, a method or a part of a table, does not know."""
    strangers = [name for name in given if name not in known]
    if strangers:
        hint = meant(strangers[0], known)
        raise ValueError(f"{where} does not know {', '.join(strangers)}; it knows {', '.join(known) or 'none'}{hint}")


def meant(name: str, known: Sequence[str]) -> str:
    """The end of a message about a `name` that is not `known`: the one that is meant, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; is {near[0]} meant?" if near else ""
