"""Reads a sweep from a TOML table, as the runs it stands for (pure but for reading the file).

title = "…"
[defaults]                          # lists and settings (bench/train/settings.py), for tables that do not have them
iterations = 3
networks = ["100mbit"]
[[runs]]                            # every combination of the lists is a run
methods = ["none", "dear", "ddp:bucket_mb={1,4,25}"]
models = ["resnet50"]
workers = [2, 4]
networks = ["1gbit"]
batch_sizes = [64]                  # left out: the model's own
emulate_compute = "{model}@a100"
[[bars]]                            # what the report judges, see bench.sweep.bars
method = "dear"
at_most = 1.2
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.methods.registry import METHODS
from bench.methods.spec import family_of, meant, parse_spec, refuse_unknown
from bench.models.catalog import workload
from bench.program import from_toml
from bench.sweep import bars
from bench.train.settings import Settings, check

__all__ = ["Sweep", "expand", "read", "select"]

# What a sweep varies, as lists, and what is so where a table does not say.
_LISTS = {
    "methods": ["dear"],
    "models": ["resnet50"],
    "workers": [2],
    "networks": ["local"],
    "batch_sizes": [None],
}
_OTHERWISE = {**_LISTS, "small": False}
_SETTINGS = [field.name for field in fields(Settings)]
_KEYS = (
    *_OTHERWISE,
    *(name for name in _SETTINGS if name not in ("method", "model", "network", "batch_size", *_LISTS)),
)


@dataclass(frozen=True)
class Sweep:
    """A sweep; `left_out` are the runs of the table that were not selected."""

    title: str
    runs: tuple[Settings, ...]
    bars: tuple[bars.Bar, ...]
    left_out: tuple[Settings, ...] = ()


def expand(spec: str) -> list[str]:
    """All methods that a text means: ``"ddp:bucket_mb={1,4}"`` means two; several braces, all combinations."""
    parts = re.split(r"\{([^{}]*)\}", spec)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _runs(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Settings]:
    refuse_unknown("[[runs]]", table, _KEYS)
    told = {**_OTHERWISE, **defaults, **table}
    for key in _LISTS:
        if not isinstance(told[key], list):
            raise ValueError(f"{key} of a sweep should be a list and is {told[key]!r}")
    fixed = {key: value for key, value in told.items() if key not in _LISTS}
    small = fixed.pop("small")
    methods = [one for spec in told["methods"] for one in expand(spec)]
    for spec in methods:
        if parse_spec(spec)[0] not in METHODS:
            raise ValueError(f"the method of {spec!r} should be one of {', '.join(METHODS)}")
    places = itertools.product(told["models"], told["networks"], told["workers"], told["batch_sizes"])
    for model, network, workers, batch_size in places:
        chosen = workload(model)
        sizes = {"size": chosen.small if small else chosen.size}
        own = min(8, chosen.batch_size) if small else chosen.batch_size
        for method in methods:
            varied = {"method": method, "model": model, "network": network, "workers": workers}
            varied["batch_size"] = own if batch_size is None else batch_size
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
    return replace(sweep, runs=left, left_out=tuple(run for run in sweep.runs if run not in chosen))


def parse(data: Mapping[str, Any]) -> Sweep:
    """The sweep in a table; ``ValueError`` for unknown keys, methods or models, and bars that cannot be judged."""
    refuse_unknown("a sweep", data, ("title", "defaults", "runs", "bars"))
    defaults = data.get("defaults", {})
    refuse_unknown("[defaults]", defaults, _KEYS)
    runs: dict[Settings, None] = {}
    for table in data.get("runs", []):
        runs.update(dict.fromkeys(_runs(table, defaults)))
    if not runs:
        raise ValueError("a sweep needs at least one [[runs]] table")
    judged = bars.parse(data.get("bars", []), {family_of(run.method) for run in runs})
    return Sweep(data.get("title", ""), tuple(runs), judged)


def read(path: Path) -> Sweep:
    try:
        return parse(from_toml(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
