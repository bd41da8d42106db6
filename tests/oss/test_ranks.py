"""The members of a process group, as torch's pretended backend has them, which sends nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from oss.ranks import ranks_of


@pytest.fixture
def _rank_6_of_8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("oss.ranks._wait_at_exit", lambda: None)  # this process has nothing to wait for
    dist.init_process_group("fake", rank=6, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_rank_6_of_8")
def test_members_are_numbered_from_0_whatever_their_ranks_in_the_job() -> None:
    ranks = ranks_of(dist.new_group([3, 6, 7]))
    assert (ranks.rank, ranks.size, ranks.members) == (1, 3, [3, 6, 7])
    for root in range(3):
        ranks.broadcast(torch.zeros(1), root).wait()  # torch raises for ranks that are not in the group
