"""DearTrainer beside the library's own Trainer under DDP, and beside one process that has the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import ROOT, run_ranks
from tests.integrations.jobs import compare

#: A few that have most in them, for every run.
FEW = ("accumulated", "lengths", "best")
#: One process weighs tokens, generates, and rounds in bf16 and Adafactor's fp32, otherwise than ranks do. DDP does as dear.
NOT_ALONE = ("tokens of each rank", "generated", "bf16", "adafactor")
ALONE = ("iterated", "checkpointed", "lora", "module", "resumed", "own trainer", "llama")
STRATEGIES = ("wfbp", "mgwfbp", "bytescheduler", "layer by layer")
SHARDED = tuple(f"fsdp {name}" for name in (*FEW, *ALONE))
SHARDED_NOT_ALONE = tuple(f"fsdp {name}" for name in NOT_ALONE)


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_losses_norms_and_parameters_are_those_of_the_librarys_own_ddp(launcher: str, tmp_path: Path) -> None:
    compare("trainer_job", launcher, tmp_path, *FEW, "fsdp best", "mistakes")


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_so_are_all_others_and_those_of_one_process(launcher: str, tmp_path: Path) -> None:
    compare("trainer_job", launcher, tmp_path, *FEW, *NOT_ALONE, *ALONE, *STRATEGIES)
    compare("trainer_job", launcher, tmp_path, *SHARDED, *SHARDED_NOT_ALONE)
    compare("trainer_job", "single", tmp_path, *FEW, *ALONE, "layer by layer")


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_two_ranks_one_plain_process_and_two_ranks_continue_each_other(launcher: str, tmp_path: Path) -> None:
    for started, stage in ((launcher, "begun"), ("single", "alone"), (launcher, "ended")):
        argv = ["-m", "tests.integrations.resumed_trainer_job", str(tmp_path), stage]
        ranks = 1 if started == "single" else 2
        result = run_ranks(ranks, argv, started, timeout=400, cwd=ROOT).check()
        assert result.output.count(f"{stage}: done") == ranks
