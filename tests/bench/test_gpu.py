"""What a machine with a GPU is put through, as far as a machine without one can tell."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dear
from bench.gpu import __main__ as program
from bench.gpu import kernels, layers, parity
from bench.gpu.facts import Facts, missing_gpu
from bench.gpu.plan import Check, checks, limit
from bench.gpu.prepare import Ready
from bench.gpu.running import GRACE
from bench.gpu.streams import Stream, read, streams_of
from bench.models.mlp import NARROW
from overlap.plan.simulation.profile import Profile, to_text
from overlap.plan.simulation.workload import Layer
from overlap.transport.cuda.math import kernels_on

CARD = Facts((2, 30, 1), "2.30.1 at /lib", None, None, None, "2.11.0", "13.0")
NO_CORE = "comm_core cannot be imported: it is not built"


def _named(found: Facts, *tools: str, nccl: str | None = None) -> dict[str, Check]:
    made = checks("python", found, lambda name: f"/bin/{name}" if name in tools else None, nccl, 2)
    assert len({check.name for check in made}) == len(made)
    return {check.name: check for check in made}


def test_all_that_is_to_be_shown_has_a_check_in_the_order_of_its_worth() -> None:
    made = _named(CARD, "compute-sanitizer", "ncu", nccl="/carried/libnccl.so.2")
    assert list(made) == [
        *("machine", "build", "nccl-one-rank", "kernels", "ncu", "memcheck", "racecheck"),
        *("alone", "nccl", "staged-torchrun", "staged-mpi"),
        *("steps-resnet50", "steps-bert_base", "steps-gpt2"),
        *(f"layers-{m}-{d}" for m in ("resnet50", "bert_base") for d in ("float32", "bfloat16")),
        *("suite", "suite-staged"),
    ]
    assert not [check.name for check in made.values() if check.skip]
    assert "tests/spmd" in made["suite"].command
    assert made["suite"].environment["DEAR_TEST_DEVICE"] == "cuda"
    assert [name for name, check in made.items() if "COMM_CORE_NCCL" in check.environment] == ["nccl"]
    assert made["nccl"].environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert made["staged-mpi"].environment["DEAR_CUDA_TRANSPORT"] == "staged"
    assert "bench.gpu.parity" in made["staged-mpi"].command
    assert "bench.gpu.mps" in made["nccl"].command
    for tool in ("memcheck", "racecheck"):
        assert made[tool].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        assert int(made[tool].command[made[tool].command.index("--numel") + 1]) % 512
    timed = ("kernels", "ncu", *(name for name in made if name.startswith(("steps", "layers"))))
    assert not [name for name in timed if made[name].environment], "what poisons or staged copies cost is not measured"


def test_what_cannot_be_run_says_why() -> None:
    made = _named(replace(CARD, nccl=(2, 29, 7), no_mpi="no mpirun was found"))
    skipped = {name: check.skip for name, check in made.items() if check.skip}
    assert skipped == {
        "staged-mpi": "no mpirun was found",
        "suite-staged": "no mpirun was found",
        "nccl": "two ranks on one GPU need NCCL 2.30, and there is 2.29.7",
        "memcheck": "compute-sanitizer was not found",
        "racecheck": "compute-sanitizer was not found",
        "ncu": "ncu was not found",
    }
    assert "there is none" in (_named(replace(CARD, nccl=None))["nccl"].skip or "")
    bare = _named(replace(CARD, no_gpu="no CUDA device: none"))
    assert {name for name, check in bare.items() if not check.skip} == {"machine", "build"}
    assert {check.skip for check in bare.values()} == {None, "no CUDA device: none"}


def test_what_needs_no_comm_core_goes_on_without() -> None:
    made = _named(replace(CARD, no_core=NO_CORE, no_mpi=NO_CORE), "compute-sanitizer", "ncu")
    assert {name for name, check in made.items() if not check.skip} == {
        "machine",
        *("steps-resnet50", "steps-bert_base", "steps-gpt2"),
        *(f"layers-{m}-{d}" for m in ("resnet50", "bert_base") for d in ("float32", "bfloat16")),
    }
    assert {check.skip for check in made.values()} == {None, NO_CORE}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is ready and has no card."""
    monkeypatch.setattr(program, "_look", lambda *_: replace(CARD, no_gpu="no CUDA device: none here"))
    monkeypatch.setattr(program, "ready", lambda *_: Ready(dict(os.environ), "there already", {}, None))


def test_a_machine_that_does_not_say_what_it_has_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = dict(os.environ)
    assert "/carried/broken.so" in program._look(env, "/carried/broken.so").nccl_about
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntest -z "$COMM_CORE_NCCL" || exit 139\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert program._look(env, "/carried/crashes.so").torch == torch.__version__, "without it"
    python.write_text("#!/bin/sh\necho no such module >&2; exit 1\n")
    unknown = program._look(env, "/carried/libnccl.so.2")
    assert unknown.nccl_about == "bench.gpu.facts ended with 1: no such module"
    assert [name for name, check in _named(unknown, "ncu", "compute-sanitizer").items() if check.skip] == ["nccl"]
    assert "what this machine has is unknown" in capsys.readouterr().out


