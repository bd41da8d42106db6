"""The curves of methods as a file has them: what follows from the bits that ranks have kept is not in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.accuracy.ranks import mean_losses

__all__ = ["curve", "stored", "whole"]

_DRAWN = ("loss", "seconds", "origin")  # of a method, those of its first run

Curves = dict[str, dict[str, Any]]


def curve(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's `runs`, one for each seed, with the curve of the first, which is drawn."""
    return {**{key: runs[0][key] for key in _DRAWN if key in runs[0]}, "runs": runs}


def stored(curves: Mapping[str, Mapping[str, Any]]) -> Curves:
    """What a file keeps of `curves`, from which :func:`whole` makes them again."""
    return {
        name: {**{key: value for key, value in one.items() if key not in _DRAWN}, "runs": [*map(_thin, one["runs"])]}
        for name, one in curves.items()
    }


def _thin(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "loss" or "ranks" not in run}


def whole(found: Mapping[str, Mapping[str, Any]]) -> Curves:
    """The curves of a file. Earlier ones have all of them, and the first ones a run for each method."""
    made = {}
    for name, one in found.items():
        runs = [
            {"loss": mean_losses(run["ranks"]), **run} if "ranks" in run else dict(run)
            for run in one.get("runs", [one])
        ]
        made[name] = {**(curve(runs) if runs else {}), **one, "runs": runs}
    return made
