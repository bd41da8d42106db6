"""Sums up a sweep's results: medians and spreads by group, the lower bound, the fastest method (pure).

The bound L of a group is max(compute, wire): compute is the median step of the method `none` in the same sweep, and wire
the bytes that an all-reduce of all gradients moves through each link, 2 (P - 1) / P times the parameters', at the goodput
of plain TCP measured beside the runs. Without emulated links there is no measured goodput, and wire is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.methods.spec import family_of
from bench.train.origin import origin_of

__all__ = ["GROUP", "Group", "Row", "group", "particulars", "titles"]

# Runs that differ in nothing of this are compared with each other.
_WHAT = ("model", "emulate_compute", "dilate", "batch_size", "size", "optimizer", "threads", "device", "warmup")
GROUP = (*_WHAT, "workers", "network", "hostfile", "launcher")


@dataclass(frozen=True)
class Row:
    """The results of one run. Seconds are as they passed; rates of all workers together, undilated."""

    method: str
    n: int
    mean: float
    median: float
    low: float
    high: float
    total: float
    plus_minus: float
    state_bytes: int
    peak_bytes: int
    training_bytes: int | None  # None: of an older run, which did not say
    unit: str
    origin: str
    warmup_steps: int | None  # that were not timed, with those of a search; None: of an older run, which did not say

    @property
    def family(self) -> str:
        """The method without the options that are searched; see :func:`bench.methods.spec.family_of`."""
        return family_of(self.method)


@dataclass(frozen=True)
class Group:
    title: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    compute: float | None
    wire: float | None

    @property
    def bound(self) -> float | None:
        """The lower bound; None where the method `none` did not run."""
        return None if self.compute is None else max(self.compute, self.wire or 0.0)

    @property
    def best(self) -> dict[str, Row]:
        """The fastest setting of every method but `none`."""
        fastest: dict[str, Row] = {}
        for row in self.rows:
            if row.family != "none" and (row.family not in fastest or row.median < fastest[row.family].median):
                fastest[row.family] = row
        return fastest


def particulars(settings: Mapping[str, Any]) -> str:
    """Unusual values of settings that a title does not always name, each after a comma."""
    optimizer = f", {settings['optimizer']}" if settings["optimizer"] != "sgd" else ""
    threads = f", {settings['threads']} threads" if settings["threads"] != 1 else ""
    return optimizer + threads + (f", on {settings['device']}" if settings["device"] != "auto" else "")


def _title(about: Mapping[str, Any]) -> str:
    what = about["emulate_compute"] or f"{about['model']} (size {about['size']})"
    dilated = f", dilated {about['dilate']:g} times" if about["dilate"] != 1 else ""
    where = f"hosts, {about['network']}" if about["network"] != "local" else "workers, this machine"
    where = f"workers of {about['hostfile']}" if about["hostfile"] else where
    started = f", under {about['launcher']}" if about["launcher"] else ""
    return f"{what}, batch {about['batch_size']}, {about['workers']} {where}{started}{dilated}{particulars(about)}"


def titles(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """Titles of groups; those that read alike are told apart by what they differ in."""
    plain = [_title(settings) for settings in several]
    told = []
    for title, settings in zip(plain, several, strict=True):
        alike = [other for other, text in zip(several, plain, strict=True) if text == title]
        differing = [name for name in GROUP if any(other[name] != settings[name] for other in alike)]
        told.append("".join([title, *(f", {name} {settings[name]}" for name in differing)]))
    return told


def _row(result: Mapping[str, Any]) -> Row:
    steps = result["step_seconds"]
    quartiles = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else [steps[0]] * 3
    return Row(
        method=result["settings"]["method"],
        n=len(steps),
        mean=statistics.fmean(steps),
        median=statistics.median(steps),
        low=quartiles[0],
        high=quartiles[2],
        total=result["total"],
        plus_minus=result["plus_minus"],
        state_bytes=result["state_bytes"],
        peak_bytes=result["peak_bytes"],
        training_bytes=result.get("training_bytes"),
        unit=result["unit"],
        origin=str(origin_of(result)),
        warmup_steps=result.get("warmup_steps"),
    )


def _wire(results: Sequence[Mapping[str, Any]]) -> float | None:
    measured = [result["goodput"] for result in results if (result["goodput"] or 0) > 0]
    workers = results[0]["settings"]["workers"]
    if not measured or workers == 1:
        return None
    return float(2 * (workers - 1) / workers * results[0]["parameter_bytes"] / statistics.median(measured))


def group(results: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The results in groups, in the order in which each group's first result comes."""
    members: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        members.setdefault(tuple(result["settings"][name] for name in GROUP), []).append(result)
    about = [dict(zip(GROUP, values, strict=True)) for values in members]
    groups = []
    for title, settings, inside in zip(titles(about), about, members.values(), strict=True):
        rows = tuple(_row(result) for result in inside)
        alone = [row.median for row in rows if row.family == "none"]
        groups.append(Group(title, settings, rows, min(alone, default=None), _wire(inside)))
    return groups
