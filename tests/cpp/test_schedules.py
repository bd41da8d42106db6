"""What comm_core does without MPI: schedules, all ranks in one thread, over a network that delivers in any order it
likes; and what it computes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cpp.build import program
from tests.harness import ROOT


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of tests/cpp lie."""
    folder = tmp_path_factory.mktemp("cpp")
    for name in ("schedule_test", "levels_test", "turn_test", "kernels_test"):
        program(folder, ROOT / "tests" / "cpp" / f"{name}.cpp")
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_every_delivery_order_ends_with_the_right_result(programs: Path, seed: int) -> None:
    _run(programs / "schedule_test", seed, rounds=4000)


@pytest.mark.parametrize("seed", range(4))
def test_what_leaves_a_group_of_ranks_leaves_it_once(programs: Path, seed: int) -> None:
    _run(programs / "levels_test", seed, rounds=3000)


@pytest.mark.parametrize("seed", range(2))
def test_groups_that_share_ranks_all_get_their_turn(programs: Path, seed: int) -> None:
    _run(programs / "turn_test", seed, rounds=10_000)


@pytest.mark.parametrize("seed", range(2))
def test_sums_and_averages_of_any_bits_are_those_of_one_element_at_a_time(programs: Path, seed: int) -> None:
    _run(programs / "kernels_test", seed, rounds=50)


def _run(test: Path, seed: int, rounds: int) -> None:
    command = [str(test), str(seed), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
