"""torchmetrics, pytorch-ignite, TensorBoard, W&B and averaged models beside dear: one job under each launcher."""

from __future__ import annotations

import pytest

from tests.integrations.jobs import in_ranks


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_libraries_beside_dear(launcher: str) -> None:
    in_ranks(["ecosystem_ranks.py"], launcher)
