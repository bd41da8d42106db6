"""What the files in ``docs/results`` say, as Markdown: whole tables, and numbers for sentences (reads files, else pure).

A source names a view, the file, and which groups of runs are meant, by their settings:

    methods default-sweep emulate_compute=mlp@even:560 launcher=None

Several settings of one method are a search: its fastest counts. Runs of code that was not committed are marked with *.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.accuracy.curve import apart
from bench.accuracy.report import held_out, reached
from bench.methods.spec import family_of, parse_spec
from bench.program import ROOT
from bench.sweep.report import bound_of, provenance
from bench.sweep.summary import GROUP, Group, Row, group
from bench.train.origin import UNCOMMITTED

__all__ = ["RESULTS", "VIEWS", "render"]

RESULTS = ROOT / "docs" / "results"
_NAMED = re.compile(r"\w+=")
_NOTE = "\\* with changes that were not committed."


@dataclass(frozen=True)
class Source:
    """A source, taken apart: the files it may read, its words after the view, and settings and options by name."""

    folder: Path
    words: tuple[str, ...]
    named: Mapping[str, str]

    def methods(self) -> list[str]:
        """The words after the file's, as the families of methods that they mean."""
        return [family_of(word) for word in self.words[1:]]

    def option(self, name: str) -> str:
        if name not in self.named:
            raise ValueError(f"{name}= is missing")
        return self.named[name]

    def sweep(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / self.words[0] / "reports.json").read_text())
        return data

    def groups(self) -> list[Group]:
        """Those of the sweep with all the settings that are named. Raises ``ValueError`` where there are none."""
        where = {name: value for name, value in self.named.items() if name in GROUP}
        found = [
            one
            for one in group(self.sweep()["runs"])
            if all(str(one.settings[name]) == value for name, value in where.items())
        ]
        if not found:
            raise ValueError(f"{self.words[0]} has no runs with {where}")
        return found

    def one_group(self) -> Group:
        groups = self.groups()
        if len(groups) > 1:
            raise ValueError(
                f"{len(groups)} groups of runs are meant, not one: {'; '.join(one.title for one in groups)}"
            )
        return groups[0]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\n{_NOTE}" if "*" in text.replace("**", "") else text


def _mark(row: Row) -> str:
    return "\\*" if UNCOMMITTED in row.origin else ""


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
    return f"{row.median / one.bound:.2f}" if one.bound else ""


def about(source: Source) -> str:
    """about SWEEP: how many runs of which code on which machine."""
    return provenance(source.sweep()["runs"])


def methods(source: Source) -> str:
    """methods SWEEP [all] [SETTING=…]: the methods of one group, each with its fastest setting, or with all of them."""
    one = source.one_group()
    rows = (
        one.rows if "all" in source.words else [*(row for row in one.rows if row.family == "none"), *one.best.values()]
    )
    cells = []
    for row in sorted(rows, key=lambda row: row.median):
        name = "computation alone" if row.family == "none" else f"`{row.method}`"
        spread = f"{row.low:.3f} – {row.high:.3f}"
        cells.append([name + _mark(row), f"{row.median:.3f}", spread, str(row.n), _bounded(row, one)])
    return _table(["method", "step, median s", "quartiles", "n", "× L"], cells) + f"\n\n{bound_of(one)}"


def against(source: Source) -> str:
    """against SWEEP MINE OTHER [SETTING=…]: both methods' fastest settings beside L, in every group that has both."""
    mine, other = source.methods()
    cells = []
    for one in source.groups():
        if {mine, other} <= one.best.keys():
            sides = [one.best[name] for name in (mine, other)]
            texts = [[f"`{row.method}`" + _mark(row), f"{row.median:.3f}", _bounded(row, one)] for row in sides]
            cells.append([*_place(one), _ratio(one), *texts[0], *texts[1], f"{sides[0].median / sides[1].median:.2f}"])
    head = [*_PLACE, "wire/compute", mine, "s", "× L", other, "s", "× L", f"{mine} / {other}"]
    return _table(head, cells)


