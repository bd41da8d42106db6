"""Every step of a run: what is made of the numbers, and one small run whose network changes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.program import ROOT
from bench.steps.course import Course, draw, followed, markdown, runs, usual

FAST, SLOW = [0.5] * 20, [1.0] * 20
COURSE = Course("dear", FAST + SLOW, [(1, "threshold_mb=3"), (29, "threshold_mb=8")], [(1, 5), (27, 31)], "a", 21)


def test_rows_of_steps() -> None:
    assert runs([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]
    assert runs([]) == []


def test_a_plan_follows_a_change() -> None:
    assert followed(COURSE) == 11  # steps 21 to 31
    assert followed(replace(COURSE, planned=[(1, 5)])) is None
    assert followed(replace(COURSE, changed=None)) is None
    assert usual(COURSE) == 1.0
    assert COURSE.total == pytest.approx(30.0)


def test_the_report_says_who_took_how_long_and_what_was_planned(tmp_path: Path) -> None:
    slower = Course("ddp", [2 * seconds for seconds in COURSE.seconds], [], [], "b", 21)
    text = markdown("About it.", [COURSE, slower, replace(COURSE, method="dear:threshold_mb=3")], "steps.png")
    assert "| dear | 30.0 | 1.000 | 1000 | 11 |  |" in text
    assert "| ddp | 60.0 | 2.000 | 2000 |  | others |" in text
    assert "| dear:threshold_mb=3 | 30.0 | 1.000 | 1000 | 11 | the same |" in text
    assert "from step 29 on threshold_mb=8" in text
    draw([COURSE, slower], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 5000


@pytest.mark.full
@pytest.mark.needs_root
def test_a_network_that_changes(tmp_path: Path) -> None:
    found = tmp_path / "steps.json"
    options = ["--model", "narrow_mlp", "--milliseconds", "20", "--network", "1gbit", "--then", "40mbit"]
    command = [sys.executable, "-m", "bench.steps", "--methods", "dear:threshold_mb=1", *options, "--steps", "30"]
    subprocess.run([*command, "--busy", "--after", "15", "--json", str(found)], cwd=ROOT, check=True, timeout=600)
    (course,) = json.loads(found.read_text())["courses"]
    assert len(course["seconds"]) == 30
    before, after = (sorted(part)[len(part) // 2] for part in (course["seconds"][5:15], course["seconds"][16:]))
    assert after > 2 * before
