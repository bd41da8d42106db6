"""The schedules of comm_core, all ranks in one thread, over a network that delivers in any order it likes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from comm_core import _C
from tests.cpp.build import compiler
from tests.harness import ROOT

LIBRARY = Path(_C.__file__).parent


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of tests/cpp lie, built against the library as it is installed."""
    folder = tmp_path_factory.mktemp("cpp")
    include = [f"-I{ROOT / 'comm_core' / part}" for part in ("include", "csrc")]
    link = [f"-L{LIBRARY}", "-lcomm_core", f"-Wl,-rpath,{LIBRARY}"]
    for name in ("schedule_test", "turn_test"):
        source = ROOT / "tests" / "cpp" / f"{name}.cpp"
        command = [compiler(), "-std=c++20", "-O1", *include, str(source), *link, "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_every_delivery_order_ends_with_the_right_result(programs: Path, seed: int) -> None:
    _run(programs / "schedule_test", seed, rounds=4000)


@pytest.mark.parametrize("seed", range(2))
def test_groups_that_share_ranks_all_get_their_turn(programs: Path, seed: int) -> None:
    _run(programs / "turn_test", seed, rounds=10_000)


def _run(program: Path, seed: int, rounds: int) -> None:
    command = [str(program), str(seed), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