def as_it_comes(source: Source) -> str:
    """as_it_comes SWEEP …: `dear` without options, beside its fastest fixed setting and the fastest DDP."""
    cells = []
    for name in source.words:
        for one in replace(source, words=(name,)).groups():
            plain = [row for row in one.rows if row.method == "dear"]
            fixed = [row for row in one.rows if parse_spec(row.method)[0] == "dear" and row.method != "dear"]
            if plain and fixed and "ddp" in one.best:
                sides = [min(fixed, key=lambda row: row.median), one.best["ddp"]]
                texts = [[f"`{row.method}`{_mark(row)}", f"{plain[0].median / row.median:.2f}"] for row in sides]
                mine = [f"{plain[0].median:.3f}{_mark(plain[0])}", _bounded(plain[0], one)]
                cells.append([*_place(one), _ratio(one), *mine, *texts[0], *texts[1]])
    return _table([*_PLACE, "wire/compute", "`dear`, s", "× L", "fixed", "`dear` / it", "DDP", "`dear` / it"], cells)


def _fastest(one: Group, name: str) -> Row | None:
    """Of a method, also of ``none``."""
    return min((row for row in one.rows if row.family == name), key=lambda row: row.median, default=None)


def _milliseconds(one: Group, name: str) -> str:
    """The undilated median of the fastest setting."""
    row = _fastest(one, name)
    return f"{1e3 * row.median / one.settings['dilate']:.0f}{_mark(row)}" if row else ""


def _bounds(one: Group, name: str) -> str:
    row = _fastest(one, name)
    return _bounded(row, one) + _mark(row) if row else ""


def _range(values: Sequence[float], digits: int) -> str:
    texts = list(dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values)))
    return " – ".join([texts[0], texts[-1]] if len(texts) > 1 else texts)


def _megabytes(field: str) -> Callable[[Group, str], str]:
    """The smallest and the largest value among a method's settings."""

    def cell(one: Group, name: str) -> str:
        values = [getattr(row, field) / 2**20 for row in one.rows if row.family == name]
        return _range(values, 0 if field == "peak_bytes" else 1) if values else ""

    return cell


_CELLS = {"ms": _milliseconds, "L": _bounds, "peak": _megabytes("peak_bytes"), "state": _megabytes("state_bytes")}


def pivot(source: Source) -> str:
    """pivot SWEEP show=ms|L|peak|state columns=METHOD;… [SETTING=…]: a row for every group, a column for every method."""
    columns = [family_of(spec) for spec in source.option("columns").split(";")]
    show = source.option("show")
    head = [*_PLACE, "wire/compute", *("computation" if name == "none" else f"`{name}`" for name in columns)]
    rows = []
    for one in source.groups():
        there = [name for name in columns if name in one.best]
        if there:
            rows.append([*_place(one), _ratio(one), *(_CELLS[show](one, name) for name in columns)])
            if show == "ms":
                rows[-1].append(f"`{min(there, key=lambda name: one.best[name].median)}`")
    return _table(head + ["fastest"] * (show == "ms"), rows)


def speed(source: Source) -> str:
    """speed SWEEP [SETTING=…]: a row for every method, with the mean seconds of a step on each network, and its part of
    the speed without communication, which the method `none` of its group has."""
    cells: dict[str, dict[str, str]] = {}
    places: list[str] = []
    for one in source.groups():
        place = f"{one.settings['workers']} hosts, {one.settings['network']}"
        places += [] if place in places else [place]
        alone = _fastest(one, "none")
        for row in one.rows:
            if alone is not None and row.family != "none":
                told = f"{row.mean:.2f} s{_mark(row)}, {alone.mean / row.mean:.0%}"
                cells.setdefault(row.method, {})[place] = told
    rows = [[f"`{name}`", *(there.get(place, "") for place in places)] for name, there in cells.items()]
    return _table(["method", *places], rows)


def ratio(source: Source) -> str:
    """ratio SWEEP MINE OTHER|L [SETTING=…]: the fastest settings' medians, or L; of several groups a range."""
    return _ratios(source, source.methods(), lambda one: one.best)


def exactly(source: Source) -> str:
    """exactly SWEEP MINE OTHER|L [SETTING=…]: as ratio, with the medians of exactly these settings."""
    return _ratios(source, source.words[1:], lambda one: {row.method: row for row in one.rows})


