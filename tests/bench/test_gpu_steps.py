"""Steps of one rank with and without our hooks; and what runs under a daemon of MPS."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.gpu import mps, steps
from bench.gpu.streams import read
from bench.methods.method import Method
from bench.models.catalog import Workload


def _batch(number: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(number, size, generator=generator), torch.randint(3, (number,), generator=generator)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    monkeypatch.setattr(steps, "workload", lambda name: Workload(name, "img", build, _batch, _loss, 8, 8, 4))
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # DDP leaves them behind
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


OPTIONS = ["narrow_mlp", "--device", "cpu", "--steps", "2", "--json"]


def test_every_method_is_measured_on_one_rank(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, trace = tmp_path / "rows.json", tmp_path / "trace.json.gz"
    assert steps.main([*OPTIONS, str(rows), "--trace", str(trace)]) == 0
    found = json.loads(rows.read_text())["rows"]
    assert [row["method"] for row in found] == ["none", "dear", "wfbp", "ddp"]
    for row in found:
        assert row["step_ms"] > max(row["forward_ms"], row["backward_ms"], row["update_ms"]) > 0
        assert row["issue_ms"] > 0
    names = {event.get("name") for event in read(str(trace))["traceEvents"]}
    assert "Optimizer.step#DistributedOptimizer.step" in names, "the trace is of dear"
    assert capsys.readouterr().out.count("Self CPU time total") == 4


def test_a_method_that_fails_ends_no_other(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps._method

    def broken(name: str) -> Method:
        if name == "dear":
            raise ImportError("no comm_core")
        return right(name)

    monkeypatch.setattr(steps, "METHODS", ("none", "dear", "none"))
    monkeypatch.setattr(steps, "_method", broken)
    rows = tmp_path / "rows.json"
    assert steps.main([*OPTIONS, str(rows)]) == 1
    found = json.loads(rows.read_text())["rows"]
    assert found[1] == {"method": "dear", "error": "ImportError: no comm_core"}
    assert ["step_ms" in row for row in found] == [True, False, True]


DAEMON = """#!/bin/sh
echo started >>"$CALLS"
{trouble}
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""


def _daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, trouble: str = "") -> None:
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(DAEMON.format(trouble=trouble))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(folder / "calls"))


def test_a_command_runs_under_a_daemon_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _daemon(tmp_path, monkeypatch)
    assert mps.main(["sh", "-c", 'test -e "$CUDA_MPS_PIPE_DIRECTORY/control" && echo "$CUDA_MPS_PIPE_DIRECTORY"']) == 0
    folder, line = capfd.readouterr().out.splitlines()
    assert line == "bench.gpu.mps: it ran under MPS"
    assert not Path(folder).exists(), "nothing is left of it"


@pytest.mark.parametrize(
    ("trouble", "why"),
    [("exit 3", "it ended with 3"), (None, "No such file or directory: 'nvidia-cuda-mps-control'")],
)
def test_without_a_daemon_it_runs_as_it_is(
    trouble: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if trouble is not None:
        _daemon(tmp_path, monkeypatch, trouble)
    assert mps.main(["sh", "-c", "echo ${CUDA_MPS_PIPE_DIRECTORY-none}; exit 5"]) == 5
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "none"
    assert why in said[0]


def test_what_fails_under_a_daemon_is_tried_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _daemon(tmp_path, monkeypatch)
    assert mps.main(["sh", "-c", 'test -z "$CUDA_MPS_PIPE_DIRECTORY"']) == 0
    assert "without MPS: the command ended with 1 under it" in capfd.readouterr().out
