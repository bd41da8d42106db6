"""The settings that a job is given through environment variables (pure: a mapping in, a value out).

Every ``DEAR_*`` variable wins over the ``HOROVOD_*`` variable that means the same; ByteScheduler's own count for its
strategy. Rank 0's settings hold on all ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from overlap.job.launch import BACKEND_VARIABLE, Launcher

__all__ = ["CUDA_TRANSPORTS", "LOG_LEVELS", "TRANSPORTS", "SettingError", "Settings", "read"]

T = TypeVar("T")

#: Names of levels as Horovod spells them, and Python's numbers for them.
LOG_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}

TRANSPORTS = ("auto", "tcp", "mpi", "gloo")
CUDA_TRANSPORTS = ("auto", "nccl", "staged")


class SettingError(ValueError):
    """An environment variable has a value that it cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a job; each field names its variables."""

    poison: bool = False
    """``DEAR_POISON``: parameters in transit are NaN, so that a missed wait shows."""
    stall_warn_seconds: float = 60.0
    """``DEAR_STALL_WARN_SECONDS``, ``HOROVOD_STALL_CHECK_TIME_SECONDS``; 0: never (``HOROVOD_STALL_CHECK_DISABLE=1``)."""
    stall_abort_seconds: float = 600.0
    """``DEAR_STALL_ABORT_SECONDS``, ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``; 0: never."""
    log_level: int | None = None
    """``DEAR_LOG_LEVEL``, ``HOROVOD_LOG_LEVEL``: one of :data:`LOG_LEVELS`; None: as the script configures logging."""
    timeline: str = ""
    """``DEAR_TIMELINE``, ``HOROVOD_TIMELINE``: file to record a timeline into from the start; empty: none."""
    timeline_mark_cycles: bool = False
    """``DEAR_TIMELINE_MARK_CYCLES``, ``HOROVOD_TIMELINE_MARK_CYCLES``."""
    timeline_max_mb: float = 64.0
    """``DEAR_TIMELINE_MAX_MB``: no timeline gets larger, in MB of 2^20 bytes."""
    check_every: int = 0
    """``DEAR_CHECK_EVERY``: steps between two looks whether parameters are the same on all ranks; 0: never."""
    threshold_mb: float | str | None = None
    """``DEAR_THRESHOLD_MB`` (or "auto"), ``HOROVOD_FUSION_THRESHOLD`` in bytes; 0: no fusion; None: the strategy's."""
    keep_going: bool = False
    """``DEAR_KEEP_GOING``: ranks come and go; see `overlap.job.regrouping`."""
    transport: str = "auto"
    """``DEAR_TRANSPORT``: one of :data:`TRANSPORTS`; see `overlap.job.connecting`."""
    tcp_sockets: int = 0
    """``DEAR_TCP_SOCKETS``: connections between two ranks of different hosts; 0: see `overlap.transport.tcp`."""
    cuda_transport: str = "auto"
    """``DEAR_CUDA_TRANSPORT``: one of :data:`CUDA_TRANSPORTS`; see `overlap.transport.cuda.route`."""
    two_level: str = "auto"
    """``DEAR_TWO_LEVEL``: 1, 0 or auto; see `overlap.job.two_levels`."""
    partition_mb: float | None = None
    """``BYTESCHEDULER_PARTITION``, in elements of 4 bytes: where ``partition_mb`` is not given."""
    credit_mb: float | None = None
    """``BYTESCHEDULER_CREDIT``, in elements of 4 bytes: where ``credit_mb`` is not given."""
    tune_credit: bool = False
    """``BYTESCHEDULER_CREDIT_TUNING``: stands for ``tune=True``."""
    ignored: tuple[str, ...] = ()
    """Variables of Horovod and ByteScheduler that are set and have no counterpart."""
    misspelt: tuple[tuple[str, str], ...] = ()
    """Variables that are set and almost spelt like one that is read: each with that one."""


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _elements(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value * 4 / 2**20  # MB


def _number_or_auto(text: str) -> float | str:
    return "auto" if text.lower() == "auto" else _number(text)


def _switch(text: str) -> bool:
    return {"0": False, "1": True, "false": False, "true": True}[text.lower()]


def _file(text: str) -> str:
    return "" if text == "DYNAMIC" else text  # Horovod's word for "may be started later", which it always may here


def _level(text: str) -> int:
    return LOG_LEVELS[text.lower()]


def _transport(text: str) -> str:
    return {name: name for name in CUDA_TRANSPORTS}[text.lower()]


def _wire(text: str) -> str:
    return {name: name for name in TRANSPORTS}[text.lower()]


def _levels(text: str) -> str:
    return {name: name for name in ("auto", "0", "1")}[text.lower()]


def _backend(text: str) -> str:
    return Launcher(text).value


_ACCEPTED: dict[Callable[[str], Any], str] = {
    _number: "a number of at least 0",
    _count: "a whole number of at least 0",
    _elements: "a number of elements above 0",
    _number_or_auto: "a number of at least 0, or auto,",
    _switch: "0 or 1",
    _level: f"one of {', '.join(LOG_LEVELS)}",
    _transport: f"one of {', '.join(CUDA_TRANSPORTS)}",
    _levels: "0, 1 or auto",
    _wire: f"one of {', '.join(TRANSPORTS)}",
    _backend: f"one of {', '.join(launcher.value for launcher in Launcher)}",
}


def _parsed(environ: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return parse(text)
    except (KeyError, ValueError):
        raise SettingError(
            f"environment variable {name} should hold {_ACCEPTED[parse]} and holds {text!r}: correct or unset it"
        ) from None


# Field: how to read it, from which variables; the first that is set wins.
_VARIABLES: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "poison": (_switch, ("DEAR_POISON",)),
    "stall_warn_seconds": (_number, ("DEAR_STALL_WARN_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")),
    "stall_abort_seconds": (_number, ("DEAR_STALL_ABORT_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")),
    "log_level": (_level, ("DEAR_LOG_LEVEL", "HOROVOD_LOG_LEVEL")),
    "timeline": (_file, ("DEAR_TIMELINE", "HOROVOD_TIMELINE")),
    "timeline_mark_cycles": (_switch, ("DEAR_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES")),
    "timeline_max_mb": (_number, ("DEAR_TIMELINE_MAX_MB",)),
    "check_every": (_count, ("DEAR_CHECK_EVERY",)),
    "two_level": (_levels, ("DEAR_TWO_LEVEL",)),
    "keep_going": (_switch, ("DEAR_KEEP_GOING",)),
    "transport": (_wire, ("DEAR_TRANSPORT",)),
    "tcp_sockets": (_count, ("DEAR_TCP_SOCKETS",)),
    "cuda_transport": (_transport, ("DEAR_CUDA_TRANSPORT",)),
    "threshold_mb": (_number_or_auto, ("DEAR_THRESHOLD_MB",)),
    "partition_mb": (_elements, ("BYTESCHEDULER_PARTITION",)),
    "credit_mb": (_elements, ("BYTESCHEDULER_CREDIT",)),
    "tune_credit": (_switch, ("BYTESCHEDULER_CREDIT_TUNING",)),
}
_CHECK_OFF = "HOROVOD_STALL_CHECK_DISABLE"
_FUSION_BYTES = "HOROVOD_FUSION_THRESHOLD"
_READ_ELSEWHERE = (BACKEND_VARIABLE, "DEAR_ELASTIC_DIR")
_PREFIXES = ("DEAR_", "HOROVOD_", "BYTESCHEDULER_")
_ALIKE = 0.85  # from 0 to 1: variables of scripts and of Horovod that mean something else are less like ours


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`. Raises :class:`SettingError` with the variable and what it holds."""
    _parsed(environ, BACKEND_VARIABLE, _backend)  # used by `overlap.job.launch`
    found: dict[str, Any] = {}
    known = {_CHECK_OFF, _FUSION_BYTES, *_READ_ELSEWHERE}
    for field, (parse, names) in _VARIABLES.items():
        known.update(names)
        values = [value for name in names if (value := _parsed(environ, name, parse)) is not None]
        if values:
            found[field] = values[0]
    if _parsed(environ, _CHECK_OFF, _switch):
        for field in ("stall_warn_seconds", "stall_abort_seconds"):
            if not environ.get(_VARIABLES[field][1][0]):
                found[field] = 0.0
    fusion_bytes = _parsed(environ, _FUSION_BYTES, _number)
    if fusion_bytes is not None:
        found.setdefault("threshold_mb", fusion_bytes / 2**20)
    strangers = sorted(
        name for name, text in environ.items() if name.startswith(_PREFIXES) and text and name not in known
    )
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE) for name in strangers}
    return Settings(
        **found,
        ignored=tuple(name for name in strangers if not name.startswith("DEAR_") and not near[name]),
        misspelt=tuple((name, meant[0]) for name, meant in near.items() if meant),
    )
