"""Views of sweeps: what methods took beside each other (read ``docs/results/SWEEP/reports.json``, else pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.claims.source import Source, table, with_interval
from bench.methods.spec import family_of
from bench.sweep.ratios import paired
from bench.sweep.report import BUSY_MARK, bound_of
from bench.sweep.summary import Group, Row
from bench.train.origin import UNCOMMITTED

__all__ = ["SWEEPS"]


def _mark(row: Row) -> str:
    return ("\\*" if UNCOMMITTED in row.origin else "") + BUSY_MARK * row.busy


def _place(one: Group) -> list[str]:
    """What a group trains, on how many hosts, over which network, and what starts it, as four cells."""
    about = one.settings
    what = about["emulate_compute"] or f"{about['model']}, really computed"
    what += f", {about['optimizer']}" if about["optimizer"] != "sgd" else ""
    started = about["launcher"] or ""
    return [what, str(about["workers"]), about["network"], "mpirun" if started == "mpi" else started]


_PLACE = ("what is trained", "hosts", "network", "started by")


_ALONE = "computation alone"


def _ratio(one: Group) -> str:
    return f"{one.wire / one.compute:.2f}" if one.wire and one.compute else ""


def _bounded(row: Row, one: Group) -> str:
    """Empty where row and bound were not run often enough for an interval."""
    ratio = one.to_bound(row)
    return ratio.cell if ratio and ratio.interval else ""


def methods(source: Source) -> str:
    """methods SWEEP [all] [repeated] [SETTING=…]: methods of one group, each with its fastest setting, or with all of them.

    repeated: only those that were run most often; others are of the search alone. Seconds over L are told where methods and
    the computation alone were run often enough.
    """
    one = source.one_group()
    rows = (
        one.rows if "all" in source.words else [*(row for row in one.rows if row.family == "none"), *one.best.values()]
    )
    least = max(len(row.runs) for row in rows) if "repeated" in source.words else 1
    rows = sorted((row for row in rows if len(row.runs) >= least), key=lambda row: row.median)
    bounds = [_bounded(row, one) for row in rows]
    known = any(bounds)
    cells = []
    for row, bound in zip(rows, bounds, strict=True):
        name = _ALONE if row.family == "none" else f"`{row.method}`"
        told = [f"{row.median:.3f}", f"{row.low:.3f} – {row.high:.3f}", str(row.n)]
        cells.append([name + _mark(row), *told, *[bound] * known, str(len(row.runs))])
    head = ["method", "step, median s", "quartiles", "steps", *["× L"] * known, "n"]
    return table(head, cells) + f"\n\n{bound_of(one)}"


def against(source: Source) -> str:
    """against SWEEP MINE OTHER [SETTING=…]: both methods' fastest settings, in every group that has both."""
    mine, other = source.methods()
    cells = []
    for one in source.groups():
        if {mine, other} <= one.best.keys():
            sides = [one.best[name] for name in (mine, other)]
            texts = [[f"`{row.method}`" + _mark(row), f"{row.median:.3f}"] for row in sides]
            ratio = with_interval(paired(sides[0].runs, sides[1].runs))
            cells.append([*_place(one), _ratio(one), *texts[0], *texts[1], ratio.cell, str(ratio.n)])
    head = [*_PLACE, "wire/compute", mine, "s", other, "s", f"{mine} / {other}", "n"]
    return table(head, cells)


def _range(values: Sequence[float], digits: int) -> str:
    texts = list(dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values)))
    return " – ".join([texts[0], texts[-1]] if len(texts) > 1 else texts)


def _megabytes(field: str) -> Callable[[Group, str], str]:
    """The smallest and the largest value among a method's settings."""

    def cell(one: Group, name: str) -> str:
        values = [getattr(row, field) for row in one.rows if row.family == name]
        known = [value / 2**20 for value in values if value is not None]
        return _range(known, 0) if known else ""

    return cell


_CELLS = {"peak": _megabytes("peak_bytes"), "training": _megabytes("training_bytes")}


def pivot(source: Source) -> str:
    """pivot SWEEP show=peak|training columns=METHOD;… [SETTING=…]: MB of a rank: rows are groups, columns methods."""
    columns = [family_of(spec) for spec in source.option("columns").split(";")]
    cell = _CELLS[source.option("show")]
    head = [*_PLACE, *("computation" if name == "none" else f"`{name}`" for name in columns)]
    there = [one for one in source.groups() if one.best.keys() & set(columns)]
    return table(head, [[*_place(one), *(cell(one, name) for name in columns)] for one in there])


