"""Sums up a sweep's results: medians and spreads by group, the lower bound, the fastest method (pure).

Several runs of one method in a group, which differ in their number (`repeat`), are one row: its median is that of their
medians, and its ratio to another row is of runs of the same number.

The bound L of a group is max(compute, wire): compute is the median step of the method `none` in the same sweep, and wire
the bytes that an all-reduce of all gradients moves through each link, 2 (P - 1) / P times the parameters', at the goodput
of plain TCP measured beside the runs. Without emulated links there is no measured goodput, and wire is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.methods.spec import family_of
from bench.sweep.ratios import Ratio, paired
from bench.train.cores import was_busy
from bench.train.origin import origin_of

__all__ = ["GROUP", "Group", "Row", "group", "particulars", "titles"]

# Runs that differ in nothing of this are compared with each other.
_WHAT = ("model", "emulate_compute", "dilate", "batch_size", "size", "optimizer", "threads", "device", "warmup")
GROUP = (*_WHAT, "workers", "network", "hostfile", "launcher")


@dataclass(frozen=True)
class Row:
    """The results of one method. Seconds are as they passed; rates of all workers together, undilated."""

    method: str
    runs: Mapping[int, float]  # the median step of each run, by its number
    n: int  # steps of all of them
    mean: float
    median: float
    low: float
    high: float
    total: float
    plus_minus: float
    state_bytes: int
    peaks: Mapping[int, int]  # the bytes of a rank at its peak in each run, by its number
    training_bytes: int | None  # None: of an older run, which did not say
    unit: str
    origin: str
    warmup_steps: int | None  # that were not timed, with those of a search; None: of an older run, which did not say
    limit_share: float | None = None  # of its memory limit, that rank 0 took; None: without one
    started_by: str = ""  # torchrun or mpi; empty: of one worker, or of an older run, which did not say
    bytes_over: str = ""  # what moved the bytes, by its name; empty likewise
    cores_busy: float | None = None  # the largest share of the machine's cores, while a clock ran; None: nobody looked
    busy: bool = False  # whether others used the machine: before a run began, or other guests of its host while it ran

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())

    @property
    def family(self) -> str:
        """The method without the options that are searched; see :func:`bench.methods.spec.family_of`."""
        return family_of(self.method)


@dataclass(frozen=True)
class Group:
    title: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    computes: Mapping[int, float]  # the step without communication, by the number of a run
    wire: float | None

    @property
    def compute(self) -> float | None:
        """The median step of the method `none`; None where it did not run."""
        return statistics.median(self.computes.values()) if self.computes else None

    @property
    def bound(self) -> float | None:
        """The lower bound; None where the method `none` did not run."""
        return None if self.compute is None else max(self.compute, self.wire or 0.0)

    def candidates(self, family: str, counts: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """The settings of a method that ran as often as any of them: a search tries each once, and the fastest run again.

        The fastest of many that ran once is partly luck.
        """
        rows = [row for row in self.rows if row.family == family and counts(row)]
        most = max((len(row.runs) for row in rows), default=0)
        return [row for row in rows if len(row.runs) == most]

    @property
    def best(self) -> dict[str, Row]:
        """The fastest of the candidates of every method but `none`."""
        families = dict.fromkeys(row.family for row in self.rows if row.family != "none")
        return {family: min(self.candidates(family), key=lambda row: row.median) for family in families}

    def to_bound(self, row: Row) -> Ratio | None:
        """A row over L by runs of the same number, which n counts; None where there are none.

        Where only some of a row's runs have the computation alone beside them, it is the row's median over L: so a search
        that ran `none` once, and the fastest settings again, tells all of their runs.
        """
        bounds = {number: max(seconds, self.wire or 0.0) for number, seconds in self.computes.items()}
        common = bounds.keys() & row.runs.keys()
        if not common or self.bound is None:
            return None
        return paired(row.runs, bounds) if common == row.runs.keys() else Ratio(row.median / self.bound, len(common))


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


def _most(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The largest of what all results have by this name; None where one has nothing."""
    values = [result.get(name) for result in results]
    return None if None in values else max(values)  # type: ignore[type-var]


def _row(results: Sequence[Mapping[str, Any]]) -> Row:
    """The row of runs that differ in their number only."""
    steps = [seconds for result in results for seconds in result["step_seconds"]]
    runs = {result["settings"].get("repeat", 0): statistics.median(result["step_seconds"]) for result in results}
    quartiles = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else [steps[0]] * 3
    return Row(
        method=results[0]["settings"]["method"],
        runs=runs,
        n=len(steps),
        mean=statistics.fmean(steps),
        median=statistics.median(runs.values()),
        low=quartiles[0],
        high=quartiles[2],
        total=statistics.fmean(result["total"] for result in results),
        plus_minus=statistics.fmean(result["plus_minus"] for result in results),
        state_bytes=_most(results, "state_bytes"),
        peaks={result["settings"].get("repeat", 0): result["peak_bytes"] for result in results},
        training_bytes=_most(results, "training_bytes"),
        unit=results[0]["unit"],
        origin=" / ".join(sorted({str(origin_of(result)) for result in results})),
        warmup_steps=_most(results, "warmup_steps"),
        limit_share=_most(results, "limit_share"),
        started_by=results[0].get("started_by", ""),
        bytes_over=results[0].get("bytes_over", ""),
        cores_busy=_most(results, "cores_busy"),
        busy=any(was_busy(result) for result in results),
    )


def _wire(results: Sequence[Mapping[str, Any]]) -> float | None:
    measured = [result["goodput"] for result in results if (result["goodput"] or 0) > 0]
    workers = results[0]["settings"]["workers"]
    if not measured or workers == 1:
        return None
    return float(2 * (workers - 1) / workers * results[0]["parameter_bytes"] / statistics.median(measured))


def _rows(results: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    """A row for each kind of run, in the order of the first of them."""
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        settings = result["settings"]
        kind = tuple(value for name, value in sorted(settings.items()) if name not in ("repeat", "timeout"))
        kinds.setdefault(kind, []).append(result)
    return tuple(_row(several) for several in kinds.values())


def group(results: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The results in groups, in the order in which each group's first result comes."""
    members: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        members.setdefault(tuple(result["settings"][name] for name in GROUP), []).append(result)
    about = [dict(zip(GROUP, values, strict=True)) for values in members]
    groups = []
    for title, settings, inside in zip(titles(about), about, members.values(), strict=True):
        rows = _rows(inside)
        alone = min((row for row in rows if row.family == "none"), key=lambda row: row.median, default=None)
        groups.append(Group(title, settings, rows, {} if alone is None else alone.runs, _wire(inside)))
    return groups
