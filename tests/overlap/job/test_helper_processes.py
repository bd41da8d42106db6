"""Helper processes that run the script's top level again, as DataLoader workers do that are spawned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script

SCRIPT = """
import torch, dear
from torch.utils.data import DataLoader, TensorDataset
{top}

def main():
    dear.init()
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, num_workers=1, multiprocessing_context="{method}")
    assert len([batch for batch in loader]) == 2
    print("the end", flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("torchrun", marks=pytest.mark.full)])
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.full)])
def test_init_at_the_top_of_a_script_is_refused_in_a_worker(method: str, launcher: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT.format(top="dear.init()", method=method), 2, launcher)
    assert not result.timed_out
    assert result.returncode != 0
    assert "under if __name__ == '__main__':" in result.output


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_workers_of_a_guarded_script_work(launcher: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT.format(top="", method="spawn"), 2, launcher).check()
    assert result.output.count("the end") == 2
