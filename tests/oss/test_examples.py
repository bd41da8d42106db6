"""fairscale's scripts run under each launcher as they were written, and end."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_ranks, run_script

_LOSS = re.compile(r"rank \d: epoch \d: loss \d\.\d+")  # ranks that write without a buffer share lines


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
    result = run_ranks(ranks, argv, how).check()
    for rank in (0, 1):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}: epoch \d: loss (\d\.\d+)", result.output)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
    assert result.output.count("nothing has reduced them") == (name == "fairscale_oss")


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("fairscale") is None, reason="needs fairscale")
@pytest.mark.parametrize("name", ["fairscale_oss", "fairscale_sharded_ddp"])
def test_fairscale_itself_has_the_same_losses(name: str, tmp_path: Path) -> None:
    # gloo's threads let go of the last tensors a moment later, and abort a process that ends meanwhile. Ours waits.
    waits = "\nimport atexit, time\natexit.register(time.sleep, 0.5)\n"
    (tmp_path / "fairscale_job.py").write_text((ROOT / "examples" / "fairscale_job.py").read_text() + waits)
    theirs = tmp_path / f"{name}.py"
    text = (ROOT / "examples" / f"{name}.py").read_text()
    text = text.replace("from oss import OSS\n", "from fairscale.optim.oss import OSS\n")
    theirs.write_text(text.replace("from oss import Sharded", "from fairscale.nn.data_parallel import Sharded"))
    assert "from oss" not in theirs.read_text()
    ours, found = (
        run_ranks(1, [str(script)], "single").check().output for script in (ROOT / "examples" / f"{name}.py", theirs)
    )
    losses = sorted(_LOSS.findall(ours))
    assert len(losses) == 6
    assert sorted(_LOSS.findall(found)) == losses


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_benchmark_measures_three_methods_that_learn_the_same() -> None:
    script = str(ROOT / "examples" / "oss_benchmark.py")
    options = ["--width", "4", "--steps", "2", "--batch-size", "4"]
    output = run_ranks(1, [script, *options], "single").check().output
    found = re.findall(r"^(\w+) +(\S+) images/s +(\S+) MB peak +loss (\S+)$", output, re.MULTILINE)
    assert [method for method, *_ in found] == ["vanilla", "oss_ddp", "oss_sharded_ddp"]
    assert all(float(images) > 0 and float(memory) > 0 for _, images, memory, _ in found)
    assert len({loss for *_, loss in found}) == 1


def test_a_spawned_process_without_a_group_is_told_so(tmp_path: Path) -> None:
    text = """
import torch.multiprocessing as mp
def train(rank):
    import torch, oss
    oss.OSS(torch.nn.Linear(2, 2).parameters())
if __name__ == '__main__':
    mp.spawn(train, nprocs=1)
"""
    result = run_script(tmp_path, text, 1, "single")
    assert "was spawned by another one: call torch.distributed.init_process_group()" in result.output
