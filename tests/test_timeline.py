"""Timelines of jobs that end badly."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness import run_ranks

SCRIPT = """
import os, signal
from pathlib import Path
import torch
import dear
dear.init()
model = torch.nn.Linear(4, 8)
optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
while True:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if dear.rank() == dear.size() - 1:
        written = [Path(f"{FOLDER}/{rank}.json").read_text() for rank in range(dear.size())]
        if all('"name":"step"' in events for events in written):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_leaves_complete_timelines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"FOLDER = {str(tmp_path)!r}\n{SCRIPT}")
    env = {"HOROVOD_TIMELINE": f"{tmp_path}/{{rank}}.json"}
    result = run_ranks(2, [str(script)], timeout=60, env=env)
    assert not result.timed_out
    assert result.returncode != 0
    for rank in (0, 1):
        events = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {"forward", "backward", "step"} <= {event["name"] for event in events}
