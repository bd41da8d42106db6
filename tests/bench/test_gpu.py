"""What a machine with a GPU is put through, as far as a machine without one can tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.emulation.profile import Layer, Profile, to_text
from bench.gpu import __main__ as program
from bench.gpu import layers
from bench.gpu.plan import Check, checks
from bench.models.mlp import NARROW


def _named(nccl: tuple[int, int, int] | None, *tools: str, has_mpirun: bool = True) -> dict[str, Check]:
    made = checks("python", has_mpirun, nccl, lambda name: f"/bin/{name}" if name in tools else None)
    assert len({check.name for check in made}) == len(made)
    return {check.name: check for check in made}


def test_all_that_is_to_be_shown_has_a_check() -> None:
    made = _named((2, 30, 1), "compute-sanitizer", "ncu")
    assert {"build", "kernels", "alone", "staged-mpi", "staged-torchrun", "nccl", "sanitizer", "ncu"} <= set(made)
    assert {f"layers-{m}-{d}" for m in ("resnet50", "bert_base") for d in ("float32", "bfloat16")} <= set(made)
    assert not [check.name for check in made.values() if check.skip]
    assert made["nccl"].environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert made["staged-mpi"].environment == {"DEAR_CUDA_TRANSPORT": "staged"}
    assert "bench.gpu.parity" in made["staged-mpi"].command


def test_what_cannot_be_run_says_why() -> None:
    made = _named((2, 29, 7), has_mpirun=False)
    skipped = {name: check.skip for name, check in made.items() if check.skip}
    assert skipped == {
        "staged-mpi": "no mpirun was found",
        "nccl": "two ranks on one GPU need NCCL 2.30, and there is 2.29.7",
        "sanitizer": "compute-sanitizer was not found",
        "ncu": "ncu was not found",
    }
    assert "there is none" in (_named(None)["nccl"].skip or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.main(["--out", str(tmp_path / "results")]) == 2
    assert "bench.gpu: no GPU: " in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert layers.main(["resnet50", "--json", str(tmp_path / "p.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_checks_are_listed_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    assert "staged-mpi" in capsys.readouterr().out
    assert program.main(["--only", "kernels", "kernel"]) == 2
    assert "there is no check kernel;" in capsys.readouterr().err


def test_results_go_into_one_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Check("good", "that it works", (sys.executable, "-c", "open('made', 'w').close()"))
    bad = Check("bad", "that it fails", (sys.executable, "-c", "raise SystemExit('the reason')"))
    monkeypatch.setattr(program, "checks", lambda *_: [good, bad, Check("not", "nothing", ("x",), skip="because")])
    monkeypatch.setattr(program, "missing_gpu", lambda: None)
    monkeypatch.setattr(program, "_machine", lambda nccl: {})
    assert program.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())["checks"]
    assert {name: result["outcome"] for name, result in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "not": "skipped",
    }
    assert found["bad"]["reason"] == "exit status 1: the reason"
    assert found["not"]["reason"] == "because"
    assert (tmp_path / "made").exists()
    assert "the reason" in (tmp_path / "bad.log").read_text()


def test_layers_are_measured_where_they_are() -> None:
    profile = layers.measure("narrow_mlp", torch.device("cpu"), torch.float32, 2, NARROW, 2)
    assert profile.layers
    assert all(layer.forward_ms > 0 for layer in profile.layers)
    assert all(layer.backward_ms > 0 for layer in profile.layers)
    assert profile.source.startswith("measured on cpu")
    text = json.loads(to_text(Profile("m", "d", 2, "s", (Layer("a", 1.0, 2.0),))))
    assert text["layers"] == [["a", 1.0, 2.0]]