def speed(source: Source) -> str:
    """speed SWEEP [SETTING=…]: a row for every method, with the mean seconds of a step on each network; of several groups
    of one network a range."""
    means: dict[str, dict[str, list[float]]] = {}
    marks: dict[str, str] = {}
    places: list[str] = []
    for one in source.groups():
        place = f"{one.settings['workers']} hosts, {one.settings['network']}"
        places += [] if place in places else [place]
        for row in one.rows:
            name = _ALONE if row.family == "none" else f"`{row.method}`"
            means.setdefault(name, {}).setdefault(place, []).append(row.mean)
            marks[name] = marks.get(name) or _mark(row)
    rows = [
        [name + marks[name], *(_range(there[place], 2) if place in there else "" for place in places)]
        for name, there in means.items()
    ]
    return table(["method", *places], rows)


def ratio(source: Source) -> str:
    """ratio SWEEP MINE OTHER [SETTING=…]: the step of one method over the other's, both with their fastest settings.

    They are the fastest of those that ran as often as any.
    """
    mine, other = _both(source)
    return with_interval(paired(mine.runs, other.runs)).told


def _both(source: Source) -> list[Row]:
    """The fastest settings of two methods in one group."""
    best = source.one_group().best
    rows = [best[name] for name in source.methods() if name in best]
    _committed(source, rows if len(rows) == 2 else [])
    return rows


def peak(source: Source) -> str:
    """peak SWEEP METHOD [SETTING=…]: MB of a rank at its peak; of several settings or groups a range."""
    rows = [row for one in source.groups() for row in one.rows if row.family == source.methods()[0]]
    _committed(source, rows)
    return _range([row.peak_bytes / 2**20 for row in rows], 0)


def _committed(source: Source, rows: Sequence[Row]) -> None:
    """Raises ``ValueError`` where there are none, and for rows that a sentence should not speak of."""
    if not rows:
        raise ValueError("there are no such runs")
    for row in rows:
        if _mark(row):
            source.mark(_mark(row))


def peak_ratio(source: Source) -> str:
    """peak_ratio SWEEP MINE OTHER [SETTING=…]: a rank's peak over the other's, both with their fastest settings."""
    mine, other = _both(source)
    return with_interval(paired(mine.peaks, other.peaks)).told


def seconds(source: Source) -> str:
    """seconds SWEEP METHOD [SETTING=…]: the median step of exactly this setting, in one group."""
    rows = [row for row in source.one_group().rows if row.method == source.words[1]]
    _committed(source, rows)
    return f"{rows[0].median:.2f}"


def proportion(source: Source) -> str:
    """proportion SWEEP compute|wire wire|compute [SETTING=…]: the one over the other, in one group."""
    one = source.one_group()
    above, below = ({"compute": one.compute, "wire": one.wire}[word] for word in source.words[1:])
    if not above or not below:
        raise ValueError("computation or goodput was not measured")
    return f"{above / below:.2f}"


def behind(source: Source) -> str:
    """behind SWEEP … [within=BY]: in how many places `dear` without options is slower than the fastest DDP, ties aside.

    With `within`, how many of these it loses by at most so much, as tables round it.
    """
    told = [
        paired(plain.runs, one.best["ddp"].runs)
        for name in source.words
        for one in replace(source, words=(name,)).groups()
        for plain in one.rows
        if plain.method == "dear" and "ddp" in one.best
    ]
    lost = [ratio for ratio in told if ratio.value > 1 and not ratio.tie]
    if "within" not in source.named:
        return f"{len(lost)} of {len(told)}"
    return str(sum(round(ratio.value, 2) <= 1 + float(source.option("within")) for ratio in lost))


def bars(source: Source) -> str:
    """bars SWEEP: how many of its bars were met, missed and not judged."""
    met = [verdict["met"] for verdict in source.sweep()["bars"]]
    return f"{met.count(True)} met, {met.count(False)} missed, {met.count(None)} not judged"


SWEEPS = (methods, against, pivot, speed, ratio, seconds, peak, peak_ratio, proportion, behind, bars)
