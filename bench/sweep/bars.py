"""The bars of a sweep, goals for the times of its steps: read from its table, and judged by measurements (pure).

[[bars]]
method = "dear"                     # several settings of one method: the fastest counts
of = "bound"                        # the default; or a method
at_most = 1.2
where = {workers = 2}               # left out: every group that has runs of both
mean = true                         # means of steps, for methods of which one step in many takes longer; else medians
as_it_comes = true                  # method without options, and not its fastest setting; of may be its other settings
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bench.methods.registry import METHODS
from bench.methods.spec import family_of, parse_spec, refuse_unknown
from bench.sweep.ratios import Ratio, paired
from bench.sweep.summary import GROUP, Group, Row, titles
from bench.train.settings import Settings

__all__ = ["BOUND", "Bar", "Verdict", "judge", "parse"]

BOUND = "bound"


@dataclass(frozen=True)
class Bar:
    """A goal: `method`'s median step takes at most `at_most` times that of `of`, in the groups that `where` describes.

    With `mean`, that is so of its mean step.

    With `as_it_comes`, the run of `method` without options counts, and not the fastest setting; where `of` is the same
    method, its other settings.
    """

    method: str
    of: str
    at_most: float
    where: Mapping[str, Any]
    as_it_comes: bool = False
    mean: bool = False

    @property
    def sides(self) -> tuple[str, str]:
        """The families whose runs are needed; the bound is computed from the method `none`."""
        return family_of(self.method), "none" if self.of == BOUND else family_of(self.of)

    def speaks_of(self, settings: Mapping[str, Any]) -> bool:
        """Whether the bar is about runs with these settings; without a launcher, about runs that chose none."""
        return all(settings.get(name) == value for name, value in {"launcher": None, **self.where}.items())

    def seconds(self, row: Row) -> float:
        """The seconds of a step, as this bar counts it."""
        return row.mean if self.mean else row.median

    def ratio(self, mine: Row, other: Row) -> Ratio:
        """Of both, as this bar counts them."""
        return Ratio(mine.mean / other.mean, 1) if self.mean else paired(mine.runs, other.runs)

    def __str__(self) -> str:
        where = " and ".join(f"{name}={value}" for name, value in self.where.items())
        name = f"{self.method} as it comes" if self.as_it_comes else self.method
        text = f"{name} at most {self.at_most:.2f} x {'L' if self.of == BOUND else self.of}"
        return f"{text} where {where}" if where else text


@dataclass(frozen=True)
class Verdict:
    """A judgement: `met` is None where the bar could not be judged, `excused` if ``--only`` left its runs out."""

    met: bool | None
    text: str
    excused: bool = False

    @property
    def passes(self) -> bool:
        return bool(self.met) or self.excused

    @property
    def word(self) -> str:
        return "not judged" if self.met is None else "met" if self.met else "missed"


def _check_side(name: str, spec: Any, families: Collection[str]) -> None:
    """Raises ``ValueError`` unless runs of `families` can be what `spec` means."""
    known = [method for method in METHODS if method != "none" or name == "of"]
    if not isinstance(spec, str) or parse_spec(spec)[0] not in known:
        bound = f"{BOUND}, " if name == "of" else ""
        raise ValueError(f"{name} of [[bars]] should be one of {bound}{', '.join(known)} and is {spec!r}")
    family, options = family_of(spec), parse_spec(spec)[1]
    if "exclude_parts" in parse_spec(family)[1]:
        raise ValueError(f"{name} of [[bars]] is {spec!r}, which leaves communication out: there is nothing to compare")
    if options.keys() != parse_spec(family)[1].keys():
        raise ValueError(
            f"{name} of [[bars]] is {spec!r}, but the fastest setting of a method counts: write {family!r}"
        )
    if family not in families:
        there = ", ".join(sorted(set(families) - {"none"}))
        raise ValueError(f"{name} of [[bars]] is {spec!r}, and the sweep runs {there or 'only none'}")


def parse(tables: Iterable[Mapping[str, Any]], families: Collection[str]) -> tuple[Bar, ...]:
    """The bars of a sweep that runs methods of `families`. Raises ``ValueError`` for what could never be judged."""
    bars = []
    known = [each.name for each in fields(Bar)]
    for table in tables:
        where = table.get("where", {})
        refuse_unknown("[[bars]]", table, known)
        refuse_unknown("where of [[bars]]", where, GROUP)
        lacking = [name for name in ("method", "at_most") if name not in table]
        if lacking:
            raise ValueError(f"[[bars]] needs {' and '.join(lacking)}; it has {', '.join(table) or 'nothing'}")
        of, at_most = table.get("of", BOUND), table["at_most"]
        if isinstance(at_most, bool) or not isinstance(at_most, int | float) or not at_most > 0:
            raise ValueError(f"at_most of [[bars]] should be a number above 0 and is {at_most!r}")
        _check_side("method", table["method"], families)
        if of != BOUND:
            _check_side("of", of, families)
        plain, mean = table.get("as_it_comes", False), table.get("mean", False)
        if mean and of == BOUND:
            raise ValueError("mean of [[bars]] compares two methods, and there is no of")
        if plain and parse_spec(table["method"])[1]:
            raise ValueError(
                f"as_it_comes of [[bars]] is about a method without options, and method is {table['method']!r}"
            )
        bars.append(Bar(table["method"], of, float(at_most), where, bool(plain), bool(mean)))
    return tuple(bars)


@dataclass
class _Place:
    """A group as it was planned: what was measured, and the methods of runs that are missing or were left out."""

    settings: Mapping[str, Any]
    title: str = ""
    measured: Group | None = None
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _places(groups: Sequence[Group], missing: Sequence[Settings], left_out: Sequence[Settings]) -> Iterable[_Place]:
    places: dict[tuple[Any, ...], _Place] = {}

    def at(settings: Mapping[str, Any]) -> _Place:
        about = {name: settings[name] for name in GROUP}
        return places.setdefault(tuple(about.values()), _Place(about))

    for group in groups:
        at(group.settings).measured = group
    for run in missing:
        at(run.to_dict()).missing.append(run.method)
    for run in left_out:
        at(run.to_dict()).left_out.append(run.method)
    for place, title in zip(places.values(), titles([place.settings for place in places.values()]), strict=True):
        place.title = title
    return places.values()


def _verdict(bar: Bar, place: _Place) -> Verdict | None:
    """None where the sweep has no runs for the bar."""

    def of_bar(methods: Iterable[str]) -> dict[str, list[str]]:
        named = [(method, family_of(method)) for method in methods]
        return {side: [method for method, family in named if family == side] for side in bar.sides}

    group = place.measured
    measured = of_bar([row.method for row in group.rows] if group else [])
    missing, left_out = of_bar(place.missing), of_bar(place.left_out)
    if not all(measured[side] or missing[side] or left_out[side] for side in bar.sides):
        return None
    if not all(measured[side] or missing[side] for side in bar.sides):
        return Verdict(None, f"{place.title}: {bar}: left out by --only", excused=True)
    lacking = [method for side in bar.sides for method in missing[side]]
    if group is None or lacking:
        return Verdict(None, f"{place.title}: {bar}: no result of {', '.join(dict.fromkeys(lacking))}")
    compared = _compare(bar, group)
    if compared is None:
        return Verdict(None, f"{place.title}: {bar}: no result of it as it comes, or of another setting")
    text, ratio = compared
    few = [method for side in bar.sides for method in left_out[side]]
    if few:
        text += f", without {', '.join(dict.fromkeys(few))}, left out by --only"
    return Verdict(ratio <= bar.at_most, f"{place.title}: {text}")


def _compare(bar: Bar, group: Group) -> tuple[str, float] | None:
    """A line about a group in which both sides were measured, and the ratio it tells; None without what it means."""
    mine = _fastest(bar, group, bar.method, lambda row: not bar.as_it_comes or row.method == bar.method)
    if mine is None:
        return None
    if bar.of == BOUND:
        other = min((row for row in group.rows if row.family == "none"), key=lambda row: row.median)
        ratio, name = group.to_bound(mine), "L"
        if ratio is None:
            return None
    else:
        fastest = _fastest(bar, group, bar.of, lambda row: not bar.as_it_comes or row.method != bar.method)
        if fastest is None:
            return None
        other = fastest
        ratio, name = bar.ratio(mine, other), other.method
    text = f"{mine.method}{' as it comes' if bar.as_it_comes else ''} {ratio.told} x {name}, bar {bar.at_most:.2f}"
    if mine.origin != other.origin:
        text += f"; not of the same code: {mine.method} of {mine.origin}, {other.method} of {other.origin}"
    return text, ratio.value


def _fastest(bar: Bar, group: Group, method: str, counts: Callable[[Row], bool]) -> Row | None:
    """Of a family's candidates that count."""
    return min(group.candidates(family_of(method), counts), key=bar.seconds, default=None)


def judge(
    groups: Sequence[Group], bars: Sequence[Bar], missing: Sequence[Settings] = (), left_out: Sequence[Settings] = ()
) -> list[Verdict]:
    """A verdict for every group in which the sweep has runs of both sides of a bar, and at least one for every bar.

    `missing` are the runs that have no result: a bar is not judged where one of its runs is among them. `left_out` are
    those that were not selected: a bar is judged by the others, and excused where all runs of a side were left out.
    """

    def verdicts() -> Iterator[Verdict]:
        places = _places(groups, missing, left_out)
        for bar in bars:
            found = [_verdict(bar, place) for place in places if bar.speaks_of(place.settings)]
            told = [verdict for verdict in found if verdict is not None]
            if not told:
                yield Verdict(None, f"{bar}: no group of the sweep has runs of both")
            elif all(verdict.excused for verdict in told):
                yield Verdict(None, f"{bar}: left out by --only", excused=True)
            yield from (verdict for verdict in told if not verdict.excused)

    return list(verdicts())
