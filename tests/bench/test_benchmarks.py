"""``benchmarks.py`` as a whole, with runs that are only pretended: what it keeps, says, refuses and exits with."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from bench.sweep.failures import Failure, Failures, reason_in
from bench.sweep.journal import Journal, Occupied, alone
from bench.sweep.runner import run_all
from bench.train.cores import look
from bench.train.origin import Origin, today
from bench.train.settings import Settings
from tests.bench.test_sweep import result_of

TABLE = """
[[runs]]
methods = ["none", "dear", "ddp"]
models = ["mlp"]
workers = [2, 4]
emulate_compute = "mlp@even:20"
[[bars]]
method = "dear"
at_most = 1.1
"""
WORDS = "bench.train: there is no profile of mlp@h100. Derive one"


class Bench:
    """``benchmarks.py`` in a folder; the methods in `broken` fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.broken, self.tried = folder, set[str](), list[str]()
        self.others = 0.02  # the share of cores that others use
        (folder / "table.toml").write_text(TABLE)
        monkeypatch.setattr(benchmarks, "run_all", partial(run_all, attempt=self._attempt))
        monkeypatch.setattr(benchmarks, "look", self._look)
        monkeypatch.setattr(benchmarks, "draw", lambda _groups, _folder: [])  # tests/bench/test_sweep.py has pictures
        self._patch = monkeypatch

    def _attempt(self, run: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
        self.tried.append(f"{run.method}@{run.workers}")
        if run.method in self.broken:
            return None, WORDS, True
        return result_of(run, 1.0, origin=today().to_dict()), "", False

    def _look(self, *, allowed: bool) -> float | None:
        return look(allowed=allowed, share=lambda: self.others)

    def __call__(self, *flags: str) -> int:
        self.tried.clear()
        self._patch.setattr(sys, "argv", ["benchmarks.py", str(self.folder / "table.toml"), "--output", str(self.folder), *flags])  # fmt: skip  # noqa: E501
        return benchmarks.main()

    @property
    def report(self) -> str:
        return (self.folder / "reports.md").read_text()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield Bench(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("commit", ["0123456789", "0123456789-dirty.89abcdef"])
def test_results_of_code_that_is_not_committed_are_announced(
    commit: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks, "today", lambda: Origin(commit, "2", {}))
    assert bench("--only", "workers=2") == 0
    assert ("docs may not quote these results" in capsys.readouterr().err) == ("dirty" in commit)


def test_reports_go_on_telling_why_a_run_failed(bench: Bench) -> None:
    bench.broken = {"dear"}
    assert bench("--only", "workers=2") == 1
    for flags in ((), ("--check-bars",)):
        assert bench("--report", *flags) == 1
        assert bench.tried == []
        assert f"dear, mlp@even:20, 2 workers, local: {WORDS} (tried 2 times)" in bench.report
        assert "dear, mlp@even:20, 4 workers, local: it has not been run\n" in bench.report
        assert "2 workers, this machine: dear at most 1.10 x L: no result of dear |" in bench.report
    assert len(json.loads((bench.folder / "reports.json").read_text())["failures"]) == 4
    bench.broken = set()
    assert bench("--check-bars") == 0
    assert bench("--report", "--check-bars") == 0
    assert "Without a result" not in bench.report


def test_a_failure_after_an_older_result_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench() == 0
    monkeypatch.setenv("DEAR_THRESHOLD_MB", "4")
    bench.broken = {"dear"}
    assert bench("--only", "workers=2") == 1
    assert len(bench.tried) == 4
    monkeypatch.delenv("DEAR_THRESHOLD_MB")
    assert bench("--report") == 1
    assert f"dear, mlp@even:20, 2 workers, local: {WORDS}; the result above is older, of " in bench.report


def test_bars_fail_while_a_run_is_missing_and_are_excused_where_it_was_not_wanted(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--report") == 2
    assert f"there is nothing to report in {bench.folder}" in capsys.readouterr().err
    assert not (bench.folder / "reports.md").exists()  # a report that stands there is not written over
    assert bench("--only", "method=ddp", "--check-bars") == 0
    assert "not judged  dear at most 1.10 x L: left out by --only" in capsys.readouterr().out
    assert bench("--report", "--check-bars") == 1
    assert bench("--report") == 0
    bench.broken = {"none"}
    assert bench("--check-bars", "--only", "workers=2") == 1
    (bench.folder / "table.toml").write_text(TABLE.partition("[[bars]]")[0])
    assert bench("--check-bars") == 2


def test_fresh_forgets_the_selected_runs_and_keeps_them_aside(bench: Bench) -> None:
    bench()
    assert bench("--fresh", "--only", "workers=2", "--only", "method=dear") == 0
    assert bench.tried == ["dear@2"]
    aside = (bench.folder / "forgotten.jsonl").read_text().splitlines()
    assert [json.loads(line)["settings"]["method"] for line in aside] == ["dear"]
    assert len((bench.folder / "results.jsonl").read_text().splitlines()) == 6
    before = (bench.folder / "results.jsonl").read_text()
    assert bench("--fresh", "--report") == 2
    assert (bench.folder / "results.jsonl").read_text() == before
    bench("--fresh")
    assert len(bench.tried) == 6
    assert len((bench.folder / "forgotten.jsonl").read_text().splitlines()) == 7


def test_results_of_other_code_are_announced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench()
    monkeypatch.setenv("DEAR_THRESHOLD_MB", "4")
    assert bench("--keep") == 0
    assert bench.tried == []
    assert "measured again" not in capsys.readouterr().err
    assert bench("--only", "workers=2") == 0
    assert len(bench.tried) == 3
    assert "3 results are of other code or another environment, and are measured again" in capsys.readouterr().err
    assert bench("--report") == 0
    assert "DEAR_THRESHOLD_MB=4 |\n" in bench.report


def test_a_second_sweep_in_a_folder_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench("--only", "method=ddp")
    capsys.readouterr()
    with (bench.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert bench("--fresh") == 2
        error = capsys.readouterr().err
        assert (
            error
            == f"benchmarks.py: another sweep is running in {bench.folder}; wait for it, or choose another --output\n"
        )
        with pytest.raises(Occupied), alone(bench.folder):
            pass
        assert bench("--report") == 0
    assert bench() == 0


def test_the_reason_is_what_came_first_and_not_that_a_worker_failed() -> None:
    log = [
        "-m bench.train --method dear",
        "WARNING: mpirun says something of an error",
        WORDS,
        "mpirun: 2 processes failed",
    ]
    log.append("bench.train: a worker failed; the launcher exited with 2")
    assert reason_in("\n".join(log)) == WORDS
    trace = ["Traceback (most recent call last):", '  File "a.py"', "ValueError: too many", *log[-2:]]
    assert reason_in("\n".join(trace)) == "ValueError: too many"
    assert reason_in("\n".join([log[0], *log[-2:]])) == log[-1]
    assert reason_in("\n") == "it said nothing"


def test_a_repeat_that_was_never_tried_is_no_failure_where_another_has_a_result(tmp_path: Path) -> None:
    failures, journal = Failures(tmp_path / "failures.jsonl"), Journal(tmp_path / "results.jsonl", today())
    runs = [Settings(workers=count, repeat=repeat) for count in (1, 2) for repeat in range(3)]
    journal.add(result_of(runs[0], 1.0, origin=today().to_dict()))
    failures.add(Failure(runs[2], "killed", 1))
    assert [one.settings for one in failures.of(runs, journal)] == runs[2:]


def test_failures_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path, journal = tmp_path / "failures.jsonl", Journal(tmp_path / "results.jsonl", today())
    runs = [Settings(workers=count) for count in (1, 2)]
    Failures(path).add(Failure(runs[0], "first", 2))
    with path.open("a") as file:
        file.write('{"settings": {"meth')
    Failures(path).add(Failure(runs[1], "second", 1))
    assert [one.reason for one in Failures(path).of(runs, journal)] == ["first", "second"]
    Failures(path).succeeded(runs[0])
    assert [one.tries for one in Failures(path).of(runs, journal)] == [0, 1]


def test_a_search_goes_on_by_itself_and_when_it_is_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TABLE.replace('"ddp"]', '"ddp:bucket_mb={..,1,4}"]').replace("[2, 4]", "[2]")
    text += '[[bars]]\nmethod = "dear"\nof = "ddp"\nat_most = 2\n'
    (bench.folder / "table.toml").write_text(text)
    seconds = {"ddp:bucket_mb=1": 0.9, "ddp:bucket_mb=0.5": 0.8}

    def attempt(run: Settings, log: Path) -> tuple[dict[str, Any] | None, str, bool]:
        bench.tried.append(run.method)
        if run.method in bench.broken:
            return None, WORDS, True
        return result_of(run, seconds.get(run.method, 1.0), origin=today().to_dict()), "", False

    monkeypatch.setattr(benchmarks, "run_all", partial(run_all, attempt=attempt))
    bench.broken = {"ddp:bucket_mb=0.25"}
    assert bench("--check-bars") == 1
    planned = ["none", "dear", "ddp:bucket_mb=1", "ddp:bucket_mb=4"]
    assert bench.tried == [*planned, "ddp:bucket_mb=0.5", "ddp:bucket_mb=0.25", "ddp:bucket_mb=0.25"]
    assert "no result of ddp:bucket_mb=0.25" in bench.report
    bench.broken = set()
    assert bench("--check-bars") == 0
    assert bench.tried == ["ddp:bucket_mb=0.25"]
    assert "dear 1.25 (n = 1) x ddp:bucket_mb=0.5" in bench.report
    assert bench("--report", "--check-bars") == 0
    assert len(json.loads((bench.folder / "reports.json").read_text())["runs"]) == 6
    assert bench("--fresh") == 0
    assert len(bench.tried) == 6


def test_a_busy_machine_is_refused_or_marked(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.others = 0.6
    assert bench("--only", "workers=2") == 2
    assert bench.tried == []
    error = capsys.readouterr().err
    assert "other processes keep 60% of this machine's" in error
    assert "takes less than 10%" in error
    assert "--busy" in error
    assert "goes on with what is left" in error
    assert bench("--only", "workers=2", "--busy") == 0
    bench.others = 0.02
    assert bench() == 0
    assert sorted(bench.tried) == ["ddp@4", "dear@4", "none@4"]
    runs = json.loads((bench.folder / "reports.json").read_text())["runs"]
    assert sorted((run["settings"]["workers"], run["busy_before"]) for run in runs) == [(2, 0.6)] * 3 + [(4, 0.02)] * 3
    assert bench.report.count("| dear† |") == bench.report.count("| dear |") == 1
    assert "† on a machine that others used before a run" in bench.report


def test_runs_are_repeated_in_turn_there_and_back(bench: Bench) -> None:
    assert bench("--only", "workers=2", "--repeats", "3") == 0
    there = ["none@2", "dear@2", "ddp@2"]
    assert bench.tried == [*there, *reversed(there), *there]
    assert bench("--only", "workers=2", "--repeats", "6") == 0
    assert bench.tried == [*reversed(there), *there, *reversed(there)]
    row = next(line for line in bench.report.splitlines() if line.startswith("| dear |"))
    assert " | 1.00 (1.00 – 1.00), a tie | 6 | " in row
