"""Ranks that run out of data: what the others compute meanwhile."""

from __future__ import annotations

import pytest
import torch

import dear as hvd
from overlap.job.session import current


@pytest.fixture(autouse=True)
def _init() -> None:
    hvd.init()


def _batches() -> int:
    """Rank 0 has the fewest; every rank joins at another time."""
    return 1 + hvd.rank()


def _active(step: int) -> list[int]:
    return [rank for rank in range(hvd.size()) if rank >= step]


def test_sums_and_averages_are_over_ranks_that_still_contribute() -> None:
    for step in range(_batches()):
        active = _active(step)
        mine = float(hvd.rank() + 1)
        values = [float(rank + 1) for rank in active]
        mean, total = sum(values) / len(values), sum(values)
        assert hvd.allreduce(torch.full((3,), mine), name=f"mean {step}").tolist() == pytest.approx([mean] * 3)
        assert hvd.allreduce(torch.full((2,), mine), op=hvd.Sum, name=f"sum {step}").tolist() == [total] * 2
        half = hvd.allreduce(torch.full((2,), 60000.0).half(), name=f"half {step}")
        assert half.tolist() == pytest.approx([60000.0] * 2, rel=1e-3)
        whole = hvd.allreduce(torch.full((2,), 10 * hvd.rank()), name=f"whole {step}")
        assert whole.tolist() == [int(10 * sum(active) / len(active))] * 2
        assert hvd.allreduce(torch.tensor([mine]), op=hvd.Min, name=f"min {step}").item() == min(values)
        assert hvd.allreduce(torch.tensor([-mine]), op=hvd.Max, name=f"max {step}").item() == max(-v for v in values)
        product = hvd.allreduce(torch.tensor([2]), op=hvd.Product, name=f"product {step}")
        assert product.item() == 2 ** len(active)
        first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(1).bfloat16()], op=hvd.Sum, name=f"g {step}")
        assert (first.tolist(), second.tolist()) == ([float(len(active))] * 2, [float(len(active))])
    assert hvd.join() == hvd.size() - 1


def test_gathers_get_no_rows_barriers_do_not_wait_and_the_rest_fails() -> None:
    size = hvd.size()
    if hvd.rank() == size - 1 and size > 1:
        assert hvd.join() in range(size)
    else:
        if size > 1:
            # Until the last rank has joined this one matches nothing of it; after that it is not waited for.
            hvd.barrier()
            present = list(range(size - 1))
            assert hvd.allgather(torch.tensor([hvd.rank()]), name="late").tolist() == present
            assert hvd.allgather_object(hvd.rank(), name="late") == present
            # Of those that contribute the last has no row.
            rows = int(hvd.rank() < size - 2 or size == 2)
            sparse = torch.sparse_coo_tensor(torch.zeros(1, rows, dtype=torch.int64), torch.full((rows,), 6.0), (2,))
            mean = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense()
            assert mean.tolist() == [6.0 * max(size - 2, 1) / (size - 1), 0.0]
            for call in (
                lambda: hvd.broadcast(torch.ones(1), 0, name="late"),
                lambda: hvd.alltoall(torch.ones(size), name="late"),
                lambda: hvd.reducescatter(torch.ones(size), name="late"),
                lambda: hvd.broadcast_object(1, name="late"),
            ):
                with pytest.raises(hvd.HorovodInternalError, match=f"after rank {size - 1} has joined"):
                    call()
        assert hvd.join() in range(size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # everybody is back
    assert hvd.broadcast(torch.tensor([hvd.rank()]), 0).item() == 0


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
