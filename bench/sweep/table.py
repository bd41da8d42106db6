"""Reads a sweep from a TOML table, as the runs it stands for (pure but for reading the file).

title = "…"
[defaults]                          # lists and settings (bench/train/settings.py), for tables that do not have them
iterations = 3
networks = ["100mbit"]
repeats = 6                         # of each run, one after the other has had its turn; 1 where nothing is said
[[runs]]                            # every combination of the lists is a run
methods = ["none", "dear", "ddp:bucket_mb={..,1,4,25,..}"]    # .. goes on beyond the best, see bench.sweep.search
models = ["resnet50"]
workers = [2, 4]
launchers = ["torchrun", "mpi"]     # each method under those that can start it; left out: what a method prefers
networks = ["1gbit"]
batch_sizes = [64]                  # left out: the model's own
emulate_compute = "{model}@a100"
[[bars]]                            # what the report judges, see bench.sweep.bars
method = "dear"
at_most = 1.2
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.methods.method import MethodUnavailable
from bench.methods.registry import METHODS, method
from bench.methods.spec import family_of, meant, parse_spec, refuse_unknown
from bench.models.catalog import workload
from bench.program import from_toml
from bench.sweep import bars, search
from bench.train.settings import Settings, check

__all__ = ["Sweep", "read", "select"]

# What a sweep varies, as lists, and what is so where a table does not say.
_LISTS = {
    "methods": ["dear"],
    "models": ["resnet50"],
    "workers": [2],
    "networks": ["local"],
    "batch_sizes": [None],
}
_OTHERWISE = {**_LISTS, "small": False, "repeats": 1, "launchers": [None]}
_SETTINGS = [field.name for field in fields(Settings)]
_KEYS = (
    *_OTHERWISE,
    *(name for name in _SETTINGS if name not in ("method", "model", "network", "batch_size", "repeat", *_LISTS)),
)


@dataclass(frozen=True)
class Sweep:
    """A sweep; `left_out` are the runs of the table that were not selected, `searches` those that go on beyond it."""

    title: str
    runs: tuple[Settings, ...]
    bars: tuple[bars.Bar, ...]
    left_out: tuple[Settings, ...] = ()
    searches: tuple[search.Search, ...] = ()

    def beyond(self, seconds_of: Callable[[Settings], float | None]) -> tuple[Settings, ...]:
        """The runs beyond the table, those that come next included; see :func:`bench.sweep.search.beyond`."""
        found = [run for one in self.searches for run in search.beyond(one, seconds_of)]
        return tuple(run for run in dict.fromkeys(found) if run not in self.runs)


def _launchers(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str | None]:
    """Of a table, or else of the defaults: what starts the workers; None for what each method prefers."""
    for told in (table, defaults):
        if "launcher" in told and "launchers" in told:
            raise ValueError("launcher and launchers are both given: leave one of them out")
        if "launchers" in told:
            several: list[str | None] = told["launchers"]
            if not isinstance(several, list):
                raise ValueError(f"launchers of a sweep should be a list and is {several!r}")
            return several
        if "launcher" in told:
            return [told["launcher"]]
    return [None]


def _starts(spec: str, launcher: str | None) -> bool:
    """Whether `launcher` can start the method `spec`."""
    try:
        return launcher is None or launcher in method(spec).launchers
    except MethodUnavailable:  # its run says so, too
        return True


def _runs(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Settings]:
    refuse_unknown("[[runs]]", table, _KEYS)
    told = {**_OTHERWISE, **defaults, **table}
    for key in _LISTS:
        if not isinstance(told[key], list):
            raise ValueError(f"{key} of a sweep should be a list and is {told[key]!r}")
    fixed = {key: value for key, value in told.items() if key not in (*_LISTS, "launcher", "launchers")}
    small, repeats = fixed.pop("small"), fixed.pop("repeats")
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"repeats of a sweep should be a whole number of at least 1 and is {repeats!r}")
    methods = [one for spec in told["methods"] for one in search.expand(spec)]
    for spec in methods:
        if parse_spec(spec)[0] not in METHODS:
            raise ValueError(f"the method of {spec!r} should be one of {', '.join(METHODS)}")
    launchers = _launchers(table, defaults)
    places = itertools.product(told["models"], told["networks"], told["workers"], told["batch_sizes"], launchers)
    for model, network, workers, batch_size, launcher in places:
        chosen = workload(model)
        sizes = {"size": chosen.small if small else chosen.size}
        own = min(8, chosen.batch_size) if small else chosen.batch_size
        able = [one for one in methods if len(launchers) == 1 or _starts(one, launcher)]
        # In turn, there and back: what grows warm, or slow, meanwhile meets no method more than another.
        turns = [(number, one) for number in range(repeats) for one in able[:: -1 if number % 2 else 1]]
        for number, spec in turns:
            varied = {"method": spec, "model": model, "network": network, "workers": workers, "launcher": launcher}
            varied["batch_size"] = own if batch_size is None else batch_size
            varied["repeat"] = number
            settings = {**sizes, **fixed, **varied}
            if settings.get("emulate_compute"):
                settings["emulate_compute"] = settings["emulate_compute"].format(model=model)
            run = Settings(**settings)
            check(run)
            yield run


def select(sweep: Sweep, wanted: Sequence[str]) -> Sweep:
    """The runs whose settings are all among `wanted`: texts like ``"workers=2"``, several of one setting are a choice.

    Raises ``ValueError`` for a setting that nobody knows, and when no run is left.
    """
    choices: dict[str, set[str]] = {}
    for text in wanted:
        name, equals, value = text.partition("=")
        if not equals or name not in _SETTINGS:
            hint = meant(name, _SETTINGS)
            raise ValueError(
                f"runs are selected by setting=value, e.g. model=mlp, workers=2, and not by {text!r}{hint}"
            )
        choices.setdefault(name, set()).add(value)
    left = tuple(run for run in sweep.runs if all(str(getattr(run, name)) in few for name, few in choices.items()))
    if not left:
        raise ValueError(f"no run of the sweep has {' and '.join(wanted)}")
    chosen = set(left)
    whole = tuple(one for one in sweep.searches if chosen.issuperset(one.runs))  # none goes on from some of its runs
    left_out = tuple(run for run in sweep.runs if run not in chosen)
    return replace(sweep, runs=left, left_out=left_out, searches=whole)


def parse(data: Mapping[str, Any], repeats: int | None = None) -> Sweep:
    """The sweep in a table; ``ValueError`` for unknown keys, methods or models, and bars that cannot be judged.

    `repeats`: of each run, instead of what the table says.
    """
    refuse_unknown("a sweep", data, ("title", "defaults", "runs", "bars"))
    defaults = data.get("defaults", {})
    refuse_unknown("[defaults]", defaults, _KEYS)
    runs: dict[Settings, None] = {}
    going_on: list[search.Search] = []
    for table in data.get("runs", []):
        told = table if repeats is None else {**table, "repeats": repeats}
        several = list(_runs(told, defaults))
        runs.update(dict.fromkeys(several))
        going_on += search.searches({**_OTHERWISE, **defaults, **table}["methods"], several)
    if not runs:
        raise ValueError("a sweep needs at least one [[runs]] table")
    judged = bars.parse(data.get("bars", []), {family_of(run.method) for run in runs})
    return Sweep(data.get("title", ""), tuple(runs), judged, searches=tuple(going_on))


def read(path: Path, repeats: int | None = None) -> Sweep:
    """The sweep in a file; as :func:`parse`."""
    try:
        return parse(from_toml(path), repeats)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
