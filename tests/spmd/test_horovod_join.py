"""Ranks that run out of data: what the others compute meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear as hvd
from overlap.job.session import current


def _batches() -> int:
    """Rank 0 has the fewest; every rank joins at another time."""
    return 1 + hvd.rank()


def _active(step: int) -> list[int]:
    return [rank for rank in range(hvd.size()) if rank >= step]


def test_sums_are_over_ranks_that_still_contribute_and_averages_divide_by_all() -> None:
    size = hvd.size()
    for step in range(_batches()):
        active = _active(step)
        mine = float(hvd.rank() + 1)
        values = [float(rank + 1) for rank in active]
        mean, total = sum(values) / size, sum(values)
        assert hvd.allreduce(torch.full((3,), mine), name=f"mean {step}").tolist() == pytest.approx([mean] * 3)
        assert hvd.allreduce(torch.full((2,), mine), op=hvd.Sum, name=f"sum {step}").tolist() == [total] * 2
        half = hvd.allreduce(torch.full((2,), 60000.0).half(), name=f"half {step}")
        assert half.tolist() == pytest.approx([60000.0 * len(active) / size] * 2, rel=1e-3)
        whole = hvd.allreduce(torch.full((2,), 10 * hvd.rank()), name=f"whole {step}")
        assert whole.tolist() == [int(10 * sum(active) / size)] * 2
        assert hvd.allreduce(torch.tensor([mine]), op=hvd.Min, name=f"min {step}").item() == min(values)
        assert hvd.allreduce(torch.tensor([-mine]), op=hvd.Max, name=f"max {step}").item() == max(-v for v in values)
        product = hvd.allreduce(torch.tensor([2]), op=hvd.Product, name=f"product {step}")
        assert product.item() == 2 ** len(active)
        first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(1).bfloat16()], op=hvd.Sum, name=f"g {step}")
        assert (first.tolist(), second.tolist()) == ([float(len(active))] * 2, [float(len(active))])
    assert hvd.join() == size - 1


def test_join_returns_the_last_rank_that_came() -> None:
    size = hvd.size()
    for last in (0, size - 1):
        if hvd.rank() == last and size > 1:
            # Done once all the others have joined: until then each of them would have to take part.
            hvd.allreduce(torch.ones(1), name="alone")
        joined = hvd.join()
        assert (type(joined), joined) == (int, last)


def _average_of_a_sparse_one() -> torch.Tensor:
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.full((1,), 6.0), (2,))
    return hvd.sparse_allreduce_async(sparse, "late", hvd.Average)()


NEED_EVERYBODY: dict[str, Callable[[], Any]] = {
    "allgather": lambda: hvd.allgather(torch.ones(2), name="late"),
    "grouped_allgather": lambda: hvd.grouped_allgather([torch.ones(2), torch.ones(1)], name="late"),
    "broadcast": lambda: hvd.broadcast(torch.ones(1), 0, name="late"),
    "broadcast_": lambda: hvd.broadcast_(torch.ones(1), 0, name="late"),
    "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size()), name="late"),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(hvd.size()), name="late"),
    "sparse_allreduce_async": _average_of_a_sparse_one,
    "allgather_object": lambda: hvd.allgather_object(1, name="late"),
    "broadcast_object": lambda: hvd.broadcast_object(1, name="late"),
}


def _works() -> None:
    """Every rank is there, and nothing is left of what has failed."""
    size = hvd.size()
    ranks = list(range(size))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.allgather(torch.tensor([hvd.rank()]), name="late").tolist() == ranks
    assert hvd.broadcast(torch.tensor([hvd.rank()]), size - 1, name="late").item() == size - 1
    assert hvd.alltoall(torch.tensor(ranks), name="late").tolist() == [hvd.rank()] * size
    assert hvd.reducescatter(torch.ones(size), op=hvd.Sum, name="late").tolist() == [size]


@pytest.mark.parametrize("kind", NEED_EVERYBODY)
def test_what_needs_every_rank_fails_and_leaves_nothing_behind(kind: str) -> None:
    size = hvd.size()
    if hvd.rank() == size - 1 and size > 1:
        assert hvd.join() in range(size)
    elif size > 1:
        # Until the last rank has joined this one matches nothing of it; after that it is not waited for.
        hvd.barrier()
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=f"after rank {size - 1} has joined"):
                NEED_EVERYBODY[kind]()
            assert hvd.allreduce(torch.ones(1), name="goes on").item() == pytest.approx((size - 1) / size)
        assert hvd.join() in range(size)
    _works()


def test_what_was_asked_for_before_joining_is_still_done() -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="before")
    assert hvd.join() in range(hvd.size())
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def test_join_drives_those_who_reduce_on_their_own() -> None:
    seen = []

    class Participant:
        def join(self) -> None:
            seen.append(hvd.allgather_object("here", name=f"driven {len(seen)}") if hvd.size() == 1 else "here")

        def forget(self, topic: str) -> None:
            raise AssertionError(f"{topic}: nothing is dropped here")

    participant = Participant()
    current().participants.append(participant)
    try:
        assert hvd.join() in range(hvd.size())
    finally:
        current().participants.remove(participant)
    assert len(seen) == 1
