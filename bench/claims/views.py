"""Renders files in ``docs/results`` as Markdown: whole tables, and numbers for sentences (reads files, else pure).

A source names a view, the file, and which groups of runs are meant, by their settings:

    methods tuned-baselines launcher=torchrun

Several settings of one method are a search: its fastest counts. Runs of code that was not committed are marked with *.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.claims.ages import AGES
from bench.claims.collectives import COLLECTIVES
from bench.claims.curves import CURVES
from bench.claims.experiments import EXPERIMENTS
from bench.claims.integrations import INTEGRATIONS
from bench.claims.judged import JUDGED
from bench.claims.paired import PAIRED
from bench.claims.pipelines import PIPELINES
from bench.claims.predictions import PREDICTIONS
from bench.claims.source import Source
from bench.claims.sweeps import SWEEPS
from bench.claims.words import spoken
from bench.program import ROOT
from bench.sweep.summary import GROUP

__all__ = ["RESULTS", "VIEWS", "read", "render"]

RESULTS = ROOT / "docs" / "results"
_NAMED = re.compile(r"\w+=")
_IN_WORDS = "in_words"  # before another view, whose number it says as a word: half, twice, a third
_NUMBER = re.compile(r"\d+\.?\d*")
VIEWS: Mapping[str, Callable[[Source], str]] = {
    view.__name__: view
    for several in (
        SWEEPS,
        CURVES,
        COLLECTIVES,
        PAIRED,
        EXPERIMENTS,
        PIPELINES,
        INTEGRATIONS,
        PREDICTIONS,
        JUDGED,
        AGES,
    )
    for view in several
}


def render(text: str, folder: Path = RESULTS) -> str:
    """The Markdown that the source `text` stands for. Raises ``ValueError`` with the reason where it gives nothing."""
    return read(text, folder)[0]


def read(text: str, folder: Path = RESULTS, *, strict: bool = True) -> tuple[str, Source]:
    """The same, and the source, which tells the files that it read."""
    words = shlex.split(text)
    if words[:1] == [_IN_WORDS]:
        number, source = read(shlex.join(words[1:]), folder, strict=strict)
        found = _NUMBER.search(number)
        if found is None:
            raise ValueError(f"{text!r} gives no number but {number!r}")
        return spoken(float(found[0])), source
    if not words or words[0] not in VIEWS:
        raise ValueError(f"{text!r} should begin with one of {', '.join(VIEWS)}")
    named = dict(word.split("=", 1) for word in words[1:] if _NAMED.match(word))
    strangers = named.keys() - {*GROUP, "show", "columns", "within"}
    if strangers:
        raise ValueError(f"{text!r} names {', '.join(sorted(strangers))}; runs are told apart by {', '.join(GROUP)}")
    plain = tuple(word for word in words[1:] if not _NAMED.match(word))
    try:
        source = Source(folder, plain, named, strict)
        return VIEWS[words[0]](source), source
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None
