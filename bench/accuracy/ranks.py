"""What all ranks of a run have written, put together after it, and compared bit for bit with other runs."""

from __future__ import annotations

import json
import statistics
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "DIVERGED",
    "alike",
    "bits",
    "compared",
    "diverged",
    "file_of",
    "gathered",
    "mean_losses",
    "of_bits",
    "whose",
]

DIVERGED = "diverged"  # a rank has written why, and no losses

Run = Mapping[str, Any]


def bits(losses: Sequence[float]) -> str:
    """Losses of single precision, each as the eight hexadecimal digits of its IEEE 754 format, its sign first."""
    return " ".join(struct.pack(">f", loss).hex() for loss in losses)


def of_bits(text: str) -> list[float]:
    """The losses that :func:`bits` has written."""
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in text.split()]


def file_of(output: Path, rank: int) -> Path:
    """Where a rank writes what it has of the run whose `output` is named so."""
    return output.with_name(f"{output.stem}.{rank}.json")


def gathered(output: Path, ranks: int) -> dict[str, Any]:
    """The run whose ranks have written beside `output`: the mean of their losses, rank 0's seconds, and each rank's bits.

    Raises ``OSError`` where a rank has written nothing.
    """
    told = [json.loads(file_of(output, rank).read_text()) for rank in range(ranks)]
    kept = [one.pop("bits") for one in told]
    return {**told[0], "loss": mean_losses(kept), "ranks": kept}


def mean_losses(ranks: Sequence[Mapping[str, str]]) -> list[float]:
    """The mean over `ranks` at each step, from the bits that they have kept."""
    return [statistics.fmean(step) for step in zip(*(of_bits(one["loss"]) for one in ranks), strict=True)]


def diverged(output: Path, ranks: int) -> str | None:
    """What a rank wrote of a gradient that was not finite, of a run that has failed; None: it has failed otherwise."""
    files = [file for rank in range(ranks) if (file := file_of(output, rank)).exists()]
    return next((told for file in files if (told := json.loads(file.read_text()).get(DIVERGED))), None)


def whose(runs: Sequence[Run]) -> str:
    """Whose losses these runs have, in words; earlier ones have kept rank 0's alone."""
    kept = [run["ranks"] for run in runs if "ranks" in run]
    if not kept:
        return "on rank 0"
    mean = f"mean over {max(map(len, kept))} ranks"
    return mean if len(kept) == len(runs) else f"{mean}; of earlier runs, on rank 0"


def alike(first: Sequence[Run], other: Sequence[Run], what: str) -> bool | None:
    """Whether `what` (loss or parameters) has the same bits on every rank of the runs of the same seeds.

    None where no bits were kept, no seed is of both, or they have made other numbers of steps or have other ranks.
    """
    of_seed = {run["seed"]: run for run in first if "ranks" in run}
    pairs = [(of_seed[run["seed"]], run) for run in other if "ranks" in run and run["seed"] in of_seed]
    if not pairs or any(_size(mine) != _size(its) for mine, its in pairs):
        return None
    return all([one[what] for one in mine["ranks"]] == [one[what] for one in its["ranks"]] for mine, its in pairs)


def _size(run: Run) -> tuple[int, int]:
    return len(run["ranks"]), len(run["loss"])


def compared(methods: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """A table: whether losses and parameters have the bits of the first method's; empty where no bits were kept."""
    first = next(iter(methods.values()))
    if not any("ranks" in run for run in first):
        return []
    words = {True: "the same", False: "others", None: ""}
    rows = [["method", "losses", "parameters at the end", "ranks agree at the end"]]
    for name, runs in methods.items():
        kept = [{one["parameters"] for one in run["ranks"]} for run in runs if "ranks" in run]
        agree = ("yes" if all(len(found) == 1 for found in kept) else "no") if kept else ""
        rows.append([name, *(words[alike(first, runs, what)] for what in ("loss", "parameters")), agree])
    return rows
