"""Pairs of runs inside other libraries: times are medians of steps, losses are laid side by side, DDP is searched."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.emulation.cluster import ClusterError
from bench.integrations import __main__ as program
from bench.integrations.__main__ import WORKERS, constructor
from bench.integrations.report import of_pair, of_search, report, step_seconds
from bench.train.cores import Busy
from bench.train.settings import Settings
from tests.harness import ROOT, run_ranks

# Two steps of warm-up, then 2, 2 and 5 s.
DDP = {"loss": [3.0, 2.0, 1.5, 1.0, 0.5], "seconds": [9.0, 18.0, 20.0, 22.0, 27.0]}
DEAR = {"loss": [3.0, 2.0, 1.5, 1.0, 0.25], "seconds": [9.0, 18.0, 19.0, 20.0, 21.0]}


def test_the_first_steps_are_not_counted() -> None:
    assert step_seconds(DDP) == 2
    assert of_pair({"ddp": DDP, "dear": DEAR}) == "a step: ddp 2.000 s, dear 1.000 s; dear / ddp 0.50"
    assert of_search({"ddp:bucket_mb=1": DDP, "ddp": DEAR}) == "a step: ddp:bucket_mb=1 2.000 s, ddp 1.000 s"


@pytest.mark.parametrize("alone", [None, DDP])
def test_losses_lie_side_by_side(alone: dict[str, list[float]] | None) -> None:
    lines = report([{"ddp": DDP, "dear": DEAR}, {"ddp": DDP, "dear": DDP}], alone, "ddp:bucket_mb=4").splitlines()
    assert lines[0] == "dear / ddp:bucket_mb=4: 0.75 (n = 2)"
    assert lines[2].split() == ["step", "ddp", "dear", *([] if alone is None else ["one", "process"])]
    assert lines[7].split() == ["5", "0.500000", "0.250000", *([] if alone is None else ["0.500000"])]
    assert lines[-1] == "losses at the same step are at most 0.25 apart, over 5 steps"


@pytest.mark.parametrize("library", WORKERS)
def test_every_worker_is_there(library: str) -> None:
    assert importlib.util.find_spec(WORKERS[library]) is not None


def test_ddp_of_a_library_has_torchs_arguments() -> None:
    told = {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": True, "static_graph": True}
    assert constructor("lightning", "ddp:bucket_mb=0.5,view=True,static_graph=True") == told
    assert constructor("transformers", "ddp") == {}
    with pytest.raises(ValueError, match="DDP in transformers does not know view; it knows bucket_mb, static_graph"):
        constructor("transformers", "ddp:view=True")
    with pytest.raises(ValueError, match="bucket_mb of ddp should be a number of at least 0 and is 'big'"):
        constructor("accelerate", "ddp:bucket_mb=big")
    with pytest.raises(ValueError, match=r"the library.s own DDP, with options: .* and not .fsdp2."):
        constructor("accelerate", "fsdp2")


class Launches:
    """Stands in for the launcher: runs of DDP take what `seconds` says of its bucket, dear's take one second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[float | None, float]) -> None:
        self.seconds, self.made, self.failures = seconds, list[tuple[str, str | None]](), 0
        monkeypatch.setattr(program.launcher, "launch", self._launch)
        monkeypatch.setattr(program, "end_in_order", lambda: None)
        monkeypatch.setattr(program, "look", lambda allowed: 0.02)
        self._patch = monkeypatch

    def _launch(self, settings: Settings, _method: object, argv: list[str]) -> None:
        self.made.append((settings.method, settings.launcher))
        if self.failures:
            self.failures -= 1
            raise ClusterError("a job was ended by SIGABRT")
        task: dict[str, Any] = json.loads(argv[-1])
        step = self.seconds[task["ddp"].get("bucket_cap_mb")] if task["method"] == "ddp" else 1.0
        ended = [step * number for number in range(1, task["steps"] + 1)]
        Path(task["output"]).write_text(json.dumps({"loss": [1.0] * task["steps"], "seconds": ended}))

    def __call__(self, *argv: str) -> int:
        self._patch.setattr(sys, "argv", ["bench.integrations", "--library", "accelerate", "--steps", "4", *argv])
        return program.main()