def _ratios(source: Source, sides: Sequence[str], rows_of: Callable[[Group], Mapping[str, Row]]) -> str:
    mine, other = sides
    found = [(one, rows_of(one)) for one in source.groups()]
    there = [(one, rows) for one, rows in found if {mine, other} - {"L"} <= rows.keys()]
    _committed([rows[name] for _, rows in there for name in {mine, other} - {"L"}])
    below = [one.bound if other == "L" else rows[other].median for one, rows in there]
    return _range([rows[mine].median / value for (_, rows), value in zip(there, below, strict=True) if value], 2)


def peak(source: Source) -> str:
    """peak SWEEP METHOD [SETTING=…]: MB of a rank at its peak; of several settings or groups a range."""
    rows = [row for one in source.groups() for row in one.rows if row.family == source.methods()[0]]
    _committed(rows)
    return _range([row.peak_bytes / 2**20 for row in rows], 0)


def _committed(rows: Sequence[Row]) -> None:
    """Raises ``ValueError`` for rows that a sentence should not speak of."""
    if not rows:
        raise ValueError("there are no such runs")
    if any(_mark(row) for row in rows):
        raise ValueError("a sentence does not speak of runs whose code was not committed; a table marks them")


def bars(source: Source) -> str:
    """bars SWEEP: how many of its bars were met, missed and not judged."""
    met = [verdict["met"] for verdict in source.sweep()["bars"]]
    return f"{met.count(True)} met, {met.count(False)} missed, {met.count(None)} not judged"


def search(source: Source) -> str:
    """search SWEEP: how many steps each run of a method that searches for its setting took before it was timed."""
    told = {run["settings"]["method"]: run["warmup_steps"] for run in source.sweep()["runs"]}
    found = [f"`{method}` {steps}" for method, steps in told.items() if "tune=True" in method]
    if not found:
        raise ValueError(f"{source.words[0]} has no runs with tune=True")
    return ", ".join(found)


def _curves(source: Source) -> dict[str, Any]:
    """The methods of ``docs/results/accuracy/TASK.json``. Raises ``ValueError`` unless one commit made them all."""
    found: dict[str, Any] = json.loads((source.folder / "accuracy" / f"{source.words[0]}.json").read_text())
    commits = {one["origin"]["commit"] for one in found.values()}
    if len(commits) > 1 or any(UNCOMMITTED in commit for commit in commits):
        raise ValueError(f"its curves are of {', '.join(sorted(commits))}, not of one commit")
    return found


def curves(source: Source) -> str:
    """curves TASK: seconds of every method of ``docs/results/accuracy/TASK.json``, and how far losses are apart."""
    found = _curves(source)
    ends = {name: curve["seconds"][-1] for name, curve in found.items()}
    difference = apart(found)
    first = min(ends, key=lambda name: not name.startswith("dear"))
    cells = [
        [f"`{name}`", f"{end:.1f}", f"{ends[first] / end:.2f}"]
        for name, end in sorted(ends.items(), key=lambda item: item[1])
    ]
    count = len(found[first]["loss"])
    text = _table(["method", f"seconds for {count} steps", f"`{first}` / method"], cells)
    same = "the same in all bits" if difference == 0 else f"at most {difference:.2g} apart"
    return f"{text}\n\nLosses of rank 0 at the same step are {same}."


def curve(source: Source) -> str:
    """curve TASK MINE OTHER: the seconds of one method over those of the other, each with its fastest setting."""
    ends = [(family_of(name), one["seconds"][-1]) for name, one in _curves(source).items()]
    mine, other = (min(seconds for name, seconds in ends if name == wanted) for wanted in source.methods())
    return f"{mine / other:.2f}"


def _runs(source: Source) -> dict[str, Any]:
    """The runs of every method of ``docs/results/FILE.json``, by its name as a cell."""
    found = json.loads((source.folder / f"{source.words[0]}.json").read_text())
    named = {}
    for name, one in found.items():
        commits = [run.get("origin", one["origin"])["commit"] for run in one["runs"]]
        mark = "\\*" if any(UNCOMMITTED in commit for commit in commits) else ""
        named[f"`{name}`{mark}"] = one["runs"]
    return named


