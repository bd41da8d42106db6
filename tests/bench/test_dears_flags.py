"""Command lines of DeAR's own repository: its scripts' variables and its programs' flags, as a run here or a refusal."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path

import pytest

from bench.methods.registry import method
from bench.models.catalog import MODELS
from bench.train.dears_flags import add_flags
from bench.train.launcher import interpreter_arguments
from bench.train.settings import Settings, parse
from tests.harness import ROOT
from tests.overlap.optimizer.test_dears_arguments import PASSED

# What its benchmarks.py writes into each method's command line: folder, compressor, threshold, mgwfbp, asc and nstreams.
# And what runs here, or the words that refuse it.
COMMANDS: dict[str, tuple[tuple[str, str, int, int, int, int], str]] = {
    "horovod": (("horovod", "none", 0, 1, 0, 1), "horovod"),
    "pytorch-ddp": (("pytorch-ddp", "none", 0, 1, 0, 1), "ddp"),
    "bytescheduler": (("bytescheduler", "none", 0, 1, 0, 1), "bytescheduler"),
    "dear": (("dear", "none", 0, 1, 0, 1), "dear"),
    "mgwfbp": (("mgwfbp", "none", 0, 1, 0, 1), "mgwfbp"),
    "asc": (("mgwfbp", "none", 0, 1, 1, 1), "mgwfbp:asc=True"),
    "wfbp": (("mgwfbp", "none", 0, 0, 0, 1), "wfbp"),
    "bspa2a": (("mgwfbp", "none", 536870912, 0, 0, 1), "wfbp:num_groups=1"),
    "mgwfbp2": (("mgwfbp", "none", 0, 1, 0, 2), "refused: nstreams=2: .*with nstreams=1, wfbp2, mgwfbp2 and asc2 are"),
    "asc2": (("mgwfbp", "none", 0, 1, 1, 2), "refused: nstreams=2: "),
    "wfbp2": (("mgwfbp", "none", 0, 0, 0, 2), "refused: nstreams=2: "),
    "signum": (
        ("mgwfbp", "signum", 536870912, 0, 0, 1),
        "refused: compressor=signum: .*use compressor=none, fp16 or bf16",
    ),
    "eftopk": (("mgwfbp", "eftopk", 536870912, 0, 0, 1), "refused: compressor=eftopk: "),
    "dgcsampling": (("mgwfbp", "dgcsampling", 536870912, 0, 0, 1), "refused: compressor=dgcsampling: "),
}
VARIABLES = ("compressor", "threshold", "mgwfbp", "asc", "nstreams")


PAGE = (ROOT / "docs" / "dear-scripts.md").read_text()
# Their folders that have other names here.
FOLDERS: dict[str, str] = dict(re.findall(r"^\| `cd ([\w-]+)` \| `cd ([\w/-]+)` \|$", PAGE, re.MULTILINE))


def told(section: str) -> set[str]:
    """What the first column of the last table in a section of the page names."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    *_, table = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def asked_of_python(
    folder: str, env: dict[str, str], tmp_path: Path
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the script of a folder runs under ``PY``, after ``-m bench.train``; nothing else of the environment decides."""
    says = tmp_path / "python"
    says.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/asked\necho "tcp=$ETH_MPI_BTC_TCP_IF_INCLUDE"\n')
    says.chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("ETH_", "IB_", "MAKEFLAGS"))}
    job = subprocess.run(
        ["./horovod_mpi_cj.sh"],
        cwd=ROOT / folder,
        env={**plain, "PY": str(says), "hostfile": "none", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert asked[:2] in ([], ["-m", "bench.train"])
    return job, asked[2:]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_of_its_benchmarks_means_the_same_or_is_refused(name: str, tmp_path: Path) -> None:
    (folder, *values), outcome = COMMANDS[name]
    network = {"rdma": "0", "dnn": "bert_base", "bs": "64", "nworkers": "64"}
    given = network | dict(zip(VARIABLES, map(str, values), strict=True))
    job, asked = asked_of_python(FOLDERS.get(folder, folder), given, tmp_path)
    assert job.returncode == 0, job.stderr
    if outcome.startswith("refused: "):
        with pytest.raises(ValueError, match="^" + outcome.removeprefix("refused: ")) as raised:
            parse(asked)
        assert "\n" not in str(raised.value)
    else:
        expected = Settings(outcome, "bert_base", batch_size=64, size=64, workers=64)
        assert parse(asked)[0] == expected
        method(outcome)


@pytest.mark.parametrize("folder", ["dear", "bench/baselines/pytorch-ddp"])
def test_its_other_network_is_refused_with_what_there_is(folder: str, tmp_path: Path) -> None:
    job, asked = asked_of_python(folder, {"rdma": "1"}, tmp_path)
    assert (job.returncode, asked) == (2, [])
    assert re.search(r"^\w+: rdma=1: .*; use rdma=2 \(IP over InfiniBand\), or rdma=0 and OMPI_MCA_pml=ucx", job.stderr)
    assert job.stderr.count("\n") == 1


def test_its_variables_reach_the_run(tmp_path: Path) -> None:
    env = {
        "threshold": "none",
        "num_nearby_layers": "1",
        "exclude_parts": "allgather",
        "tune": "0",
        "compressor": "bf16",
    }
    _, asked = asked_of_python("dear", env, tmp_path)
    expected = "dear:compression=bf16,threshold_mb=None,num_nearby_layers=1,exclude_parts=allgather"
    assert parse(asked)[0].method == expected


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ("", "dear"),
        ("--threshold 25", "dear:threshold_mb=25"),
        ("--threshold 67108864", "dear:threshold_mb=256"),
        ("--threshold=-1 --method oss", "oss:num_groups=1"),
        ("--threshold none --num-nearby-layers 1", "dear:threshold_mb=None,num_nearby_layers=1"),
        ("--threshold 25 --num-nearby-layers 4 --tune", "dear:threshold_mb=25,num_nearby_layers=4,tune=True"),
        ("--threshold 8 --method ddp --use-zero 1", "ddp-zero:bucket_mb=8"),
        ("--threshold 33554432 --method horovod:cycle_ms=5", "horovod:cycle_ms=5,fusion_mb=128"),
        ("--use-zero 0 --method ddp", "ddp"),
        ("--exclude-parts reducescatter,allgather", "dear:exclude_parts=reducescatter allgather"),
        ("--fp16-allreduce --method wfbp", "wfbp:compression=fp16"),
        ("--compressor fp16 --fp16-allreduce", "dear:compression=fp16"),
        ("--compressor bf16 --method ddp --threshold 8", "ddp:compression=bf16,bucket_mb=8"),
        ("--fp16-allreduce --method horovod", "horovod:compression=fp16"),
        ("--compressor none --density 1 --nstreams 1 --threshold 0", "dear"),
        ("--mgwfbp --asc --method mgwfbp", "mgwfbp:asc=True"),
        ("--mgwfbp 0 --method mgwfbp --threshold 0", "wfbp"),
        ("--partition 4000000 --method bytescheduler", "bytescheduler:partition_mb=15.2587890625"),
        ("--tune 1 --method mgwfbp:profile_steps=2", "mgwfbp:profile_steps=2,tune=True"),
    ],
)
def test_a_flag_becomes_an_option_of_the_method(flags: str, spec: str) -> None:
    settings, _ = parse(flags.split())
    assert settings.method == spec
    method(spec)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp16", r"mixed precision is not benchmarked; fp16_allreduce=1 sends gradients in 16 bits"),
        ("--use-adasum", "gradients are averaged here"),
        ("--rdma", "what an all-reduce costs is measured"),
        ("--density 0.001", r"density=0\.001: gradients are not sparsified here; use density=1"),
        ("--compressor topk", "compressor=topk: .* use compressor=none, fp16 or bf16"),
        ("--compressor bf16 --fp16-allreduce", "fp16_allreduce=1 and compressor=bf16 contradict each other"),
        ("--compressor fp16 --method fsdp2", "compressor=fp16: fsdp2 sends gradients as they are"),
        ("--threshold none", "needs num_nearby_layers, e.g. num_nearby_layers=1"),
        ("--threshold 4 --method mgwfbp", "below merge_below_kb=4096; dear fuses with threshold_mb=4"),
        ("--threshold 67108864 --method wfbp", r"threshold=67108864: .* dear fuses with threshold_mb=256"),
        ("--threshold 4 --method bytescheduler", "cuts layers, with partition_mb"),
        ("--threshold 4 --method fsdp2", "threshold=4: fsdp2 has no such setting"),
        ("--threshold none --method ddp", "threshold=none: ddp has no such setting"),
        ("--mgwfbp --method wfbp", "gradients are merged by mgwfbp, in mgwfbp/"),
        ("--asc --method wfbp", "asc=1 belongs to mgwfbp, and the method is wfbp"),
        ("--asc --mgwfbp 0 --method mgwfbp", "asc=1 belongs to mgwfbp, and the method is wfbp"),
        ("--exclude-parts allgather --method wfbp", "exclude_parts=allgather belongs to dear"),
        ("--num-nearby-layers 1 --method oss", "num_nearby_layers=1 belongs to dear"),
        ("--use-zero 1", "use_zero=1 belongs to ddp, and the method is dear"),
        ("--partition 4 --method dear", "partition=4 belongs to bytescheduler"),
        ("--threshold 4 --method dear:threshold_mb=8", "has threshold_mb already, and threshold_mb=4 is asked for"),
        ("--no-cuda --device cuda", "no_cuda=1 and device cuda contradict each other"),
    ],
)  # fmt: skip
def test_a_flag_that_a_method_cannot_heed_is_refused_in_one_line(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        parse(flags.split())
    assert "\n" not in str(raised.value)


def test_what_only_a_method_knows_it_refuses_itself() -> None:
    spec = parse(["--tune", "--method", "ddp"])[0].method
    with pytest.raises(ValueError, match="ddp does not know tune"):
        method(spec)


def test_the_cpu_is_asked_for_by_both_names() -> None:
    assert parse(["--no-cuda"])[0] == parse(["--device", "cpu"])[0]
    assert parse([])[0].device == "auto"


def test_its_networks_are_all_there() -> None:
    theirs = {"resnet50", "densenet201", "inceptionv4", "bert_base", "bert"}
    theirs |= {f"resnet{depth}" for depth in (18, 34, 101, 152)} | {f"vgg{depth}" for depth in (11, 13, 16, 19)}
    theirs |= {f"densenet{depth}" for depth in (121, 161, 169)} | {"inception_v3", "googlenet", "alexnet"}
    assert theirs <= set(MODELS)


def test_the_page_tells_every_argument_variable_and_flag() -> None:
    arguments = {"model", "exclude_parts", "mgwfbp", "asc", "momentum_correction", "multi_job_scheduling", *PASSED}
    assert told("Arguments of DistributedOptimizer") == arguments
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = {action.option_strings[0] for action in parser._actions}
    assert flags <= told("Benchmark programs")
    for flag in told("Benchmark programs") - flags:
        parse([flag, "mlp" if flag == "--model" else "3"])  # ours bears the same name
    script = (ROOT / "scripts" / "horovod_mpi_cj.sh").read_text()
    (handed_on,) = re.findall(r"for name in (threshold .*); do", script)
    assert {*handed_on.split(), "mgwfbp"} <= told("Benchmark scripts") <= set(re.findall(r"\w+", script))
    assert {f"--{name.replace('_', '-')}" for name in handed_on.split()} <= flags


def test_the_page_of_benchmarks_tells_every_model() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("### Models\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", page)) == set(MODELS)


def test_workers_get_pythons_own_arguments() -> None:
    asked = ["/opt/python", "-W", "ignore", "-X", "dev", "-m", "bench.train", "--model", "mlp"]
    assert interpreter_arguments(asked) == ["-W", "ignore", "-X", "dev"]
    assert interpreter_arguments(["python", "script.py"]) == []
