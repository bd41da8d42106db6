"""Pipelines across ranks do not hang in silence: what a job does when a stage fails, dies, stalls or leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import Result, run_script
from tests.overlap.health.training_job import LAUNCHERS

#: `fault(stage, micro_batch, where)` is called in each forward and backward, from the second step on.
_JOB = """
import os, signal, sys, time
import torch
import dear
from pipe import Pipe
dear.init()
rank = dear.rank()
fault = None
class Watched(torch.autograd.Function):
    @staticmethod
    def forward(context, x, layer):
        context.layer = layer
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        layer = context.layer
        if fault is not None:
            fault(layer.stage, layer.backwards, "backward")
        layer.backwards += 1
        return gradient, None
class Layer(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage, self.forwards, self.backwards = stage, 0, 0
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        if fault is not None:
            fault(self.stage, self.forwards, "forward")
        self.forwards += 1
        return Watched.apply(self.layer(x), self)
layers = torch.nn.Sequential(*(Layer(stage) for stage in range(STAGES)))
model = Pipe(
    layers,
    [1] * STAGES,
    mesh=dear.Mesh(data=1, pipeline=-1),
    chunks=6,
    schedule="SCHEDULE",
    loss=lambda output, target: (output - target).square().mean(),
)
x = torch.ones(12, 4)
def train(steps):
    for _ in range(steps):
        for layer in layers:
            layer.forwards = layer.backwards = 0
        model.step(x, target=x)
train(1)
"""
_FAILS = """
def fault(stage, micro_batch, where):
    if (stage, micro_batch, where) == (1, 3, WHERE):
        raise ValueError("the one cause")
"""
_CATCHES = """
for _ in range(2):
    began = time.monotonic()
    try:
        train(1)
    except Exception as error:
        seconds = time.monotonic() - began
        print(f"rank {rank} was told after {seconds:.0f} s: {type(error).__name__}: {error}\\n", end="", flush=True)
dear.shutdown()
print(f"the end of rank {rank}\\n", end="", flush=True)
"""


def _run(folder: Path, text: str, launcher: str, *, schedule: str = "1f1b", ranks: int = 3, **env: str) -> Result:
    stages = ranks * (2 if schedule == "interleaved1f1b" else 1)
    job = _JOB.replace("STAGES", str(stages)).replace("SCHEDULE", schedule)
    return run_script(folder, job + text, ranks, launcher, **env)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_stage_raises_ends_the_job_with_its_cause(launcher: str, where: str, tmp_path: Path) -> None:
    result = _run(tmp_path, _FAILS.replace("WHERE", repr(where)) + "train(1000)\n", launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert (
        f"rank 1 failed in {where} of micro-batch 3 in stage 1 of the Pipe: ValueError: the one cause" in result.output
    )
    assert "in fault" in result.output  # the traceback


@pytest.mark.parametrize(
    ("launcher", "schedule", "ranks"),
    [("mpi", "1f1b", 3), ("torchrun", "1f1b", 3), ("mpi", "gpipe", 3), ("mpi", "interleaved1f1b", 2)],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_stage_raises_all_ranks_do(launcher: str, schedule: str, ranks: int, where: str, tmp_path: Path) -> None:
    """Also where the script goes on; and the pipeline has ended for all."""
    text = _FAILS.replace("WHERE", repr(where)) + _CATCHES
    result = _run(tmp_path, text, launcher, schedule=schedule, ranks=ranks).check()
    cause = rf"failed in {where} of micro-batch 3 in stage 1 of the Pipe: ValueError: the one cause"
    for rank in range(ranks):
        told = re.findall(rf"rank {rank} was told after (\d+) s: (.*)", result.output)
        assert len(told) == 2, result.output
        assert int(told[0][0]) < 20
        if rank != 1:
            assert re.match(rf"RuntimeError: rank 1 {cause}", told[0][1]), result.output
        assert re.match(rf"RuntimeError: the Pipe has ended with an error: rank 1 {cause}; make another", told[1][1])
    assert result.output.count("the end of rank") == ranks


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_dies_in_a_stage_ends_the_job(launcher: str, tmp_path: Path) -> None:
    text = """
def fault(stage, micro_batch, where):
    if (stage, micro_batch, where) == (1, 3, "forward"):
        os.kill(os.getpid(), signal.SIGKILL)
train(1000)
"""
    result = _run(tmp_path, text, launcher)
    assert not result.timed_out
    assert result.returncode != 0
    said = {"mpi": r"process rank 1\b[^-]*signal 9", "torchrun": r"rank +: 1 .*\s+exitcode +: -9 "}
    assert re.search(said[launcher], result.output), f"who died, and of what, is not said:\n{result.output}"
    for noticed in re.findall(r"TransportError: (.*)", result.output):  # unless the launcher ends them before
        assert re.match(r"rank [02] of 3 lost the connection to (rank 1|another rank) while it waited for ", noticed)


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_stage_that_waits_is_named_with_its_micro_batch(launcher: str, tmp_path: Path) -> None:
    text = """
def fault(stage, micro_batch, where):
    if (stage, micro_batch, where) == (1, 3, "forward"):
        time.sleep(5)
train(1)
dear.shutdown()
print("the end", flush=True)
"""
    result = _run(tmp_path, text, launcher, DEAR_STALL_WARN_SECONDS="1").check()
    assert result.output.count("the end") == 3
    waits = {
        0: "backward's gradient of micro-batch 2 of stage 0, from stage 1 (rank 1)",
        2: "forward's input of micro-batch 3 of stage 2, from stage 1 (rank 1)",
    }
    for rank, what in waits.items():
        assert re.search(rf"rank {rank} has waited \d+ s for {re.escape(what)}\. All ranks:", result.output), (
            result.output
        )
        assert f"training; waiting in {what}" in result.output
    assert re.search(r"rank 1: .* training; no operation in flight\n(.*\n)*? .*in fault", result.output), result.output


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_rank_that_has_left_ends_the_job(launcher: str, tmp_path: Path) -> None:
    result = _run(tmp_path, "if rank == 1:\n    sys.exit(0)\ntrain(1000)\n", launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert re.search(r"rank\(s\) \[1\] on \S+ will not come; aborting the job", result.output), result.output
