"""Whatever is issued over whichever groups, in an order that all ranks share, comes to its end with the right result."""

from __future__ import annotations

import pytest

from comm_core import Communicator
from tests.comm_core.random_groups import play


@pytest.mark.parametrize("seed", range(3))
def test_random_collectives_over_groups_that_share_ranks(comm: Communicator, seed: int) -> None:
    play(comm, seed)
