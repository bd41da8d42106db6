"""The driver of the published experiments: what it starts, what it writes, and that losses have to be the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import experiments
from bench.claims.experiments import difference
from bench.train.origin import Origin
from tests.bench.test_claims import experiment_of


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The scripts that were started on this machine, each of which leaves its figures."""
    commands: list[list[str]] = []

    def start(command: list[str], **_options: Any) -> None:
        commands.append(command)
        mode = command[command.index("--mode") + 1]
        figures = experiment_of(mode)
        if mode == "group_sharding" and "--apart" in command:
            figures["losses"] = [2.0, 1.51]
        Path(command[command.index("--json") + 1]).write_text(json.dumps(figures))

    instead = SimpleNamespace(run=start, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr(experiments, "subprocess", instead)
    monkeypatch.setattr(experiments, "today", lambda: Origin("abc", "2", {}))
    return commands


def test_every_mode_runs_with_the_same_arguments(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "osdp" / "bert.json"
    assert experiments.main(["bert", "--json", str(file), "--", "--steps", "3"]) == 0
    assert [command[command.index("--mode") :][:4] for command in started] == [
        ["--mode", mode, "--steps", "3"] for mode in ("none", "group_sharding", "communication_with_groups")
    ]
    assert all(command[command.index("-np") + 1] == "4" for command in started)
    assert all(any(word.endswith("examples/osdp/train_bert.py") for word in command) for command in started)
    found = json.loads(file.read_text())
    assert found["arguments"] == ["--steps", "3"]
    assert [run["mode"] for run in found["runs"]] == ["none", "group_sharding", "communication_with_groups"]
    assert "| communication_with_groups | 6 | 0.750 |" in capsys.readouterr().out


def test_losses_that_differ_are_told(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(["bert", "--", "--apart"]) == 1
    assert "losses are not the same" in capsys.readouterr().out
    assert len(started) == 3


def test_the_difference_is_that_of_steps_that_all_have() -> None:
    one, other = experiment_of("none"), experiment_of("none")
    other["losses"] = [2.0, 1.5, 1.25, 7.0]
    assert difference([one, other]) == 0.0
    other["losses"][1] = 1.53
    assert difference([one, other]) == pytest.approx(0.02)


def test_a_network_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        experiments.main(["gpt2", "--network", "fast"])
    assert "--network: a network is local or a rate" in capsys.readouterr().err
