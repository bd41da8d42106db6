"""Views of sweeps: what methods took beside each other (read ``docs/results/SWEEP/reports.json``, else pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.claims.source import Source, table
from bench.methods.spec import family_of
from bench.sweep.ratios import Ratio, paired
from bench.sweep.report import BUSY_MARK, bound_of
from bench.sweep.summary import Group, Row
from bench.train.origin import UNCOMMITTED

__all__ = ["SWEEPS"]


def _mark(row: Row) -> str:
    return ("\\*" if UNCOMMITTED in row.origin else "") + BUSY_MARK * row.busy


def _place(one: Group) -> list[str]:
    """What a group trains, and on how many hosts, as two cells."""
    about = one.settings
    what = about["emulate_compute"] or f"{about['model']}, really computed"
    what += f", {about['optimizer']}" if about["optimizer"] != "sgd" else ""
    what += f", under {about['launcher']}" if about["launcher"] else ""
    return [what, str(about["workers"])]


_PLACE = ("what is trained", "hosts")


def _ratio(one: Group) -> str:
    return f"{one.wire / one.compute:.2f}" if one.wire and one.compute else ""


def _bounded(row: Row, one: Group) -> str:
    ratio = one.to_bound(row)
    return ratio.cell if ratio else ""


def _counts(*ratios: Ratio) -> str:
    """The n of several ratios."""
    return " / ".join(dict.fromkeys(str(ratio.n) for ratio in ratios))


def methods(source: Source) -> str:
    """methods SWEEP [all] [repeated] [SETTING=…]: methods of one group, each with its fastest setting, or with all of them.

    repeated: only those that were run most often; others are of the search alone.
    """
    one = source.one_group()
    rows = (
        one.rows if "all" in source.words else [*(row for row in one.rows if row.family == "none"), *one.best.values()]
    )
    least = max(len(row.runs) for row in rows) if "repeated" in source.words else 1
    cells = []
    for row in sorted((row for row in rows if len(row.runs) >= least), key=lambda row: row.median):
        name = "computation alone" if row.family == "none" else f"`{row.method}`"
        spread = f"{row.low:.3f} – {row.high:.3f}"
        told = [f"{row.median:.3f}", spread, str(row.n), _bounded(row, one), str(len(row.runs))]
        cells.append([name + _mark(row), *told])
    return table(["method", "step, median s", "quartiles", "steps", "× L", "n"], cells) + f"\n\n{bound_of(one)}"


def against(source: Source) -> str:
    """against SWEEP MINE OTHER [SETTING=…]: both methods' fastest settings beside L, in every group that has both."""
    mine, other = source.methods()
    cells = []
    for one in source.groups():
        if {mine, other} <= one.best.keys():
            sides = [one.best[name] for name in (mine, other)]
            texts = [[f"`{row.method}`" + _mark(row), f"{row.median:.3f}", _bounded(row, one)] for row in sides]
            ratio = paired(sides[0].runs, sides[1].runs)
            cells.append([*_place(one), _ratio(one), *texts[0], *texts[1], ratio.cell, str(ratio.n)])
    head = [*_PLACE, "wire/compute", mine, "s", "× L", other, "s", "× L", f"{mine} / {other}", "n"]
    return table(head, cells)


def _fastest(one: Group, name: str) -> Row | None:
    """Of a method, also of ``none``."""
    return min(one.candidates(name), key=lambda row: row.median, default=None)


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
    """speed SWEEP [SETTING=…]: a row for every method, with the mean seconds of a step on each network, and its part of
    the speed without communication, which the method `none` of its group has."""
    cells: dict[str, dict[str, str]] = {}
    counts: dict[str, list[Ratio]] = {}
    places: list[str] = []
    for one in source.groups():
        place = f"{one.settings['workers']} hosts, {one.settings['network']}"
        places += [] if place in places else [place]
        alone = _fastest(one, "none")
        for row in one.rows:
            if alone is not None and row.family != "none":
                told = f"{row.mean:.2f} s{_mark(row)}, {alone.mean / row.mean:.0%}"
                cells.setdefault(row.method, {})[place] = told
                counts.setdefault(row.method, []).append(paired(alone.runs, row.runs))
    rows = [
        [f"`{name}`", *(there.get(place, "") for place in places), _counts(*counts[name])]
        for name, there in cells.items()
    ]
    return table(["method", *places, "n"], rows)


def ratio(source: Source) -> str:
    """ratio SWEEP MINE OTHER|L [SETTING=…]: the fastest settings' medians, or L; of several groups a range.

    They are the fastest of those that ran as often as any.
    """
    return _ratios(source, source.methods(), lambda one: one.best)


def exactly(source: Source) -> str:
    """exactly SWEEP MINE OTHER|L [SETTING=…]: as ratio, with the medians of exactly these settings."""
    return _ratios(source, source.words[1:], lambda one: {row.method: row for row in one.rows})


def _ratios(source: Source, sides: Sequence[str], rows_of: Callable[[Group], Mapping[str, Row]]) -> str:
    mine, other = sides
    found = [(one, rows_of(one)) for one in source.groups()]
    there = [(one, rows) for one, rows in found if {mine, other} - {"L"} <= rows.keys()]
    _committed(source, [rows[name] for _, rows in there for name in {mine, other} - {"L"}])
    ratios = [
        one.to_bound(rows[mine]) if other == "L" else paired(rows[mine].runs, rows[other].runs) for one, rows in there
    ]
    return _told([ratio for ratio in ratios if ratio is not None])


def _told(ratios: Sequence[Ratio]) -> str:
    """One ratio with its interval, or the range of several."""
    if len(ratios) == 1:
        return ratios[0].told
    return f"{_range([ratio.value for ratio in ratios], 2)} ({len(ratios)} places, n = {_counts(*ratios)} each)"


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
    one = source.one_group()
    mine, other = (one.best[name] for name in source.methods())
    _committed(source, [mine, other])
    return paired(mine.peaks, other.peaks).told


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


SWEEPS = (methods, against, pivot, speed, ratio, exactly, seconds, peak, peak_ratio, proportion, behind, bars)
