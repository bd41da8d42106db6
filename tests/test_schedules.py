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
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/cpp/schedule_test.cpp, built against the library as it is installed."""
    path = tmp_path_factory.mktemp("cpp") / "schedule_test"
    include = [f"-I{ROOT / 'comm_core' / folder}" for folder in ("include", "csrc")]
    source = ROOT / "tests" / "cpp" / "schedule_test.cpp"
    link = [f"-L{LIBRARY}", "-lcomm_core", f"-Wl,-rpath,{LIBRARY}"]
    subprocess.run([compiler(), "-std=c++20", "-O1", *include, str(source), *link, "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("seed", range(4))
def test_every_delivery_order_ends_with_the_right_result(program: Path, seed: int) -> None:
    done = subprocess.run([str(program), str(seed), "10000"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
