"""Which tests run in the fast tier. Pure.

A test that runs inside every rank has cases, of strategies, models, options; it runs in jobs of several sizes, under two
launchers. The full tier has all products. The fast one shows a promise, a test with all values but the strategy,

* for three strategies: one that updates in shards, one in which every rank updates all, and one more;
* in one job of two ranks, or of four where it takes four to show all of it (the marker `four_ranks`); some also alone.

A hash of the promise says which ones, so it is the same in every job and every run. That is what every change waits for.
The second tier, before a release, has every case of the suite spmd, each in one of the jobs. On a pretended device a
promise is shown for two strategies.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum

__all__ = [
    "FOUR",
    "OF_THE_BACKEND",
    "OVER_MPI",
    "OVER_TCP",
    "STRATEGY",
    "TWO",
    "Tier",
    "is_beside",
    "is_known",
    "jobs_of",
    "strategies_of",
]

STRATEGY = ("strategy", "way")  # parameters of tests that say which
_IN_SHARDS = ("dear", "oss")  # so begin the names of those in which a rank updates a part
_IN_FULL = ("wfbp", "mgwfbp", "bytescheduler")

# The jobs among which promises are spread.
TWO = ("mpi-2", "mpi-2", "mpi-2", "torchrun-2", "torchrun-2")
FOUR = ("mpi-2", "mpi-2", "mpi-4", "torchrun-2")  # of what takes four ranks to show all of it
OVER_MPI, OVER_TCP = ("mpi-2", "mpi-4"), ("tcp-2", "tcp-4", "sockets-4")  # of comm_core's own tests
OF_THE_BACKEND = {False: ("torchrun-2",), True: ("torchrun-4",)}  # by whether it takes four ranks
_ALONE, _ALONE_EVERY = "mpi-1", 8
_BESIDE = ("mpi-2", "mpi-2", "mpi-4", "torchrun-2", _ALONE)  # among which the second tier spreads cases


class Tier(Enum):
    """What ``DEAR_TESTS`` names."""

    ALL = ""
    FAST = "fast"
    REST = "rest"  # what is not in the fast one
    BESIDE = "beside"  # a part of that: the second tier

    def takes(self, fast: bool) -> bool:
        """Whether it has a test that is in the fast tier, or is not."""
        return self is Tier.ALL or fast is (self is Tier.FAST)


def is_beside(case: str, job: str) -> bool:
    """Whether the second tier has a case of a test in that job, if the fast tier does not run it there."""
    return job not in _BESIDE or _BESIDE[_hash(case) % len(_BESIDE)] == job


def strategies_of(promise: str, strategies: Sequence[str], *, third: bool = True) -> set[str]:
    """By which of the strategies that a test knows the fast tier shows its promise: by all that are not told apart here.

    Of those that are, by two, and a `third`.
    """
    turn = _hash(promise)
    in_shards = [name for name in strategies if name.startswith(_IN_SHARDS)]
    in_full = [name for name in strategies if name.startswith(_IN_FULL)]
    chosen = [*in_shards[:1], *([in_full[turn % len(in_full)]] if in_full else [])]
    left = [name for name in (*in_shards, *in_full) if name not in chosen]
    others = {*strategies} - {*in_shards, *in_full}
    return {*chosen, *([left[turn % len(left)]] if left and third else []), *others}


def jobs_of(promise: str, possible: Sequence[str]) -> set[str]:
    """In which of the `possible` jobs the fast tier shows a promise, and whether also by a rank alone."""
    turn, alone = divmod(_hash(promise), _ALONE_EVERY)
    return {possible[turn % len(possible)], *([_ALONE] if alone == 0 else [])}


def is_known(job: str) -> bool:
    """Whether the fast tier chooses among the tests of that job: it runs all in jobs that a person starts otherwise."""
    return job in (*TWO, *FOUR, *OVER_TCP, *OF_THE_BACKEND[True], _ALONE)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
