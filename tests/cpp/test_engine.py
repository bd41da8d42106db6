"""What whoever waits is told when a task of the engine throws, a message is refused, or a process forks; and the like."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cpp.build import program
from tests.harness import ROOT


@pytest.fixture(scope="module")
def engine_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program(tmp_path_factory.mktemp("cpp"), ROOT / "tests" / "cpp" / "engine_test.cpp")


@pytest.mark.parametrize(
    "case", ["task throws", "rounding", "end", "unknown", "roots", "message refused", "window", "fork"]
)
def test_case(engine_test: Path, case: str) -> None:
    done = subprocess.run([str(engine_test), case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
