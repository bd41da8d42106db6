"""Reads what papers have published from a table, ``configs/papers.toml``. Pure but for reading it.

[[sources]]          name, title and where the numbers stand; `base`: the method that others' speedups are over; `findings`:
                     what these numbers by themselves say of differences; `unknown`: what the simulation would need and
                     nobody can know; `methods`: their name of a method to ours
[[sources.tables]]   `profile` and `network` by the names of dear.predict; `per_host` and `workers` count GPUs; `batch_size`
                     and `device`, where they are not the profile's
  one_gpu            samples per second of one GPU, or `one_gpu_seconds` of its step
  rates              by method, samples per second of all GPUs for each number of workers; or `steps` in seconds
[[claims]]           the largest speedups (`up_to`, by network) of a grid: `profiles` × groups of methods
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.program import from_toml

__all__ = ["Cell", "Claim", "Paper", "Published", "Source", "read"]


@dataclass(frozen=True)
class Cell:
    """A job, and the seconds of a step that were published for it. `steps`: by their name of a method."""

    source: str
    model: str
    profile_device: str
    profile_batch: int
    device: str
    batch_size: int
    network: str
    workers: int
    per_host: int
    one_gpu: float
    steps: Mapping[str, float]

    @property
    def has_profile(self) -> bool:
        """Whether there is a profile of just this device and batch size, and not only of the model."""
        return (self.device, self.batch_size) == (self.profile_device, self.profile_batch)


@dataclass(frozen=True)
class Paper:
    """A paper: whose numbers they are, what they say of differences by themselves, and what nobody can know."""

    name: str
    title: str
    where: str
    findings: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Source(Paper):
    """The origin of cells. `methods`: their names of methods to those of the simulation."""

    base: str
    methods: Mapping[str, str]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Claim(Paper):
    """A claim: the largest speedup that was published for each network, of a grid.

    `groups`: title, method, and others.
    """

    workers: int
    per_host: int
    up_to: Mapping[str, float]
    profiles: tuple[tuple[str, str, int], ...]
    groups: tuple[tuple[str, str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Published:
    sources: tuple[Source, ...]
    claims: tuple[Claim, ...]


def read(path: Path) -> Published:
    """Read the table; raises ``OSError``, and ``ValueError`` where it is not as it should be."""
    try:
        data = from_toml(path)
        return Published(tuple(map(_source, data["sources"])), tuple(map(_claim, data["claims"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of published numbers: {type(error).__name__}: {error}") from error


def _named(profile: str) -> tuple[str, str, int]:
    """``"resnet50@rtx2080ti:64"`` to its model, device and batch size."""
    model, _, rest = profile.partition("@")
    device, _, batch = rest.partition(":")
    if not (model and device and batch.isdigit()):
        raise ValueError(f"a profile is written MODEL@DEVICE:BATCH, and not {profile!r}")
    return model, device, int(batch)


def _paper(data: Mapping[str, Any]) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return data["name"], data["title"], data["where"], tuple(data["findings"]), tuple(data["unknown"])


def _source(data: Mapping[str, Any]) -> Source:
    cells = tuple(cell for table in data["tables"] for cell in _cells(data, table))
    return Source(*_paper(data), data["base"], data["methods"], cells)


def _cells(source: Mapping[str, Any], table: Mapping[str, Any]) -> list[Cell]:
    model, device, profile_batch = _named(table["profile"])
    batch = table.get("batch_size", profile_batch)
    one = table["one_gpu_seconds"] if "one_gpu_seconds" in table else batch / table["one_gpu"]
    columns = table["steps"] if "steps" in table else table["rates"]
    found = []
    for place, workers in enumerate(table["workers"]):
        steps = {}
        for method, numbers in columns.items():
            if method not in source["methods"] or len(numbers) != len(table["workers"]):
                raise ValueError(
                    f"{table['profile']} on {table['network']}: {method} should be one of {', '.join(source['methods'])}, "
                    f"with {len(table['workers'])} numbers, and has {len(numbers)}"
                )
            steps[method] = numbers[place] if "steps" in table else workers * batch / numbers[place]
        where = (table.get("device", device), batch, table["network"], workers, table["per_host"])
        found.append(Cell(source["name"], model, device, profile_batch, *where, one, steps))
    return found


def _claim(data: Mapping[str, Any]) -> Claim:
    groups = tuple((group["title"], group["method"], tuple(group["others"])) for group in data["groups"])
    profiles = tuple(map(_named, data["profiles"]))
    return Claim(*_paper(data), data["workers"], data["per_host"], data["up_to"], profiles, groups)
