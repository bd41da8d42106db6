"""What kind of value each argument of a wrapper takes, checked in one place before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from overlap.horovod.process_set import ProcessSet

__all__ = ["KINDS", "check_kinds"]


def _is_flag(value: Any) -> bool:
    # numpy's kind has that name, too, or had it before numpy 2; 0 and 1 are what scripts read from a command line.
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(_is_number(part) for part in value)


_Kind = tuple[str, Callable[[Any], bool]]
_FLAG: _Kind = "True or False", _is_flag
_WHOLE: _Kind = "a whole number", _is_whole
_NUMBER: _Kind = "a number", _is_number
_TEXT: _Kind = "a text", lambda value: isinstance(value, str)


def _or_none(kind: _Kind) -> _Kind:
    words, fits = kind
    return f"{words.replace(' or ', ', ')} or None", lambda value: value is None or fits(value)


#: What an argument should be, in words and as a predicate. Those that are not here are checked where they are used.
KINDS: Mapping[str, _Kind] = {
    "alpha_beta": _or_none(("a pair of numbers, seconds to start and seconds per byte,", _is_pair)),
    "asc": _FLAG,
    "backward_passes_per_step": _WHOLE,
    "broadcast_buffers": _FLAG,
    "credit_mb": _NUMBER,
    "eager": _FLAG,
    "elementwise": _or_none(_FLAG),
    "exclude_parts": _TEXT,
    "gap_penalty": ("True, False or a number", lambda value: isinstance(value, bool) or _is_number(value)),
    "gradient_predivide_factor": _NUMBER,
    "groups": ("a number or a list of lists of parameters", lambda value: not isinstance(value, bool)),
    "layerwise_times": _or_none(("a mapping of names to seconds", lambda value: isinstance(value, Mapping))),
    "merge_below_kb": _NUMBER,
    "nprocs_per_node": _or_none(_WHOLE),
    "num_groups": _WHOLE,
    "num_nearby_layers": _or_none(_WHOLE),
    "outer_clip": _or_none(_NUMBER),
    "outer_lr": _NUMBER,
    "outer_momentum": _NUMBER,
    "partition_mb": _NUMBER,
    "per_parameter": _or_none(_FLAG),
    "poison": _or_none(_FLAG),
    "policy": _TEXT,
    "process_set": ("a ProcessSet", lambda value: isinstance(value, ProcessSet)),
    "profile_steps": _WHOLE,
    "sparse_as_dense": _FLAG,
    "sync_start": _FLAG,
    "threshold_mb": _or_none(("a number of MB, 'auto'", lambda value: _is_number(value) or isinstance(value, str))),
}


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for the first of `arguments` that is of the wrong kind (pure)."""
    for name, value in arguments.items():
        if name in KINDS and not KINDS[name][1](value):
            raise TypeError(f"{name} should be {KINDS[name][0]} and is {value!r}")
