"""The pictures of a report: throughput by method, scaling over workers, and the distance from the lower bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

from bench.sweep.summary import Group, particulars

matplotlib.use("Agg")

import matplotlib.pyplot as plt

__all__ = ["draw"]

_COLORS = {
    "dear": "#0b5fa5",
    "wfbp": "#6baed6",
    "mgwfbp": "#3a9a5c",
    "bytescheduler": "#8c6bb1",
    "oss": "#17a2a2",
    "co2": "#c2a800",
    "ddp": "#d9822b",
    "ddp-zero": "#e8b778",
    "fsdp2": "#b5485d",
    "horovod": "#7f7f7f",
}
_LINES = ("o-", "s--", "^:", "v-.", "D-", "P--", "X:", "<-.", ">-", "*--")  # for methods of one color
_PER_ROW = 2
_NEAR = 0.9  # of L


def _color(method: str) -> str:
    return _COLORS.get(method.partition(":")[0], "#444444")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    columns = min(count, _PER_ROW)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.4 * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def _title(axis: Any, group: Group) -> None:
    axis.set_title(group.title, fontsize=9)


def throughput(groups: Sequence[Group], path: Path) -> Path:
    """Draw a bar for every method's best setting, the fastest on top."""
    tallest = max(len(group.best) for group in groups)
    figure, axes = _panels(len(groups), 0.9 + 0.3 * tallest)
    for axis, group in zip(axes, groups, strict=True):
        rows = sorted(group.best.values(), key=lambda row: row.total)
        names = [row.method for row in rows]
        axis.barh(names, [row.total for row in rows], xerr=[row.plus_minus for row in rows],
                  color=[_color(name) for name in names], error_kw={"lw": 1})  # fmt: skip
        for place, row in enumerate(rows):
            axis.annotate(f" {row.total:.4g}", (row.total + row.plus_minus, place), va="center", fontsize=8)
        axis.set_xlim(0, 1.2 * max(row.total + row.plus_minus for row in rows))  # with room for the numbers
        axis.tick_params(labelsize=8)
        axis.set_xlabel(f"{rows[0].unit}/sec, all workers", fontsize=8)
        _title(axis, group)
    return _save(figure, path)


def distance(groups: Sequence[Group], path: Path) -> Path:
    """Draw median steps as a multiple of L, with the quartiles."""
    tallest = max(len(group.best) for group in groups)
    figure, axes = _panels(len(groups), 0.9 + 0.3 * tallest)
    for axis, group in zip(axes, groups, strict=True):
        bound = group.bound
        assert bound is not None
        rows = sorted(group.best.values(), key=lambda row: -row.median)
        for place, row in enumerate(rows):
            axis.plot([row.low / bound, row.high / bound], [place, place], color=_color(row.method), lw=3, alpha=0.4)
            axis.plot(row.median / bound, place, "o", color=_color(row.method))
            axis.annotate(f"{row.median / bound:.2f}", (row.median / bound, place), (0, 6), textcoords="offset points",
                          ha="center", fontsize=8)  # fmt: skip
        axis.set_yticks(range(len(rows)), [row.method for row in rows], fontsize=8)
        axis.set_ylim(-0.6, len(rows) - 0.1)
        axis.axvline(1, color="black", lw=0.8, ls="--")
        axis.margins(x=0.1)
        axis.set_xlim(left=min(0.95, axis.get_xlim()[0]))
        axis.tick_params(axis="x", labelsize=8)
        wire = f", wire/compute {group.wire / group.compute:.2f}" if group.wire and group.compute else ""
        axis.set_xlabel(f"step time / L (L = {bound:.3f} s{wire})", fontsize=8)
        _title(axis, group)
    return _save(figure, path)


def scaling(families: Sequence[Sequence[Group]], path: Path) -> Path:
    """Draw throughput over workers; dashed, perfect scaling of the computation alone."""
    figure, axes = _panels(len(families), 3.6)
    for axis, groups in zip(axes, families, strict=True):
        ordered = sorted(groups, key=lambda group: group.settings["workers"])
        workers = [group.settings["workers"] for group in ordered]
        alone = [
            row.total / group.settings["workers"] for group in ordered for row in group.rows if row.family == "none"
        ]
        if alone:
            axis.plot(workers, [max(alone) * count for count in workers], "--", color="black", lw=0.8, label="linear")
        lines: dict[str, Iterator[str]] = defaultdict(lambda: cycle(_LINES))
        for method in dict.fromkeys(name for group in ordered for name in group.best):
            points = [
                (group.settings["workers"], group.best[method].total) for group in ordered if method in group.best
            ]
            if len(points) == 1:
                continue
            color = _color(method)
            axis.plot(*zip(*points, strict=True), next(lines[color]), color=color, label=method, ms=4)
        axis.set_xticks(workers, [str(count) for count in workers])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("workers", fontsize=8)
        axis.set_ylabel(f"{ordered[0].rows[0].unit}/sec, all workers", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        about = ordered[0].settings
        what = about["emulate_compute"] or about["model"]
        axis.set_title(f"{what}, batch {about['batch_size']}, {about['network']}{particulars(about)}", fontsize=9)
    return _save(figure, path)


def draw(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Draw the pictures that the groups have data for.

    Groups without method `none` are left out of a report in which others have it: they were not run for their speed.
    """
    pictures = []
    compared = [group for group in groups if group.best]
    bounded = [group for group in compared if group.bound is not None]
    shown = bounded or compared
    if shown:
        pictures.append(throughput(shown, folder / "throughput.png"))
    # No distance from L where no method sends every gradient: local SGD takes a small part of it.
    slowest = [(max(row.median for row in group.best.values()), group) for group in bounded]
    near = [group for median, group in slowest if group.bound and median > _NEAR * group.bound]
    if near:
        pictures.append(distance(near, folder / "distance.png"))
    same: dict[tuple[Any, ...], list[Group]] = {}
    for group in shown:
        # Rates are undilated and of steps after the warm-up: both may be chosen anew for every number of hosts.
        about = tuple(value for name, value in group.settings.items() if name not in ("workers", "dilate", "warmup"))
        same.setdefault(about, []).append(group)
    families = [family for family in same.values() if len({one.settings["workers"] for one in family}) > 1]
    if families:
        pictures.append(scaling(families, folder / "scaling.png"))
    return pictures
