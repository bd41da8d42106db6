"""Operations of which ranks mean different ones: each rank is told both, and no memory is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import comm_core
import dear
from overlap.job.session import current
from overlap.transport.communicator import Communicator, ReduceOp
from overlap.transport.operation import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce, reduce_scatter

Call = Callable[[Communicator, torch.Tensor], None]
#: What ranks of odd and of even number call, on tensors of ones, and how both are called where that is not by MPI's names.
MEETINGS: dict[str, tuple[Call, str, Call, str]] = {
    "kinds": (
        lambda c, x: c.run(all_reduce(x, x)),
        "all_reduce of float32",
        lambda c, x: c.run(broadcast(x)),
        "broadcast of float32",
    ),
    "a broadcast and what agrees on objects": (
        lambda c, x: c.run(reduce_scatter(x, x.new_ones(x.numel() // c.size))),
        "reduce_scatter of float32",
        lambda c, x: c.run(all_gather(x[: x.numel() // c.size].clone(), x)),
        "all_gather of float32",
    ),
    "types": (
        lambda c, x: c.run(all_reduce(x, x)),
        "all_reduce of float32",
        lambda c, x: c.run(all_reduce(x.view(torch.int32), x.view(torch.int32))),
        "all_reduce of int32",
    ),
    "reductions": (
        lambda c, x: c.run(all_reduce(x, x, ReduceOp.MAX)),
        "op max",
        lambda c, x: c.run(all_reduce(x, x, ReduceOp.MIN)),
        "op min",
    ),
    "roots": (lambda c, x: c.run(broadcast(x, 0)), "root 0", lambda c, x: c.run(broadcast(x, 1)), "root 1"),
    "nothing and something": (
        lambda c, x: c.run(barrier()),
        "barrier",
        lambda c, x: c.run(all_reduce(x, x)),
        "all_reduce",
    ),
}


def _then_all_reduce(call: Call, comm: Communicator, x: torch.Tensor) -> None:
    """Who only sends hears of it by the next operation."""
    call(comm, x)
    comm.run(barrier())


@pytest.mark.parametrize("numel", [12, 120_000])
@pytest.mark.parametrize("meeting", MEETINGS)
def test_ranks_that_mean_different_operations_are_told_both(meeting: str, numel: int) -> None:
    if dear.size() == 1:
        pytest.skip("one rank meets nobody")
    comm = current().control.split(0)
    assert comm is not None
    odd, odd_name, even, even_name = MEETINGS[meeting]
    here, there = (odd_name, even_name) if dear.rank() % 2 else (even_name, odd_name)
    x = torch.ones(numel)
    both = f"{here}.* received .*{there}|{there}.* received .*{here}"  # another rank may have noticed it first
    with pytest.raises(comm_core.TransportError, match=f"expected .*({both})|expected .*barrier"):
        _then_all_reduce(odd if dear.rank() % 2 else even, comm, x)
    dear.barrier()
    comm.abandon()
    comm.close()


def test_a_rank_that_is_late_meets_nobody_else() -> None:
    """The others have asked by then, and go on."""
    comm = current().control.split(0)
    assert comm is not None
    late = dear.rank() == dear.size() - 1
    work = None if late else comm.start(all_reduce(torch.ones(3), torch.ones(3)))
    if work is not None:
        with pytest.raises(comm_core.TimeoutError):
            work.wait(0.3)
    dear.barrier()
    if late:
        work = comm.start(all_reduce(torch.ones(3), torch.ones(3)))
    assert work is not None
    work.wait()
    comm.close()


AFTER = "the communicator has failed before, so this operation was not begun; its first failure: .*"
LATER: dict[str, Call] = {
    "all_reduce": lambda c, x: c.run(all_reduce(x, x)),
    "broadcast": lambda c, x: c.run(broadcast(x)),
    "reduce": lambda c, x: c.run(reduce(x, x if c.rank == 0 else None)),
    "all_to_all": lambda c, x: c.run(all_to_all(x, torch.empty_like(x))),
    "barrier": lambda c, _: c.run(barrier()),
    "split": lambda c, _: c.split(0),
}


def test_a_communicator_that_has_failed_carries_nothing_more() -> None:
    """Ranks are out of step from there on: what they issue later may meet anything."""
    if dear.size() == 1:
        pytest.skip("one rank meets nobody")
    comm = current().control.split(0)
    assert comm is not None
    with pytest.raises(comm_core.TransportError, match="all_reduce 'odd'") as first:
        comm.start(all_reduce(*(torch.ones(3 + dear.rank()) for _ in range(2)), label="odd")).wait()
    assert "has failed before" not in str(first.value)
    x = torch.arange(4.0 * dear.size())
    for name, call in LATER.items():
        with pytest.raises(comm_core.TransportError, match=f"{AFTER}all_reduce 'odd'") as later:
            call(comm, x)
        assert str(first.value) in str(later.value), name
    assert x.equal(torch.arange(4.0 * dear.size()))
    dear.barrier()
    comm.abandon()
    comm.close()


def test_a_rank_whose_own_part_went_well_hears_of_a_failure() -> None:
    """The root of a broadcast receives nothing. It would wait for ever in the next operation, which others do not begin."""
    if dear.size() == 1:
        pytest.skip("one rank meets nobody")
    comm = current().control.split(0)
    assert comm is not None

    def odd_broadcast(c: Communicator, x: torch.Tensor) -> None:
        c.run(broadcast(x if c.rank == 0 else torch.ones(4)))

    with pytest.raises(comm_core.TransportError, match=r"disagree about the order or the sizes|root 0, \d+ bytes"):
        _then_all_reduce(odd_broadcast, comm, torch.ones(3))
    with pytest.raises(comm_core.TransportError, match=AFTER):
        comm.run(barrier())
    dear.barrier()
    comm.abandon()
    comm.close()


def test_what_is_refused_before_anything_is_sent_fails_nothing() -> None:
    comm = current().control.split(0)
    assert comm is not None
    with pytest.raises(comm_core.InvalidUsage, match="recv has 4 elements, expected 3"):
        comm.run(all_reduce(torch.ones(3), torch.ones(4)))
    x = torch.ones(3)
    comm.run(all_reduce(x, x))
    assert bool((x == dear.size()).all())
    comm.close()
