"""Ray Train starts workers that have initialised torch.distributed; the example trains in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT, run_script

SCRIPT = """
import runpy, sys
import ray
for _ in range(5):  # Ray gives its own daemons 30 s to start, which on a busy machine is little
    try:
        ray.init(num_cpus=2, include_dashboard=False)
        break
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
sys.argv = ["ray_train.py", "--workers", "2", "--epochs", "2", "--storage", sys.argv[1]]
runpy.run_path(r"EXAMPLE", run_name="__main__")
assert not ray.is_initialized()
print("the end", flush=True)
"""


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_the_example_trains_in_two_workers(tmp_path: Path) -> None:
    text = SCRIPT.replace("EXAMPLE", str(ROOT / "examples" / "ray_train.py"))
    environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "900"}
    storage = str(tmp_path / "storage")
    result = run_script(tmp_path, text, 1, "single", storage, timeout=900, real_start=True, **environ).check()
    assert "the end" in result.output
    found = re.search(r"^(\S+): \{'epoch': 1, 'loss': (\S+), 'workers': 2\}$", result.output, re.MULTILINE)
    assert found is not None, result.output
    assert float(found[2]) < 1
    assert set(torch.load(Path(found[1]) / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