def _check(name: str, text: str, **more: Any) -> Check:
    return Check(name, f"that it is {name}", (sys.executable, "-c", text), **more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    bare: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no CUDA device" in (missing_gpu() or "")
    assert program.main(["--out", str(tmp_path / "out"), "--only", "kernels", "nccl"]) == 2
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("bench.gpu: 2 checks within 8 minutes: kernels, nccl. After each ")
    assert second == "bench.gpu: comm_core is there already"
    assert [line.split()[:2] for line in lines] == [["SKIP", "kernels"], ["SKIP", "nccl"]]
    assert all(line.endswith("no CUDA device: none here") for line in lines)
    assert layers.main(["resnet50", "--json", str(tmp_path / "p.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.needs_gpu
def test_kernels_on_the_card_give_what_torch_gives() -> None:
    if kernels_on(torch.cuda.current_device()) is None:
        pytest.skip("no kernels for this card: comm_core was built without nvcc")
    assert kernels.main(["--numel", "100003", "--repeat", "2"]) == 0


@pytest.mark.needs_gpu
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_training_on_the_card_gives_what_one_process_gives(strategy: str) -> None:
    dear.init()
    try:
        assert parity.largest_difference(strategy, torch.device("cuda"), torch.float64) < 1e-11
    finally:
        dear.shutdown()


def test_checks_are_listed_and_named(bare: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    assert program.main([*out, "--list"]) == 0
    assert "staged-mpi" in capsys.readouterr().out
    assert program.main([*out, "--only", "kernels", "kernel"]) == 2
    assert "there is no check kernel;" in capsys.readouterr().err


def _results(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as opened:
        return dict(json.loads(opened.extractfile("results.json").read()))  # type: ignore[union-attr]


def test_results_are_one_archive_and_nothing_stops_the_rest(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "gpu.tar.gz"
    copy = f"import shutil; shutil.copy({str(archive)!r}, 'meanwhile')"
    made = [
        _check("bad", "raise SystemExit('the reason')"),
        _check("slow", "import time; print('row 1', flush=True); time.sleep(60)", seconds=1),
        Check("none", "nothing", (str(tmp_path / "no-such-program"),)),
        Check("not", "nothing", ("x",), skip="because"),
        _check("good", copy),
    ]
    monkeypatch.setattr(program, "checks", lambda *_: made)
    monkeypatch.setattr(program, "limit", lambda check, _: check.seconds)
    assert program.main(["--out", str(tmp_path)]) == 1
    found = _results(archive)["checks"]
    assert {name: result["outcome"] for name, result in found.items()} == {
        "bad": "failed",
        "slow": "stopped",
        "none": "failed",
        "not": "skipped",
        "good": "passed",
    }
    assert found["bad"]["reason"] == "exit status 1; its last line: the reason"
    assert found["slow"]["reason"].startswith("over its limit of 1 s; its last line: ")
    assert "no-such-program" in found["none"]["reason"]
    assert found["not"]["reason"] == "because"
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.tar.gz"]
    with tarfile.open(archive) as opened:
        opened.extract("meanwhile", tmp_path)
        assert b"row 1" in opened.extractfile("slow.log").read()  # type: ignore[union-attr]
    assert list(_results(tmp_path / "meanwhile")["checks"]) == ["bad", "slow", "none", "not"]
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in lines if not line.startswith(("bench.gpu:", "     |"))]
    assert words == ["FAIL", "STOP", "FAIL", "SKIP", "PASS"]
    assert "     | the reason" in lines


def test_who_is_told_to_end_leaves_what_there_is(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tells = (
        f"import os, signal, time; print('row 1', flush=True); os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"
    )
    monkeypatch.setattr(
        program, "checks", lambda *_: [_check("first", ""), _check("second", tells), _check("third", "")]
    )
    with pytest.raises(KeyboardInterrupt):
        program.main(["--out", str(tmp_path)])
    found = _results(tmp_path / "gpu.tar.gz")["checks"]
    assert {name: result["outcome"] for name, result in found.items()} == {"first": "passed", "second": "stopped"}
    with tarfile.open(tmp_path / "gpu.tar.gz") as opened:
        assert opened.extractfile("second.log").read() == b"row 1\n"  # type: ignore[union-attr]


def test_all_ends_in_time(bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = _check("good", "", seconds=60)
    assert limit(check, 480) == 60
    assert limit(check, 40) == 40 - GRACE
    assert limit(check, 4 + GRACE) is None
    assert program.main(["--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "no time was left" in capsys.readouterr().out


def test_a_trace_tells_which_streams_worked(tmp_path: Path) -> None:
    def event(cat: str, name: str, dur: float, **args: int) -> dict[str, Any]:
        return {"cat": cat, "name": name, "dur": dur, "args": args}

    events = [event("kernel", "a", 10, stream=7), event("kernel", "b", 1500, stream=7), event("cpu_op", "c", 9)]
    events += [event("gpu_memcpy", "copy", 500, stream=20), event("kernel", "a", 10, stream=7)]
    assert streams_of({"traceEvents": events}) == [
        Stream(7, 3, 1.52, ("b", "a")),
        Stream(20, 1, 0.5, ("copy",)),
    ]
    assert streams_of({}) == []
    with gzip.open(tmp_path / "trace.json.gz", "wt") as packed:
        json.dump({"traceEvents": events}, packed)
    assert read(str(tmp_path / "trace.json.gz")) == {"traceEvents": events}


def test_layers_are_measured_where_they_are() -> None:
    profile = layers.measure("narrow_mlp", torch.device("cpu"), torch.float32, 2, NARROW, 2)
    assert profile.layers
    assert all(layer.forward > 0 for layer in profile.layers)
    assert all(layer.backward > 0 for layer in profile.layers)
    assert profile.source.startswith("measured on cpu")
    text = json.loads(to_text(Profile("m", "d", 2, "s", (Layer("a", 1e-3, 2e-3, (8,)),))))
    assert text["layers"] == [["a", 1.0, 2.0, [8]]]
