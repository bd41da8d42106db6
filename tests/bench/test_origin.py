"""Results of other code and other environments: told apart, not reused unless asked for, named where they are compared."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.sweep.bars import Bar, judge
from bench.sweep.failures import Failures
from bench.sweep.journal import Journal
from bench.sweep.report import markdown
from bench.sweep.runner import run_all
from bench.sweep.summary import group
from bench.train.origin import Origin, commit_of, origin_of, today
from bench.train.settings import Settings
from tests.bench.test_sweep import result_of, some_results

NOW = Origin("abc", "2.9", {})
RUN = Settings(model="mlp", workers=2)


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def repository(folder: Path) -> Path:
    git(folder, "init")
    (folder / "docs").mkdir()
    for name in ("code.py", "docs/page.txt"):
        (folder / name).write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def test_a_dirty_tree_is_told_by_what_it_differs_in(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    clean = commit_of(folder)
    assert len(clean) == 10
    (folder / "docs" / "page.txt").write_text("a = 2\n")
    assert commit_of(folder) == clean
    git(folder, "commit", "-a", "-m", "what no run reads")
    assert commit_of(folder) == clean
    told = []
    for text in ("a = 2\n", "a = 3\n", "a = 2\n"):
        (folder / "code.py").write_text(text)
        told.append(commit_of(folder))
    assert told[0] == told[2] != told[1]
    assert all(one.startswith(f"{clean}-dirty.") for one in told)


def test_without_git_the_version_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path).startswith("version ")
    folder = repository(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert commit_of(folder).startswith("version ")


def test_the_environment_is_what_changes_a_method() -> None:
    environ = {"DEAR_THRESHOLD_MB": "4", "HOROVOD_CYCLE_TIME": "5", "DEAR_BENCH_STORE": "x", "HOME": "/"}
    assert today(environ).environment == {"DEAR_THRESHOLD_MB": "4", "HOROVOD_CYCLE_TIME": "5"}
    assert str(replace(NOW, environment={"DEAR_POISON": "1"})) == "abc, torch 2.9, DEAR_POISON=1"


@pytest.mark.parametrize("other", [{"commit": "def"}, {"torch": "2.8"}, {"environment": {"DEAR_THRESHOLD_MB": "1"}}])
def test_results_of_another_origin_are_measured_again_and_stay(other: dict[str, Any], tmp_path: Path) -> None:
    past = tmp_path / "results.jsonl"
    origins = (replace(NOW, **other), NOW)

    def measured(origin: Origin, keep: bool = False) -> bool:
        tried = []

        def attempt(run: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
            tried.append(run)
            return result_of(run, 1.0, origin=origin.to_dict()), "", False

        journal = Journal(past, origin, keep=keep)
        assert journal.others([RUN]) == (past.exists() and not keep and journal.get(RUN) is None)
        run_all([RUN], journal, Failures(tmp_path / "failures.jsonl"), tmp_path, 1, attempt)
        found = journal.get(RUN)
        assert found is not None
        assert keep or origin_of(found) == origin
        return bool(tried)

    assert measured(origins[0])
    assert not measured(origins[1], keep=True)
    assert measured(origins[1])
    assert not measured(origins[0])  # both are kept: going back and forth measures nothing again
    assert not measured(origins[1])
    latest = Journal(past, replace(NOW, commit="third"), keep=True).get(RUN)
    assert latest is not None
    assert origin_of(latest) == NOW


def test_reports_and_bars_name_different_code() -> None:
    none, dear, *ddp = [{**one, "origin": NOW.to_dict()} for one in some_results()[:4]]
    bars = [Bar("dear", "bound", 1.2, {}), Bar("dear", "ddp", 1.0, {})]
    same = group([none, dear, *ddp])
    assert not any("code" in one.text for one in judge(same, bars))
    assert "| code |" not in markdown("", [none, dear, *ddp], same, [], [], [])
    dear["origin"] = replace(NOW, commit="def").to_dict()
    mixed = group([none, dear, *ddp])
    for one, other in zip(judge(mixed, bars), ("none", "ddp:bucket_mb=25"), strict=True):
        assert one.text.endswith(f"; not of the same code: dear of def, torch 2.9, {other} of abc, torch 2.9")
    text = markdown("", [none, dear, *ddp], mixed, [], [], [])
    assert "| code |\n|---|" in text
    assert "| def, torch 2.9 |\n" in text
    assert "commit abc, torch 2.9 / def, torch 2.9;" in text


@pytest.mark.parametrize("setting", [{"warmup": 24}, {"device": "cpu"}, {"optimizer": "adamw"}, {"threads": 2}])
def test_groups_that_differ_have_other_titles_and_no_bound_in_common(setting: dict[str, Any]) -> None:
    (one, other) = group([result_of(replace(RUN, method="none"), 1.0), result_of(replace(RUN, **setting), 1.0)])
    assert one.title != other.title
    assert (one.bound, other.bound) == (1.0, None)
    assert str(next(iter(setting.values()))) in other.title
