"""Which tests run in the fast tier. Pure.

A test that runs inside every rank has cases, of strategies, models, options; it runs in jobs of several sizes, under two
launchers. The full tier has all products. The fast one runs every case in one job of several ranks, so that each value of a
parameter meets each job, as far as there are cases enough; and every fourth case on a rank alone. What has to be green is
that and, beside it, every case at one and at two ranks over MPI, and in one of the two jobs that cost twice as much.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from enum import Enum

__all__ = ["ALONE", "JOBS", "Tier", "is_beside", "jobs_of"]

# How many cases each takes, beside the others: at four ranks and over gloo a case costs twice as much.
JOBS = {"mpi-2": 3, "mpi-4": 1, "torchrun-2": 1}
ALONE = "mpi-1"
_DEAR = ("mpi-4", "torchrun-2")
_TWO = ("mpi-2", "torchrun-2")
_ALONE_EVERY = 4


class Tier(Enum):
    """What ``DEAR_TESTS`` names."""

    ALL = ""
    FAST = "fast"
    REST = "rest"  # what is not in the fast one
    BESIDE = "beside"  # of that, what has to be green

    def takes(self, fast: bool) -> bool:
        """Whether it has a test that is in the fast tier, or is not."""
        return self is Tier.ALL or fast is (self is Tier.FAST)


def is_beside(number: int, job: str) -> bool:
    """Whether a test's case of this number has to be green in that job, if the fast tier does not run it there."""
    return job not in _DEAR or _DEAR[number % len(_DEAR)] == job


def jobs_of(test: str, cases: Sequence[Sequence[Hashable]], *, two_ranks: bool = False) -> list[set[str]]:
    """In which jobs the fast tier runs each of a test's `cases`, which are given by the values of their parameters.

    With `two_ranks`, it runs at one and two ranks only: it shows nothing else at four, or costs too much there.
    """
    possible = [job for job, share in JOBS.items() if job in _TWO or not two_ranks for _ in range(share)]
    first = zlib.crc32(test.encode()) % len(possible)  # tests without parameters are spread, too
    order = [*possible[first:], *possible[:first]]
    met: Counter[tuple[Hashable, str]] = Counter()  # how often a value runs in a job
    load = Counter[str]()
    found = []
    for case in cases:
        values = list(enumerate(case))
        job = min(
            order, key=lambda job: (sorted(met[value, job] / JOBS[job] for value in values), load[job] / JOBS[job])
        )
        load[job] += 1
        met.update((value, job) for value in values)
        found.append({job} if len(found) % _ALONE_EVERY else {job, ALONE})
    return found
