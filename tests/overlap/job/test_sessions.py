"""One session after another in the same processes, also beside a process group that belongs to the script.

Only under torchrun: MPI cannot be started twice in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script

SCRIPT = """
import sys, torch, dear
from tests.threads import wait_for_no_thread_named
if sys.argv[1:] == ["beside"]:
    torch.distributed.init_process_group("gloo")
for session in range(3):
    dear.init()
    torch.manual_seed(session)
    model = torch.nn.Linear(4, 2)
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4) * dear.rank()).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    for parameter in model.parameters():
        assert torch.equal(*dear.allgather(parameter.detach()[None], name=f"{parameter.dim()}"))
    dear.shutdown()
if sys.argv[1:] == ["beside"]:
    found = torch.ones(1)
    torch.distributed.all_reduce(found)
    assert found == 2
    torch.distributed.destroy_process_group()
# What still runs of gloo when Python ends may abort the process. The script's first optimizer came after its group.
wait_for_no_thread_named("gloo")
print("the end")
"""


@pytest.mark.parametrize(
    ("more", "real_start"),  # only a real start shows an end that Python itself makes
    [(["beside"], False), *(pytest.param(more, True, marks=pytest.mark.full) for more in ([], ["beside"]))],
)
def test_sessions_follow_each_other(more: list[str], real_start: bool, tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT, 2, "torchrun", *more, timeout=400, real_start=real_start).check()
    assert result.output.count("the end") == 2
