"""dear's Accelerator beside the library's own under DDP, and beside one process that has the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.integrations.jobs import compare

ALONE = ("accumulated", "adversaries", "shared", "dispatched", "scaled")
SHARDED = tuple(f"fsdp {name}" for name in (*ALONE, "resumed"))


@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_scripts_come_to_what_the_librarys_own_ddp_does(launcher: str, tmp_path: Path) -> None:
    compare(
        "accelerate_job", launcher, tmp_path, *ALONE, "bf16", "resumed", "fsdp accumulated", "fsdp shared", "mistakes"
    )


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_and_to_what_one_process_does_which_continues_them_and_is_continued(launcher: str, tmp_path: Path) -> None:
    compare("accelerate_job", launcher, tmp_path, *ALONE, "resumed", *SHARDED, "fsdp bf16")
    compare("accelerate_job", "single", tmp_path, *ALONE, "resumed", *SHARDED, "mistakes")
    compare("accelerate_job", launcher, tmp_path, "resumed", "fsdp resumed")


def test_dear_alone_imports_no_library() -> None:
    script = (
        "import dear, sys; found = {'accelerate', 'transformers', 'peft'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)
