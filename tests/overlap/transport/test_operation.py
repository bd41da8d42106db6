"""Operations as they travel: what is refused, and the counts and memory of what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import comm_core
from comm_core import InvalidUsage, ReduceOp, Unsupported
from overlap.transport.checks import checked
from overlap.transport.cuda.communicator import DeviceCommunicator
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import (
    NOTHING,
    Collective,
    Operation,
    Wide,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from overlap.transport.torch.gloo import GlooCommunicator

FLOATS, HALVES, SINGLES = torch.zeros(6), torch.zeros(6, dtype=torch.float16), torch.zeros(6)


def test_counts_are_those_of_the_wire_and_filled_in() -> None:
    balanced = checked(reduce_scatter(torch.zeros(5), torch.zeros(2)), 1, 3)
    assert (balanced.send_counts, balanced.recv_counts) == ([2, 2, 1], [2])
    pairs = checked(all_gather(torch.zeros(1, dtype=torch.cfloat), torch.zeros(3, dtype=torch.cfloat)), 0, 3)
    assert (pairs.send_counts, pairs.recv_counts, pairs.send.dtype) == ([2], [2, 2, 2], torch.float32)
    given = checked(all_to_all(torch.zeros(3), FLOATS, send_counts=[1, 2], recv_counts=[4, 2]), 1, 2)
    assert (given.send_counts, given.recv_counts) == ([1, 2], [4, 2])
    assert checked(all_to_all(FLOATS, torch.zeros(6)), 0, 3).send_counts == [2, 2, 2]
    assert (given.nbytes, pairs.nbytes, balanced.nbytes, barrier().nbytes) == (12, 24, 20, 0)


def test_memory_is_the_callers_and_flat() -> None:
    square = torch.zeros(2, 3)
    sent = checked(broadcast(square, 1), 0, 2)
    assert sent.send is sent.recv
    assert sent.recv.data_ptr() == square.data_ptr()
    assert sent.recv.shape == (6,)
    # A broadcast looks at what it overwrites alone: `send` may be a part of it.
    assert checked(Operation(Collective.BROADCAST, FLOATS[:2], FLOATS), 0, 2).send.numel() == 6


def test_a_reduction_to_one_rank_gives_the_others_nothing() -> None:
    for into in (None, torch.zeros(1)):
        assert checked(reduce(FLOATS, into, root=1), 0, 2).recv is NOTHING
    with pytest.raises(InvalidUsage, match="reduce: rank 1 needs a recv tensor, got None"):
        checked(reduce(FLOATS, None, root=1), 1, 2)


REFUSED = {
    "all_reduce: recv has 5 elements, expected 6": all_reduce(FLOATS, torch.zeros(5)),
    "all_reduce: recv .bytes 4 to 24. overlaps send .bytes 0 to 20": all_reduce(FLOATS[:5], FLOATS[1:]),
    "all_reduce: send has dtype torch.float32 and recv has dtype torch.float16": all_reduce(FLOATS, HALVES),
    "all_reduce: op must be a comm_core.ReduceOp, got 'sum'": all_reduce(FLOATS, FLOATS, "sum"),  # type: ignore[arg-type]
    "reduce_scatter: recv .* overlaps send": reduce_scatter(FLOATS, FLOATS[:3]),
    "reduce_scatter: counts add up to 5 elements, the buffer has 6": reduce_scatter(
        FLOATS, torch.zeros(3), counts=[3, 2]
    ),
    "reduce_scatter: recv of rank 0 has 2 elements, expected 3": reduce_scatter(FLOATS, torch.zeros(2)),
    "all_gather: send overlaps recv but is not rank 0's own part of it": all_gather(FLOATS[3:], FLOATS),
    "all_gather: send of rank 0 has 2 elements, expected 3": all_gather(torch.zeros(2), FLOATS),
    "all_to_all: send has 5 elements, which do not divide by 2 ranks": all_to_all(torch.zeros(5), FLOATS),
    "all_to_all: what rank 0 receives from itself has 1 elements, expected 2": all_to_all(
        torch.zeros(3), FLOATS, send_counts=[2, 1], recv_counts=[1, 5]
    ),
    "broadcast: root 2 is not a rank of a group of 2": broadcast(FLOATS, 2),
    "reduce_scatter: wide send shares memory with wide recv": reduce_scatter(
        HALVES, torch.zeros(3, dtype=torch.float16), wide=Wide(SINGLES, SINGLES[:3])
    ),
    "reduce_scatter: wide recv has 2 elements, expected 3": reduce_scatter(
        HALVES, torch.zeros(3, dtype=torch.float16), wide=Wide(SINGLES, torch.zeros(2))
    ),
    "all_gather: wide send is torch.float32 and send is torch.float32": all_gather(
        FLOATS[:3], FLOATS, wide=Wide(torch.zeros(3), torch.zeros(6))
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_travel_is_refused(why: str) -> None:
    with pytest.raises(InvalidUsage, match=why):
        checked(REFUSED[why], 0, 2)


def test_one_tensor_cannot_be_both_wide_ones() -> None:
    alone = all_gather(torch.zeros_like(HALVES), torch.zeros_like(HALVES), wide=Wide(SINGLES, SINGLES))
    with pytest.raises(InvalidUsage, match="wide send shares memory with wide recv"):
        checked(alone, 0, 1)


@pytest.mark.parametrize(
    "operation", [all_reduce(HALVES, HALVES), broadcast(HALVES), barrier()], ids=lambda one: one.kind.value
)
def test_a_kind_that_does_not_round_refuses_wide_tensors(operation: Operation) -> None:
    wide = Wide(torch.zeros(6), torch.zeros(6))
    with pytest.raises(Unsupported, match=f"{operation.kind.value}: takes no wide tensors"):
        checked(Operation(operation.kind, operation.send, operation.recv, wide=wide), 0, 1)


def test_every_kind_is_issued_as_often_as_its_start_is_called() -> None:
    comm = NativeCommunicator(comm_core.local())
    for operation in (
        reduce_scatter(FLOATS, torch.zeros(6), label="a"),
        all_gather(FLOATS, torch.zeros(6), label="a"),
        all_reduce(FLOATS, FLOATS, ReduceOp.MAX, label="a"),
        broadcast(FLOATS, label="a"),
        reduce(FLOATS, FLOATS, label="a"),
        all_to_all(FLOATS, torch.zeros(6), label="a"),
        barrier(label="a"),
    ):
        start, before = comm.prepare(operation), comm.issued
        for _ in range(2):
            work = start()
            work.wait()
            assert (work.op, work.label, work.nbytes) == (operation.kind.value, "a", operation.nbytes)
        assert comm.issued == before + 2
    comm.close()


def test_groups_of_ranks_need_transports_of_ones_own() -> None:
    alone = NativeCommunicator(comm_core.local())
    streams: Any = SimpleNamespace(kind="cuda", device=0)
    carrier: Any = SimpleNamespace(through_host=True)
    for comm in (GlooCommunicator(cast(Any, None), 0, 1), DeviceCommunicator(alone, carrier, streams)):
        for kind, make in (("two_level", comm.two_level), ("hybrid", comm.hybrid)):
            with pytest.raises(Unsupported, match=f"{kind}: communicator .* has no groups of ranks"):
                make([[0]])


def test_a_device_has_the_shards_of_its_host() -> None:
    host: Any = SimpleNamespace(rank=3, size=4, shard_rank=1, shard_size=2, backend="tcp", name="world/0:hybrid")
    streams: Any = SimpleNamespace(kind="cuda", device=0)
    carrier: Any = SimpleNamespace(through_host=True)
    comm = DeviceCommunicator(host, carrier, streams)
    assert comm.place_of(reduce_scatter(FLOATS, FLOATS)) == (1, 2)
    assert comm.place_of(all_gather(FLOATS, FLOATS)) == (1, 2)
    assert comm.place_of(all_reduce(FLOATS, FLOATS)) == (3, 4)
