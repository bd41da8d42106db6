"""The command that makes a file of ``docs/results`` again, by what the file says of itself (reads tables of sweeps).

Sweeps are known by their titles. A command measures each method `repeats` times where its program can, and writes into
another folder than ``docs/results``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.accuracy.stored import whole
from bench.claims.source import Source
from bench.methods.spec import family_of
from bench.program import ROOT, from_toml
from bench.sweep.summary import GROUP
from bench.sweep.table import read
from bench.train.settings import Settings

__all__ = ["Command", "command", "unique"]

_START_SECONDS = 10.0  # of one run: processes, emulated hosts, plain TCP
_SIDES = ("against", "ratio", "seconds", "peak", "peak_ratio")  # views of two methods' runs
# What files of bench.accuracy do not say of themselves.
_TAUGHT = {
    "accuracy/gpt2": {"task": "gpt2", "workers": "2", "network": "1gbit", "launcher": "torchrun"},
    "accuracy/gpt2-mpi": {"task": "gpt2", "workers": "2", "network": "1gbit", "launcher": "mpi"},
    "local-sgd/cnn": {"task": "cnn", "workers": "2"},
    "local-sgd/cnn-4": {"task": "cnn", "workers": "4"},
    "local-sgd/language": {"task": "language", "workers": "2"},
    "local-sgd/language-4": {"task": "language", "workers": "4"},
    "local-sgd/seconds": {"task": "language", "workers": "2", "network": "100mbit"},
}


@dataclass(frozen=True)
class Command:
    """What makes a file again: lines that go behind ``python``, one after the other."""

    file: str
    lines: tuple[tuple[str, ...], ...]
    seconds: Mapping[str, float]
    """What each of its runs should take, by a name: commands that share runs in one folder make them once."""
    resumes: bool = False
    """Whether its program goes on where it stopped by itself, and measures again what is of other code."""

    def __str__(self) -> str:
        return " && ".join(shlex.join(["python", *line]) for line in self.lines)


@cache
def _tables() -> dict[str, Path]:
    return {str(from_toml(path)["title"]): path for path in sorted((ROOT / "configs" / "sweeps").glob("*.toml"))}


def _took(result: Mapping[str, Any]) -> float:
    """What a run of a sweep took, about."""
    steps = result["step_seconds"]
    warmed = result.get("warmup_steps") or result["settings"]["warmup"]
    return _START_SECONDS + sum(steps) * (1 + warmed / len(steps))


def _sweep(name: str, found: dict[str, Any], output: Path, repeats: int, asked: tuple[str, Source]) -> Command:
    """A sweep, of which a source may need only some runs."""
    table = _tables().get(found["title"])
    if table is None:
        raise ValueError(f"no table in configs/sweeps has the title {found['title']!r}")
    view, source = asked
    where = {key: value for key, value in source.named.items() if key in GROUP}
    compared = _compared(view, source)

    def needed(setting: Callable[[str], Any]) -> bool:
        return all(str(setting(key)) == value for key, value in where.items()) and compared(setting("method"))

    wanted = [run for run in read(table).runs if needed(partial(getattr, run))]
    if not wanted:
        raise ValueError(f"{table.name} has no runs of {view} with {where} any more")
    methods = list(dict.fromkeys(run.method for run in wanted)) if view in _SIDES else []
    only = [f"{key}={value}" for key, value in where.items()] + [f"method={method}" for method in methods]
    line = ["benchmarks.py", str(table.relative_to(ROOT)), "--output", str(output.parent), "--repeats", str(repeats)]
    seconds = {
        f"{name} {number} {repeat}": _took(result)
        for number, result in enumerate(found["runs"])
        for repeat in range(repeats)
        if result["settings"].get("repeat", 0) == 0 and needed(result["settings"].__getitem__)
    }
    return Command(name, ((*line, *(word for one in only for word in ("--only", one))),), seconds, resumes=True)


def _compared(view: str, source: Source) -> Callable[[str], bool]:
    """Whether a view of two methods reads the runs of one; other views read all (reads the file of results)."""
    if view not in _SIDES:
        return lambda method: True
    if view == "seconds":
        return source.words[1:].__contains__
    sides = {*source.methods(), "none"} if view == "against" else set(source.methods())  # none: wire/compute
    if view == "peak":
        return lambda method: family_of(method) in sides
    often = {row.method for one in source.groups() for side in sides for row in one.candidates(side)}
    return often.__contains__


def _paired(name: str, found: dict[str, Any], output: Path, repeats: int) -> Command:
    about, blocks = found["about"], len(found["seconds"]["first"]) // found["about"].get("repeats", 1)
    options = {key: about[key] for key in ("task", "workers", "network", "launcher", "transport", "steps")}
    options |= {"ranks-per-host": about.get("ranks_per_host", 1), "blocks": blocks, "repeats": repeats, "json": output}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    each = blocks * about["steps"] * sum(sum(side) / len(side) for side in found["seconds"].values())
    seconds = repeats * (2 * _START_SECONDS + 1.3 * each)  # and the steps in which methods plan
    return Command(name, (("-m", "bench.paired", found["first"], found["second"], *words),), {name: seconds})


def _collectives(name: str, found: dict[str, Any], output: Path, _repeats: int) -> Command:
    rows = found["rows"]
    names, sizes = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("operation", "bytes"))
    options = {"hosts": found["hosts"], "ranks-per-host": found.get("ranks_per_host", 1), "network": found["network"]}
    options |= {"connections": found.get("connections", 4)}
    options |= {"launcher": "mpi" if found["backend"] == "mpi" else "torchrun"}
    options |= {"transport": "mpi"} if found["backend"] == "mpi" else {}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    words += ["--backend"] if found["backend"] == "dear" else []
    line = ("-m", "bench.collectives", *words, "--ops", *names, "--sizes", *sizes, "--json", str(output))
    # Ours, gloo's and plain TCP's, and as many again before the clock runs.
    others = [sum(row.get(name) or row["ms"] for name in ("gloo_ms", "plain_ms")) for row in rows]
    seconds = sum(2 * row["n"] * (row["ms"] + other) / 1e3 for row, other in zip(rows, others, strict=True))
    return Command(name, (line,), {name: 2 * _START_SECONDS + seconds})


def _steps(name: str, found: dict[str, Any], output: Path, _repeats: int) -> Command:
    about = re.match(
        r"(?P<steps>\d+) steps of (?P<model>\w+)@even:(?P<milliseconds>\d+) on (?P<workers>\d+) hosts, (?P<network>[^,;]+)"
        r"(?:, (?P<then>\S+) after (?P<after>\d+) steps)?;",
        found["about"],
    )
    if about is None:
        raise ValueError(f"{name} does not say how it was made, but {found['about']!r}")
    words = [word for key, value in about.groupdict().items() if value for word in (f"--{key}", value)]
    methods = [course["method"] for course in found["courses"]]
    seconds = sum(_START_SECONDS + sum(course["seconds"]) for course in found["courses"])
    line = ("-m", "bench.steps", "--methods", *methods, *words, "--json", str(output))
    return Command(name, (line,), {name: seconds})


def _accuracy(name: str, found: dict[str, Any], output: Path, repeats: int) -> Command:
    """Curves; methods that made other numbers of steps have a line of their own, which adds them."""
    found = whole(found)
    taught = [word for key, value in _TAUGHT[name.removesuffix(".json")].items() for word in (f"--{key}", value)]
    lengths = {method: (len(one["loss"]), one.get("search", {}).get("steps")) for method, one in found.items()}
    tries = [tried for one in found.values() for tried in one.get("search", {}).get("tries", ())]
    rates = sorted({tried["rate"] for tried in tries})
    seeds = {len(one.get("runs", [one])) for one in found.values()}
    count = max(repeats, *seeds) if name.startswith("accuracy/") else max(seeds)
    lines: list[tuple[str, ...]] = []
    for steps, searched in dict.fromkeys(lengths.values()):
        methods = [method for method, length in lengths.items() if length == (steps, searched)]
        words = [*taught, "--steps", str(steps), "--seeds", str(count)]
        words += ["--output", str(output.with_suffix(".png")), *["--add"] * bool(lines)]
        words += ["--rates", *map(str, rates), "--search-steps", str(searched)] * bool(rates)
        lines.append(("-m", "bench.accuracy", *words, "--methods", *methods))
    seconds = sum(count * (_START_SECONDS + one["seconds"][-1]) for one in found.values())
    seconds += sum(_START_SECONDS + tried.get("seconds", 0.0) for tried in tries)
    return Command(name, tuple(lines), {name: seconds})


def _experiment(name: str, found: dict[str, Any], output: Path, _repeats: int) -> Command:
    first, runs = found["runs"][0], found["runs"]
    words = ["--hosts", str(first["hosts"]), "--ranks-per-host", str(first["ranks"] // first["hosts"])]
    words += [
        "--network",
        found["network"],
        "--json",
        str(output),
        *(["--", *found["arguments"]] * bool(found["arguments"])),
    ]
    experiment = Path(name).stem.partition("-")[0]
    seconds = sum(3 * _START_SECONDS + sum(run["step_seconds"]) for run in runs)
    return Command(name, (("-m", "bench.experiments", experiment, *words),), {name: seconds})


def _integrations(name: str, found: dict[str, Any], output: Path, repeats: int) -> Command:
    """A file with losses of one process beside is made for these, and has one pair."""
    pairs = len(found["pairs"])
    options = {key: found[key] for key in ("library", "workers", "network", "launcher", "steps")}
    options |= {"pairs": repeats if pairs > 1 else pairs, "json": output}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    line = ("-m", "bench.integrations", *words, *["--one-process"] * (found["one_process"] is not None))
    line += ("--ddp", *found["tried"])
    curves = [*found["searched"].values(), *(curve for pair in found["pairs"] for curve in pair.values())]
    seconds = sum(_START_SECONDS + curve["seconds"][-1] for curve in curves)
    return Command(name, (line,), {name: seconds})


def _pipeline(name: str, found: dict[str, Any], output: Path, _repeats: int) -> Command:
    about = found["about"]
    keys = (
        "stages",
        "data",
        "chunks",
        "schedule",
        "mb",
        "ms",
        "layers",
        "rows",
        "bucket_mb",
        "network",
        "blocks",
        "steps",
    )
    words = [word for key in keys for word in (f"--{key.replace('_', '-')}", str(about[key]))]
    line = ("-m", "bench.pipeline", *words, "--methods", *about["methods"], "--json", str(output))
    seconds = 2 * _START_SECONDS + sum(about["steps"] * sum(one) for one in found["seconds"].values())
    return Command(name, (line,), {name: seconds})


def _predictions(name: str, found: dict[str, Any], output: Path, _repeats: int) -> Command:
    """Predictions are sealed anew, and their cells run; nobody else sees the sealed file in between."""
    table = ROOT / "configs" / "sweeps" / "sealed.toml"
    words = [str(table.relative_to(ROOT)), "--sealed", str(output.with_name("sealed.json"))]
    words += ["--output", str(output.parent)]
    line = ("-m", "bench.validation", *words)
    runs = [(cell["measured"], Settings(**cell["settings"])) for cell in found["cells"]]
    seconds = sum(_START_SECONDS + step * (run.warmup + run.iterations * run.batches) for step, run in runs)
    seconds *= 2  # what predictions need takes about as long
    return Command(name, ((*line, "--seal"), (*line, "--uncommitted", "--json", str(output))), {name: seconds})


_KINDS: Mapping[str, Callable[[str, dict[str, Any], Path, int], Command]] = {
    "paired": _paired,
    "collectives": _collectives,
    "steps": _steps,
    "accuracy": _accuracy,
    "local-sgd": _accuracy,
    "osdp": _experiment,
    "pipeline": _pipeline,
    "integrations": _integrations,
    "prediction": _predictions,
}


def command(name: str, found: dict[str, Any], folder: Path, repeats: int, asked: tuple[str, Source]) -> Command:
    """What makes the file `name`, which has `found`, again in another `folder`.

    `asked`: the view that is to be told from it, and its source. Raises ``ValueError`` where nothing is known of the file.
    """
    output = folder / name
    if name.endswith("/reports.json") and "title" in found:
        return _sweep(name, found, output, repeats, asked)
    kind = _KINDS.get(name.partition("/")[0])
    if kind is None or (kind is _accuracy and name.removesuffix(".json") not in _TAUGHT):
        known = ", ".join(sorted(_KINDS))
        raise ValueError(
            f"nothing says how {name} is made: it is no sweep, and of none of {known}; see bench/claims/commands.py"
        )
    return kind(name, found, output, repeats)


def unique(commands: Sequence[Command]) -> float:
    """The seconds of several commands; runs that they share count once."""
    return sum({name: took for one in commands for name, took in one.seconds.items()}.values())
