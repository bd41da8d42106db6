"""Processes that come and go beside a group: workers of a DataLoader, children of a script, ranks that begin again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_ranks, run_script

# What one process learns from all rows, in the batches that the ranks have together.
TRAINING = """
import os, sys, torch, torch.distributed as dist
import dear.backend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("dear")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
alone, model = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
model.load_state_dict(alone.state_dict())
inner, model = model, DistributedDataParallel(model)

def learn(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

def same():
    return all(torch.allclose(*pair, atol=1e-6) for pair in zip(inner.parameters(), alone.parameters(), strict=True))
"""


def test_workers_that_load_data_are_forked_while_gradients_travel(tmp_path: Path) -> None:
    """In each epoch anew, with an operation on its way and a thread that completes futures."""
    text = f"""{TRAINING}
loader = DataLoader(
    data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2, multiprocessing_context="fork"
)
for epoch in range(3):
    large = torch.ones(1 << 20)
    work = dist.all_reduce(large, async_op=True)
    learn(model, loader)
    work.wait()
    assert torch.all(large == SIZE)
    learn(alone, DataLoader(data, batch_size=4 * SIZE))
assert same()
print("trained", flush=True)
dist.destroy_process_group()
"""
    result = run_script(tmp_path, text, 2, "torchrun", timeout=90).check()
    assert result.output.count("trained") == 2


@pytest.mark.full
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "dist.destroy_process_group(); sys.exit(0)"])
def test_a_forked_child_is_told_and_ends_no_group(end: str, tmp_path: Path) -> None:
    """While operations of its parent are on their way, in the default group and in another one."""
    text = f"""
import os, sys, torch, torch.distributed as dist
import dear.backend
dist.init_process_group("dear")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
group = dist.new_group()
dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
tensors = torch.ones(1 << 20), torch.ones(1 << 20)
works = [dist.all_reduce(tensor, group=which, async_op=True) for tensor, which in zip(tensors, (None, group))]
child = os.fork()
if child == 0:
    for call in (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.send(torch.ones(4), 1 - RANK), works[0].wait):
        try:
            call()
        except RuntimeError as error:
            print(f"told: {{error}}", flush=True)
    {end}
assert os.waitpid(child, 0)[1] == 0
for work, tensor in zip(works, tensors):
    work.wait()
    assert torch.all(tensor == SIZE)
for which in (None, group):
    total = torch.ones(4)
    dist.all_reduce(total, group=which)
    assert torch.all(total == SIZE)
print("went on", flush=True)
dist.destroy_process_group()
"""
    result = run_script(tmp_path, text, 2, "torchrun", real_start=True, timeout=90).check()
    assert len(re.findall("^told: .*forked child", result.output, re.MULTILINE)) == 2 * 3, result.output
    assert result.output.count("went on") == 2


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_train_on(tmp_path: Path) -> None:
    """One fails in the middle of a step; all begin again, from what was saved before."""
    text = f"""{TRAINING}
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
begin = 0
if os.path.exists("saved"):
    begin, state = torch.load("saved")
    inner.load_state_dict(state)
for step in range(begin, 8):
    rows = slice(8 * step + 4 * RANK, 8 * step + 4 * RANK + 4)
    learn(model, [data[rows]])
    if RANK == 0:
        torch.save((step + 1, inner.state_dict()), "saving")
        os.replace("saving", "saved")
    dist.barrier()
    if attempt == 0 and step == 4:
        if RANK == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(4))  # in which it is lost
learn(alone, [data[8 * step : 8 * step + 8] for step in range(8)])
assert same()
print(f"attempt {{attempt}} has trained from step {{begin}}", flush=True)
dist.destroy_process_group()
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    result = run_ranks(2, agent, "single", timeout=120, cwd=tmp_path).check()
    assert result.output.count("attempt 1 has trained from step 5") == 2, result.output
