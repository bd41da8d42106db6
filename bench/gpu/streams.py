"""Which streams of a device worked, and how long, as a trace of torch.profiler's tells."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Stream", "read", "streams_of"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Stream:
    """A stream: `busy_ms` adds up what ran on it; `examples` names what did, the longest first."""

    number: int
    operations: int
    busy_ms: float
    examples: tuple[str, ...]


def read(file: str) -> dict[str, Any]:
    """A trace that torch wrote, packed where its name says so."""
    opened = gzip.open(file, "rt") if file.endswith(".gz") else open(file)  # noqa: SIM115
    with opened:
        found: dict[str, Any] = json.load(opened)
    return found


def streams_of(trace: Mapping[str, Any]) -> list[Stream]:
    """By number (pure). `trace` is a Chrome trace as torch.profiler writes it."""
    spent: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in trace.get("traceEvents", []):
        if event.get("cat") in _ON_DEVICE and "stream" in event.get("args", {}):
            spent[int(event["args"]["stream"])][str(event["name"])].append(float(event.get("dur", 0)))
    return [
        Stream(
            number,
            sum(len(times) for times in names.values()),
            sum(sum(times) for times in names.values()) / 1e3,
            tuple(sorted(names, key=lambda name: -sum(names[name]))[:3]),
        )
        for number, names in sorted(spent.items())
    ]
