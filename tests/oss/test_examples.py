"""fairscale's scripts run under each launcher as they were written, and end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_ranks


@pytest.mark.parametrize("launcher", ["mp.spawn", "torchrun", "dearrun"])
@pytest.mark.parametrize("name", ["fairscale_oss", "fairscale_sharded_ddp"])
def test_it_learns(name: str, launcher: str) -> None:
    script = str(ROOT / "examples" / f"{name}.py")
    dearrun = ["-m", "dearrun", "-np", "2", sys.executable]
    how, ranks, argv = {
        "mp.spawn": ("single", 1, [script]),
        "torchrun": ("torchrun", 2, [script]),
        "dearrun": ("single", 1, [*dearrun, script]),
    }[launcher]
    result = run_ranks(ranks, argv, how, end_as_ever=True).check()
    for rank in (0, 1):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}: epoch \d: loss (\S+)", result.output)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
    assert result.output.count("nothing has reduced them") == (name == "fairscale_oss")


def test_a_spawned_process_without_a_group_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.multiprocessing as mp\n"
        "def train(rank):\n"
        "    import torch, oss\n"
        "    oss.OSS(torch.nn.Linear(2, 2).parameters())\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(train, nprocs=1)\n"
    )
    result = run_ranks(1, [str(script)], "single", env={"PYTHONPATH": str(ROOT)})
    assert "was spawned by another one: call torch.distributed.init_process_group()" in result.output
