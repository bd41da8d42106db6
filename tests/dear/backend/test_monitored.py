"""A barrier that tells who is missing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from comm_core import TransportError
from dear.backend.monitored import monitored_barrier


def _told(present: Sequence[int], size: int, wait_all_ranks: bool) -> dict[int, str]:
    """What each of those ranks raises; empty: nothing."""
    store, found = dist.HashStore(), {}

    def come(rank: int) -> None:
        try:
            monitored_barrier(store, rank, size, 5.0 if len(present) == size else 0.2, "group", wait_all_ranks)
            found[rank] = ""
        except TransportError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_come() -> None:
    assert _told([0, 1, 2], 3, False) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(("all_ranks", "named"), [(False, "rank(s) 1 of 4"), (True, "rank(s) 1, 3 of 4")])
def test_every_rank_hears_who_has_not_come(all_ranks: bool, named: str) -> None:
    found = _told([0, 2], 4, all_ranks)
    assert set(found) == {0, 2}
    assert all(named in text for text in found.values())
