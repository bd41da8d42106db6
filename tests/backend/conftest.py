"""Every test of this suite has the default group of all ranks, over the backend that is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backend.world import init, register


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    register()
    init()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same on all ranks."""
    shared = [str(tmp_path)]
    dist.broadcast_object_list(shared, 0)
    return Path(shared[0])
