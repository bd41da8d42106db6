"""Groups over several backends in one job, so that methods over either run in turn."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_script

IMPORTS = """
import torch, torch.distributed as dist
from bench.methods import process_group
from bench.methods.registry import method
CPU = torch.device("cpu")
"""


def test_methods_over_two_backends_train_in_turn(tmp_path: Path) -> None:
    text = """
methods = [method(spec) for spec in ("ddp:backend=dear", "ddp", "fsdp2:backend=dear", "fsdp2", "ddp-zero:backend=dear")]
places = [one.join(CPU) for one in methods]
trained = []
for one in methods:
    torch.manual_seed(1)
    model, optimizer = one.distribute(torch.nn.Linear(4, 4), (torch.optim.SGD, {"lr": 0.1}))
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
    weight = next(model.parameters()).detach()
    trained.append(weight.full_tensor() if hasattr(weight, "full_tensor") else weight)
assert all(torch.allclose(one, trained[0]) for one in trained[1:])
groups = {process_group.group(CPU, name) for name in (None, "gloo", "dear")}
if dist.get_rank() == 0:
    print("backends", sorted(dist.get_backend(group) for group in groups), flush=True)
for one in reversed(methods):
    one.leave()
assert not dist.is_initialized()
"""
    result = run_script(tmp_path, IMPORTS + text, 2, "torchrun").check()
    assert "backends ['dear', 'gloo']" in result.output


def test_ranks_lie_in_rows_and_columns(tmp_path: Path) -> None:
    text = """
process_group.join(CPU)
column, row = process_group.grid(CPU, None, 2)
rank = dist.get_rank()
assert dist.get_process_group_ranks(column) == [rank % 2, rank % 2 + 2]
assert dist.get_process_group_ranks(row) == [rank // 2 * 2, rank // 2 * 2 + 1]
mesh = process_group.mesh(CPU, None, 2)
assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("replicate", "shard"), [[0, 1], [2, 3]])
assert process_group.mesh(CPU).mesh.tolist() == [0, 1, 2, 3]
try:
    process_group.mesh(CPU, None, 3)
except ValueError as error:
    if rank == 0:
        print("refused:", error, flush=True)
process_group.leave()
"""
    result = run_script(tmp_path, IMPORTS + text, 4, "torchrun").check()
    assert "refused: 4 ranks do not lie in 3 rows of one length" in result.output
