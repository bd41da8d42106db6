"""Goes on with a search whose best setting is the first or the last that was tried, by factors of two (pure).

``"ddp:bucket_mb={..,1,4,25,..}"`` in a table: 1, 4 and 25 MB; then 0.5, 0.25, … while the smallest is the fastest, or 50, …
while the largest is. Only one ``..`` goes on in one direction.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.methods.spec import parse_spec
from bench.train.settings import Settings

__all__ = ["Search", "beyond", "expand", "searches"]

_ON = ".."
_MOST = 8  # values beyond those of a table
_BRACES = re.compile(r"(\w+)=\{([^{}]*)\}")


@dataclass(frozen=True)
class Search:
    """Runs of a table that differ in `option` only, and whether smaller and larger values are tried, too."""

    option: str
    runs: tuple[Settings, ...]
    smaller: bool
    larger: bool

    def value(self, run: Settings) -> float:
        return float(parse_spec(run.method)[1][self.option])

    def with_value(self, run: Settings, value: float) -> Settings:
        return replace(run, method=re.sub(rf"\b{self.option}=[^,]+", f"{self.option}={value:g}", run.method))


def expand(spec: str) -> list[str]:
    """All methods that a text means: ``"ddp:bucket_mb={1,4}"`` means two; several braces, all combinations."""
    parts = re.split(r"\{([^{}]*)\}", spec)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices) if _ON not in chosen]


def searches(specs: Iterable[str], runs: Sequence[Settings]) -> list[Search]:
    """What `specs`, methods as a table has them, ask to go on with; `runs` are those that the table stands for.

    Raises ``ValueError`` where the values are no numbers above 0.
    """
    found = []
    for spec in specs:
        methods = expand(spec)
        for option, listed in _BRACES.findall(spec):
            smaller, larger = listed.split(",")[0] == _ON, listed.split(",")[-1] == _ON
            alike: dict[str, list[Settings]] = {}
            for run in runs if smaller or larger else ():
                if run.method in methods:
                    alike.setdefault(_rest(spec, run, option), []).append(run)
            found += [Search(option, tuple(several), smaller, larger) for several in alike.values()]
    return found


def _rest(spec: str, run: Settings, option: str) -> str:
    """All settings of a run, but for the value of one option of its method, and its number among equal runs."""
    name, options = parse_spec(run.method)
    value: Any = options.pop(option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{_ON} goes on with numbers above 0, and {option} of {spec!r} is {value!r}")
    return repr((name, options, {key: told for key, told in run.to_dict().items() if key not in ("method", "repeat")}))


def beyond(search: Search, seconds_of: Callable[[Settings], float | None]) -> list[Settings]:
    """The runs beyond those of the table, in their order; the last ones may have no result, and come next then.

    `seconds_of`: what a step of a run takes, or None where it has no result. Values are compared by the runs, by their
    number, that all of them have: often only the fastest is run again. Where they have none in common, there are none.
    """
    tried: dict[float, dict[int, Settings]] = {}
    for run in search.runs:
        tried.setdefault(search.value(run), {})[run.repeat] = run
    found: list[Settings] = []
    for _ in range(_MOST):
        taken = {
            value: {number: took for number, run in runs.items() if (took := seconds_of(run)) is not None}
            for value, runs in tried.items()
        }
        common = set.intersection(*(set(each) for each in taken.values()))
        if not common:
            return found
        best = min(taken, key=lambda value: statistics.median(taken[value][number] for number in common))
        if search.smaller and best == min(tried):
            next_one = best / 2
        elif search.larger and best == max(tried):
            next_one = best * 2
        else:
            break
        tried[next_one] = {number: search.with_value(run, next_one) for number, run in tried[best].items()}
        found += tried[next_one].values()
    return found
