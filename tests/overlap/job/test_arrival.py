"""What a rank says of those that have not come to init()."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from overlap.job.arrival import Arrival, told
from overlap.job.launch import Launch, Launcher

MINE = Launch(Launcher.MPI, 0, 4, 0, 4, "mpirun")
WAITS = "rank 0 of 4 (a) waits in init() for the others"


@pytest.mark.parametrize(
    ("local_size", "awaited", "beside", "said"),
    [
        (4, [3, 1], None, ": rank(s) [1, 3] have not come to it"),
        (4, [], None, ", which have all come"),
        (4, None, [0, 2], ": rank(s) [1, 3] of this host have not come to it"),
        (2, None, [0], ": local rank(s) [1] of this host have not come to it"),
        (2, None, [0, 1], ": all 2 of this host have come to it, and some of another host have not"),
        (2, None, None, ""),
    ],
)
def test_who_is_missing(local_size: int, awaited: list[int] | None, beside: list[int] | None, said: str) -> None:
    assert told(replace(MINE, local_size=local_size), "a", awaited, beside) == WAITS + said


def test_ranks_of_a_host_see_each_other_come(tmp_path: Path) -> None:
    environ = {"PMIX_SERVER_TMPDIR": str(tmp_path)}
    mine, other = (Arrival(replace(MINE, rank=rank, local_rank=rank), environ) for rank in (0, 2))
    mine.say()
    other.say()
    assert "rank(s) [1, 3] of this host have not come to it" in mine.describe()
