"""``fully_shard`` with what it sends beside its computations: the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_script

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import dear.backend
from dear.backend import fully_shard as ours

kind = sys.argv[1]
dist.init_process_group("dear")
axes = {"replicate": 1, "shard": 2} if kind == "two axes" else {"shard": 2}
mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
begun = []
add = ours._Pending.add
ours._Pending.add = lambda self, work: (begun.append(work), add(self, work))

def train(hidden):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if kind == "cast" else None)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hidden:
        dear.backend.overlap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(4):
        for part in range(2 if kind == "added up" else 1):
            model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]

expected = train(False)
assert not begun
found = train(True)
assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
if dist.get_rank() == 0:
    print("hidden", len(begun), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.__version__ < "2.9", reason="needs torch 2.9")
@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("plain", 4 * 4),
        ("added up", 4 * 4),  # the first of two backward passes
        ("cast", 0),
        ("two axes", 0),
    ],
)
def test_results_are_those_of_torch(kind: str, hidden: int, tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT, 2, "torchrun", kind).check()
    assert f"hidden {hidden}\n" in result.output


def test_models_that_are_not_sharded_are_refused(tmp_path: Path) -> None:
    text = "import torch, dear.backend\ndear.backend.overlap(torch.nn.Linear(2, 2))"
    assert "fully_shard() was called on" in run_script(tmp_path, text, 1, "single").output
