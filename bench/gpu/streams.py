"""Which streams of a device worked, and how long, as a trace of torch.profiler's tells (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Stream", "streams_of"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Stream:
    """`busy_ms` adds up what ran on it; `examples` are names of what did, the longest in all first."""

    number: int
    operations: int
    busy_ms: float
    examples: tuple[str, ...]


def streams_of(trace: Mapping[str, Any]) -> list[Stream]:
    """By number. `trace` is a Chrome trace as torch.profiler writes it."""
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
