"""Two methods in the same processes: what is made of the numbers, and one small run."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paired.__main__ import main, run
from bench.paired.result import Paired, joined, markdown
from bench.program import ROOT

ABOUT = {"task": "narrow", "workers": 2, "network": "1gbit", "launcher": "mpi", "transport": "auto", "steps": 20}
SECONDS = {"first": [0.010, 0.020, 0.012, 0.011], "second": [0.010, 0.025, 0.010, 0.010]}
FOUND = Paired("dear", "ddp", ABOUT, SECONDS, {"first": [0.01] * 4, "second": [0.02] * 4})


def test_each_block_is_compared_with_the_one_beside_it() -> None:
    assert FOUND.ratios() == pytest.approx([1.0, 0.8, 1.2, 1.1])
    assert FOUND.ratio().value == pytest.approx(1.05)
    assert FOUND.ratio("cpu_seconds").value == pytest.approx(0.5)
    assert (FOUND.counted, FOUND.ratio().n, FOUND.ratio().interval) == ("blocks", 4, None)


def test_starts_count_once_each() -> None:
    """Six starts, of which each is steady in itself, and two are slow: as many ratios as starts, not as blocks."""
    starts = [
        replace(
            FOUND,
            about={**ABOUT, "busy_before": busy, "cores_busy": 0.5},
            seconds={"first": [mine] * 4, "second": [1.0] * 4},
        )
        for mine, busy in ((0.9, 0.0), (0.91, 0.2), (0.92, 0.0), (0.93, 0.0), (1.2, 0.0), (1.3, 0.0))
    ]
    found = joined(starts)
    assert (found.counted, found.repeats, len(found.ratios())) == ("starts", 6, 24)
    assert found.ratio().value == pytest.approx(0.925)
    assert found.ratio().interval == pytest.approx((0.9, 1.3))
    assert found.ratio().tie
    assert (found.about["busy_before"], found.about["cores_busy"]) == (0.2, 0.5)
    assert joined([starts[0]]).ratio() == starts[0].ratio()


def test_the_report_says_what_ran_where() -> None:
    text = markdown(FOUND)
    assert (
        "narrow on 2 hosts, 1gbit, mpi, bytes over auto; 20 steps a block, 1 times started; cores busy unknown" in text
    )
    assert "| `dear` | 11.50 |" in text
    assert "| `ddp` | 10.00 |" in text
    assert "n blocks: 1.05 (n = 4); processor time: 0.50 (n = 4)." in text


@pytest.mark.full
@pytest.mark.needs_root
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_a_small_run(launcher: str, tmp_path: Path) -> None:
    output = tmp_path / "paired.json"
    options = [
        "--task",
        "narrow",
        "--blocks",
        "4",
        "--steps",
        "3",
        "--launcher",
        launcher,
        "--json",
        str(output),
        "--busy",
    ]
    command = [sys.executable, "-m", "bench.paired", "dear", "ddp:bucket_mb=1", *options]
    said = subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.read_text())
    assert [len(found["seconds"][name]) for name in ("first", "second")] == [4, 4]
    assert all(one > 0 for one in (*found["seconds"]["first"], *found["cpu_seconds"]["second"]))
    assert "`dear` / `ddp:bucket_mb=1`, n blocks:" in said
    assert 0 <= found["about"]["busy_before"] <= 1
    assert 0 <= found["about"]["cores_busy"] <= 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["dear", "dear:transport=mpi", "--launcher", "mpi"],
            "no variables for one method and .*'mpi'.* for the other",
        ),
        (["horovod:fusion_mb=1", "horovod:fusion_mb=4", "--launcher", "mpi"], "cannot have .* for one method and"),
        (["dear:transport=tcp", "ddp", "--transport", "mpi"], "--transport mpi and a method with transport=tcp"),
        (["dear:transport=mpi", "ddp"], "dear runs under mpi, not under torchrun"),
        (["dear", "horovod"], "horovod runs under mpi, not under torchrun"),
    ],
)
def test_methods_that_cannot_share_their_processes_are_refused(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.methods.horovod.Horovod.look", lambda _self: None)
    monkeypatch.setattr("bench.paired.__main__.Cluster", None)  # none is made
    monkeypatch.setattr("bench.paired.__main__.end_in_order", lambda: None)
    assert main(argv) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_transport_of_a_method_is_that_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Mapping[str, str]] = []

    class Hosts:
        def __init__(self, *_told: object) -> None: ...
        def __enter__(self) -> Hosts:
            return self

        def __exit__(self, *_told: object) -> None: ...
        def run_mpi(self, argv: list[str], *, env: Mapping[str, str], timeout: float) -> None:
            started.append(env)
            Path(argv[2]).write_text(json.dumps(dict.fromkeys(("seconds", "cpu_seconds", "sent_bytes"), SECONDS)))

    monkeypatch.setattr("bench.paired.__main__.Cluster", Hosts)
    told = {
        "workers": 2,
        "ranks_per_host": 1,
        "network": "1gbit",
        "busy": True,
        "launcher": "mpi",
        "transport": "auto",
        "task": "narrow",
    }
    told |= {"blocks": 4, "steps": 3, "timeout": 9.0}
    found = run(argparse.Namespace(first="dear:transport=mpi", second="ddp:view=True", **told))
    assert started[0]["DEAR_TRANSPORT"] == found.about["transport"] == "mpi"
    run(argparse.Namespace(first="dear", second="ddp:view=True", **told))
    assert started[1]["DEAR_TRANSPORT"] == "auto"
