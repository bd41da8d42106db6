"""Groups of processes that a suite of one job has not: of three and five ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script


@pytest.mark.parametrize("ranks", [3, 5])
def test_random_collectives_where_ranks_are_no_power_of_two(ranks: int, tmp_path: Path) -> None:
    text = """
import comm_core
from tests.comm_core.random_groups import play
c = comm_core.mpi()
for seed in (10, 11):
    play(c, seed)
print("done", flush=True)
"""
    assert run_script(tmp_path, text, ranks).check().output.count("done") == ranks