def learned(source: Source) -> str:
    """learned FILE: what methods of ``bench.accuracy`` are worth on data that was held out; its means over seeds."""
    head, *rows = held_out(_runs(source))
    return _table(head, rows)


def seconds_to(source: Source) -> str:
    """seconds_to FILE: how long methods of ``bench.accuracy`` take to three losses of the first one."""
    head, *rows = reached(_runs(source), timed=True)
    return _table(head, rows)


def steps(source: Source) -> str:
    """steps NAME METHOD: seconds of all steps of one method in ``docs/results/steps/NAME.json``."""
    courses = json.loads((source.folder / "steps" / f"{source.words[0]}.json").read_text())["courses"]
    found = [sum(course["seconds"]) for course in courses if course["method"] == source.words[1]]
    if not found:
        raise ValueError(f"{source.words[0]} has {', '.join(course['method'] for course in courses)}")
    return f"{found[0]:.0f}"


def collectives(source: Source) -> str:
    """collectives NAME: ``docs/results/collectives/NAME.json``, as ``bench.collectives --json`` writes it, from 1 MB on."""
    found = json.loads((source.folder / "collectives" / f"{source.words[0]}.json").read_text())
    cells = []
    for row in found["rows"]:
        if row["bytes"] >= 2**20:
            figures = [row[name] for name in ("to_wire", "to_gloo", "cpu_to_gloo")]
            spread = f"{row['low_ms']:.2f} – {row['high_ms']:.2f}"
            size, ms = f"{row['bytes'] / 2**20:g} MB", f"{row['ms']:.2f}"
            texts = ["" if value is None else f"{value:.2f}" for value in figures]
            cells.append([row["operation"], size, str(row["n"]), ms, spread, *texts])
    head = ["operation", "size", "n", "ms", "quartiles", "× wire", "× gloo", "CPU × gloo"]
    where = f"{found['hosts']} hosts, {found['network']}, {found['backend']}"
    goodput = f", goodput {found['goodput'] * 8 / 1e6:.0f} Mbit/s" if found["goodput"] else ""
    return f"{where}{goodput}:\n\n{_table(head, cells)}"


def rings(source: Source) -> str:
    """rings NAME …: large reduce-scatters and all-gathers of ``docs/results/collectives/NAME.json``, a line for each file.

    What a ring reaches of the goodput of plain TCP, with the largest operation that was measured.
    """
    cells = []
    for name in source.words:
        found = json.loads((source.folder / "collectives" / f"{name}.json").read_text())
        largest = max(row["bytes"] for row in found["rows"])
        rows = {row["operation"]: row for row in found["rows"] if row["bytes"] == largest}
        shares = [f"{1 / rows[one]['to_wire']:.2f}" for one in ("reduce_scatter", "all_gather")]
        busy = max(row["cores_busy"] for row in rows.values())
        goodput = f"{found['goodput'] * 8 / 1e9:.3g}"
        cells.append([found["network"], str(found["connections"]), goodput, *shares, f"{busy:.0%}"])
    head = [
        "network",
        "connections",
        "plain TCP, Gbit/s",
        "reduce-scatter, of that",
        "all-gather, of that",
        "cores busy",
    ]
    return _table(head, cells)


_ALL = (
    *(about, methods, against, as_it_comes, pivot, speed, ratio, exactly, peak, bars, search),
    *(curve, curves, learned, seconds_to, steps, collectives, rings),
)
VIEWS: Mapping[str, Callable[[Source], str]] = {view.__name__: view for view in _ALL}


def render(text: str, folder: Path = RESULTS) -> str:
    """What the source `text` gives. Raises ``ValueError`` with the reason where it gives nothing."""
    words = shlex.split(text)
    if not words or words[0] not in VIEWS:
        raise ValueError(f"{text!r} should begin with one of {', '.join(VIEWS)}")
    named = dict(word.split("=", 1) for word in words[1:] if _NAMED.match(word))
    strangers = named.keys() - {*GROUP, "show", "columns"}
    if strangers:
        raise ValueError(f"{text!r} names {', '.join(sorted(strangers))}; runs are told apart by {', '.join(GROUP)}")
    plain = tuple(word for word in words[1:] if not _NAMED.match(word))
    try:
        return VIEWS[words[0]](Source(folder, plain, named))
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None