def test_the_bucket_of_ddp_is_searched_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, {0.25: 2.2, 0.5: 2.0, 1: 2.1, 4: 2.3, 25: 3.0})
    buckets = "ddp:bucket_mb={..,1,4,25,..}"
    output = tmp_path / "results" / "accelerate.json"
    assert launches("--ddp", buckets, "--launcher", "mpi", "--pairs", "2", "--json", str(output)) == 0
    searched = [f"ddp:bucket_mb={size}" for size in ("1", "4", "25", "0.5", "0.25")]
    best = "ddp:bucket_mb=0.5"
    assert [method for method, _ in launches.made] == [*searched, best, "dear", "dear", best]
    assert {launcher for _, launcher in launches.made} == {"mpi"}
    left = json.loads(output.read_text())
    assert (left["ddp"], list(left["searched"]), left["launcher"], len(left["pairs"])) == (best, searched, "mpi", 2)
    assert left["searched"]["ddp:bucket_mb=25"]["seconds"] == [3.0, 6.0, 9.0, 12.0]
    assert (left["tried"], left["busy_before"]) == ([buckets], 0.02)


def test_views_and_static_graph_are_tried_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(monkeypatch, {0.5: 2.2, 1: 2.1, 4: 2.3, 25: 3.0})
    assert launches("--pairs", "1") == 0
    with_views = [method for method, _ in launches.made if "view=True,static_graph=True" in method]
    assert sorted(with_views) == [f"ddp:bucket_mb={size},view=True,static_graph=True" for size in ("0.5", "1", "4")]
    assert "dear / ddp:bucket_mb=1: 0.48 (n = 1)" in capsys.readouterr().out


@pytest.mark.parametrize(("failures", "status", "runs"), [(2, 0, 4), (3, 2, 3)])
def test_a_run_that_fails_is_made_again(
    failures: int, status: int, runs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(monkeypatch, {None: 2.0})
    launches.failures = failures
    assert launches("--ddp", "ddp", "--pairs", "1") == status
    assert len(launches.made) == runs
    assert capsys.readouterr().err.count("ddp: a job was ended by SIGABRT; once more") == 2


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launches = Launches(monkeypatch, {None: 2.0})

    def look(*, allowed: bool) -> float:
        if allowed:
            return 0.5
        raise Busy("others")

    monkeypatch.setattr(program, "look", look)
    assert launches("--ddp", "ddp", "--pairs", "1") == 2
    assert capsys.readouterr().err == "bench.integrations: others\n"
    assert launches("--ddp", "ddp", "--pairs", "1", "--busy") == 0
    assert "50% before it began" in capsys.readouterr().out


def test_a_single_setting_of_ddp_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(monkeypatch, {None: 2.0})
    assert launches("--ddp", "ddp", "--pairs", "1") == 0
    assert [method for method, _ in launches.made] == ["ddp", "dear"]
    assert launches("--ddp", "ddp:compression=bf16") == 2
    assert "DDP in accelerate does not know compression" in capsys.readouterr().err


def test_lightning_under_mpirun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.integrations", "--library", "lightning", "--launcher", "mpi"])
    with pytest.raises(SystemExit):
        program.main()
    assert "take --launcher torchrun" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "launcher"), [*((each, "torchrun") for each in WORKERS), ("accelerate", "mpi"), ("transformers", "mpi")]
)
def test_ddp_of_a_library_has_the_bucket_it_was_told(library: str, launcher: str, tmp_path: Path) -> None:
    """It is torch's that trains, with the size in its own words."""
    pytest.importorskip(library)
    spy = (
        "import runpy, sys, torch\n"
        "made = torch.nn.parallel.DistributedDataParallel.__init__\n"
        "def noted(self, *args, **rest):\n"
        "    assert rest['bucket_cap_mb'] == 0.5, rest\n"
        "    made(self, *args, **rest)\n"
        "    print('made with 0.5')\n"
        "torch.nn.parallel.DistributedDataParallel.__init__ = noted\n"
        "worker = sys.argv.pop(1)\n"
        "runpy.run_module(worker, run_name='__main__')\n"
    )
    script, output = tmp_path / "spy.py", tmp_path / "curve.json"
    script.write_text(spy)
    task = {"method": "ddp", "ddp": {"bucket_cap_mb": 0.5}, "workers": 2, "steps": 3, "output": str(output)}
    argv = [str(script), WORKERS[library], json.dumps(task)]
    done = run_ranks(2, argv, launcher, cwd=ROOT, timeout=300).check()
    assert done.output.count("made with 0.5") == 2
    assert len(json.loads(output.read_text())["loss"]) == 3
