"""Which tests did not run on this machine, and why, in the words of their skips. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

__all__ = ["reasons", "table"]

_LINE = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)  # pytest's short summary, `-rs`


def reasons(output: str) -> dict[str, int]:
    """How many tests a job skipped, by the reason."""
    found: Counter[str] = Counter()
    for count, reason in _LINE.findall(output):
        found[reason.strip()] += int(count)
    return dict(found)


def table(alone: Mapping[str, int], jobs: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Lines: reason by reason how many tests were skipped, and in which of the `jobs` that run suites in every rank.

    What all jobs of a suite skip did not run at all: such reasons come first, with those of tests outside of suites.
    """
    never = [f"{count:5} {reason}" for reason, count in sorted(alone.items())]
    elsewhere = []
    for suite in sorted({name.split()[0] for name in jobs}):
        mine = {name: skipped for name, skipped in jobs.items() if name.split()[0] == suite}
        for reason in sorted({reason for skipped in mine.values() for reason in skipped}):
            where = [name for name in mine if reason in mine[name]]
            count = max(mine[name][reason] for name in where)
            if len(where) == len(mine):
                never.append(f"{count:5} {reason} (every job of {suite})")
            else:
                elsewhere.append(f"{count:5} {reason} ({', '.join(where)})")
    return [
        *(["not run at all:", *never] if never else []),
        *(["run in other jobs:", *elsewhere] if elsewhere else []),
    ]
