"""The README's example, as it stands there, under every launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "README.md shows no Python"
    return blocks[0]


def test_the_example_is_short() -> None:
    assert len(_example().strip().splitlines()) <= 22


def test_the_quickstart_shows_the_same() -> None:
    assert _example() in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize(("launcher", "size"), [("single", 1), ("mpi", 2), ("torchrun", 2)])
def test_the_example_trains(launcher: str, size: int, tmp_path: Path) -> None:
    result = run_script(tmp_path, _example(), size, launcher, timeout=400, real_start=launcher == "mpi").check()
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", result.output)]
    assert len(losses) == 5, result.output
    assert losses[-1] < 0.5 * losses[0]
