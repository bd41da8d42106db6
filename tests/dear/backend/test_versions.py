"""A torch that the backend cannot run with is refused before anything hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from comm_core import Unsupported
from dear.backend.versions import is_supported, require_torch
from tests.harness import run_script


@pytest.mark.parametrize("version", ["2.7.0", "2.7.0a0+gitabc", "2.13.0+cpu", "2.15.0.dev20261101", "3.0"])
def test_versions_that_it_runs_with(version: str) -> None:
    assert is_supported(version)
    require_torch(version)


@pytest.mark.parametrize("version", ["2.4.0+cu121", "2.6.0", "1.13.1"])
def test_older_ones_are_refused_with_both_versions(version: str) -> None:
    assert not is_supported(version)
    with pytest.raises(Unsupported) as told:
        require_torch(version)
    assert version in str(told.value)
    assert "2.7" in str(told.value)


@pytest.mark.full
def test_every_rank_is_told_when_it_makes_its_first_group(tmp_path: Path) -> None:
    text = """
import torch, torch.distributed as dist
import dear.backend
torch.__version__ = "2.6.0"
try:
    dist.init_process_group("dear")
except RuntimeError as error:
    print(error, flush=True)
"""
    result = run_script(tmp_path, text, 2, "torchrun").check()
    assert result.output.count("takes torch 2.7 or newer, and this is 2.6.0") == 2, result.output
