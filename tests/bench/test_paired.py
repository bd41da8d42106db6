"""Two methods in the same processes: what is made of the numbers, and one small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.paired.result import Paired, markdown
from bench.program import ROOT

ABOUT = {"task": "narrow", "workers": 2, "network": "1gbit", "launcher": "mpi", "transport": "auto", "steps": 20}
SECONDS = {"first": [0.010, 0.020, 0.012, 0.011], "second": [0.010, 0.025, 0.010, 0.010]}
FOUND = Paired("dear", "ddp", ABOUT, SECONDS, {"first": [0.01] * 4, "second": [0.02] * 4})


def test_each_block_is_compared_with_the_one_beside_it() -> None:
    assert FOUND.ratios() == pytest.approx([1.0, 0.8, 1.2, 1.1])
    assert FOUND.ratio() == pytest.approx(1.05)
    assert FOUND.ratio("cpu_seconds") == pytest.approx(0.5)


def test_the_report_says_what_ran_where() -> None:
    text = markdown(FOUND)
    assert "narrow on 2 hosts, 1gbit, mpi, bytes over auto; 20 steps a block:" in text
    assert "| `dear` | 11.50 |" in text
    assert "| `ddp` | 10.00 |" in text
    assert "block by block: 1.050" in text
    assert "processor time: 0.500" in text


@pytest.mark.full
@pytest.mark.needs_root
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_a_small_run(launcher: str, tmp_path: Path) -> None:
    output = tmp_path / "paired.json"
    options = ["--task", "narrow", "--blocks", "4", "--steps", "3", "--launcher", launcher, "--json", str(output)]
    command = [sys.executable, "-m", "bench.paired", "dear", "ddp:bucket_mb=1", *options]
    said = subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.read_text())
    assert [len(found["seconds"][name]) for name in ("first", "second")] == [4, 4]
    assert all(one > 0 for one in (*found["seconds"]["first"], *found["cpu_seconds"]["second"]))
    assert "`dear` / `ddp:bucket_mb=1`, block by block:" in said
