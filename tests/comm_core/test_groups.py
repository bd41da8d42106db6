"""Sub-groups, overlapping ones included, and the mailbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import comm_core
from comm_core import Communicator, ReduceOp


def test_split_by_color_and_key(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part is not None
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert (part.rank, part.size, part.backend) == (members.index(comm.rank), len(members), comm.backend)
    data = np.array([comm.rank], np.int64)
    everybody = np.zeros(len(members), np.int64)
    part.all_gather(data, everybody)
    assert list(everybody) == members
    again = part.split(0)
    assert again is not None
    assert again.size == part.size
    again.close()
    part.close()


def test_ranks_without_a_color_get_nothing(comm: Communicator) -> None:
    part = comm.split(5 if comm.rank == 0 else None)
    if comm.rank == 0:
        assert part is not None
        assert part.size == 1
        part.barrier()
        part.close()
    else:
        assert part is None


def test_overlapping_groups_work_at_the_same_time(comm: Communicator) -> None:
    low = comm.split(0 if comm.rank <= comm.size // 2 else None)
    high = comm.split(0 if comm.rank >= comm.size // 2 else None)
    groups = [g for g in (low, high) if g is not None]
    arrays = [[np.full(100_000, 1.0) for _ in range(3)] for _ in groups]
    works = [g.all_reduce_async(a, a) for g, many in zip(groups, arrays, strict=True) for a in many]
    for work in works:
        work.wait(30)
    for group, many in zip(groups, arrays, strict=True):
        assert all(a[0] == a[-1] == group.size for a in many)
        group.close()


def test_a_part_waits_for_no_other_rank(comm: Communicator) -> None:
    """Its ranks may come to it at any time, and in an order of their own."""
    if comm.backend == "mpi":
        with pytest.raises(comm_core.Unsupported, match="split"):
            comm.part(range(comm.size), "all")
        return
    ranks = list(reversed(range(comm.size)))
    time.sleep(0.1 * (comm.rank == 0))  # others send before this one has the part
    part = comm.part(ranks, "turned")
    assert (part.rank, part.size, part.backend) == (ranks.index(comm.rank), comm.size, comm.backend)
    assert part.name == f"{comm.name}/turned"
    everybody = np.zeros(comm.size, np.int64)
    part.all_gather(np.array([comm.rank], np.int64), everybody)
    assert list(everybody) == ranks
    alone = part.part([part.rank], f"alone-{comm.rank}")
    alone.barrier()
    for one in (alone, part):
        one.close()
    last = comm.size - 1
    if comm.rank == last:  # nobody else does anything for it
        comm.part([last], "last").close()


def test_parts_of_the_same_ranks_are_apart(comm: Communicator) -> None:
    if comm.backend == "mpi":
        pytest.skip("MPI makes no parts")
    first, second = (comm.part(range(comm.size), name) for name in ("first", "second"))
    arrays = {first: np.full(50_000, 1.0), second: np.full(50_000, 10.0)}
    order = [first, second] if comm.rank % 2 else [second, first]
    works = [part.all_reduce_async(arrays[part], arrays[part]) for part in order]
    for work in works:
        work.wait(30)
    assert (arrays[first][0], arrays[second][-1]) == (comm.size, 10.0 * comm.size)
    first.abandon()
    data = np.ones(3)
    second.all_reduce(data, data)  # what ends one is nothing to the other
    assert list(data) == [comm.size] * 3
    for part in (first, second):
        part.close()


@pytest.mark.parametrize(("ranks", "why"), [([0, 0], "twice"), ([99], "not a rank"), ([], "this one")])
def test_ranks_of_a_part_that_cannot_be(comm: Communicator, ranks: list[int], why: str) -> None:
    with pytest.raises(comm_core.InvalidUsage, match=why):
        comm.part(ranks, "wrong")


def test_a_split_waits_for_what_was_issued_before(comm: Communicator) -> None:
    data = np.ones(500_000)
    work = comm.all_reduce_async(data, data)
    part = comm.split(0)
    assert work.done()
    assert part is not None
    part.close()


def test_two_communicators_are_split_at_once(comm: Communicator) -> None:
    """Each on a thread of its own, so that ranks may come to the two in different orders."""
    parts = [comm.split(0), comm.split(comm.rank // 2, key=-comm.rank)]
    done = [0, 0]

    def split_often(which: int) -> None:
        part = parts[which]
        assert part is not None
        for _ in range(150):
            again = part.split(0)
            assert again is not None
            again.close()
            done[which] += 1

    threads = [threading.Thread(target=split_often, args=(which,), daemon=True) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [150, 150]
    for part in parts:
        assert part is not None
        part.close()


def test_communicators_are_connected_and_split_at_once(comm: Communicator) -> None:
    """As above: nor do ranks wait for each other where one is about to connect and another to split."""
    if comm.backend != "mpi":
        return
    part = comm.split(0)
    assert part is not None
    done = [0, 0]

    def often(which: int, make: Callable[[], Communicator | None]) -> None:
        for _ in range(150):
            made = make()
            assert made is not None
            made.close()
            done[which] += 1

    calls = ((0, lambda: part.split(0)), (1, comm_core.mpi))
    threads = [threading.Thread(target=often, args=call, daemon=True) for call in calls[:: 1 - 2 * (comm.rank % 2)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [150, 150]
    part.close()


def test_letters_reach_idle_peers(comm: Communicator) -> None:
    everybody = range(comm.size)
    sizes = (0, 1, 4000, 4088, 4089, 70_000, 3_000_000)
    works = [comm.post(peer, bytes([comm.rank]) * size) for size in sizes for peer in everybody]
    received: dict[int, list[int]] = {peer: [] for peer in everybody}
    for _ in range(len(sizes) * comm.size):
        letter = comm.receive_post(20)
        assert letter is not None
        source, payload = letter
        assert payload == bytes([source]) * len(payload)
        received[source].append(len(payload))
    assert all(tuple(got) == sizes for got in received.values()), "letters of one sender keep their order"
    for work in works:
        work.wait(10)
    assert comm.receive_post(0) is None


def test_letters_pass_while_collectives_run(comm: Communicator) -> None:
    data = np.ones(2_000_000, np.float32)
    works = [comm.all_reduce_async(data, data) for _ in range(3)]
    comm.post((comm.rank + 1) % comm.size, b"hello")
    letter = comm.receive_post(20)
    assert letter is not None
    assert letter == ((comm.rank - 1) % comm.size, b"hello")
    for work in works:
        work.wait(30)


def test_receive_post_waits_and_gives_up(comm: Communicator) -> None:
    began = time.monotonic()
    assert comm.receive_post(0.2) is None
    assert 0.15 < time.monotonic() - began < 5
    got: list[tuple[int, bytes] | None] = []
    thread = threading.Thread(target=lambda: got.append(comm.receive_post(20)))
    thread.start()
    time.sleep(0.1)
    comm.post(comm.rank, b"to myself")
    thread.join(20)
    assert got == [(comm.rank, b"to myself")]


def test_whoever_waits_for_letters_hears_of_the_end(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    errors: list[Exception] = []

    def wait() -> None:
        try:
            part.receive_post(60)
        except comm_core.InvalidUsage as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    part.close()
    thread.join(20)
    assert "closed" in str(errors)


def test_a_message_of_the_wrong_size_fails_both_truthfully(comm: Communicator) -> None:
    """A group that saw a mismatch is not usable any more; others are."""
    part = comm.split(comm.rank)  # alone, so that the failure stays in this process
    assert part is not None
    into = np.zeros(5)
    receive = part.recv_async(into, 0, label="short")
    part.send_async(np.ones(3), 0)
    with pytest.raises(comm_core.TransportError, match=r"recv 'short'.*24 bytes.*40"):
        receive.wait(10)
    assert isinstance(receive.exception(), comm_core.TransportError)
    part.close()


def test_mismatched_collectives_raise_on_the_receiver(comm: Communicator) -> None:
    if comm.size == 1:
        return
    part = comm.split(0)
    assert part is not None
    count = 100 if part.rank == 0 else 101
    work = part.all_reduce_async(np.zeros(count), np.zeros(count), label="odd")
    with pytest.raises(comm_core.TransportError, match=r"all_reduce 'odd'.*rank \d.*rank \d, \d+ bytes expected, \d+"):
        work.wait(10)
    with pytest.raises(comm_core.TransportError):
        part.barrier_async().wait(10)
    part.close()


DISAGREEMENTS: dict[str, tuple[Callable[[Communicator, bool], object], str, str]] = {
    "dtype": (
        lambda c, odd: c.all_reduce(*(np.ones(4, "i4" if odd else "f4") for _ in range(2))),
        "all_reduce of float32, op sum",
        "all_reduce of int32, op sum",
    ),
    "dtype of a large one": (
        lambda c, odd: c.all_gather(np.ones(300_000, kind := "i8" if odd else "f8"), np.ones(300_000 * c.size, kind)),
        "all_gather of float64",
        "all_gather of int64",
    ),
    "reduction": (
        lambda c, odd: c.all_reduce(np.ones(4), np.ones(4), ReduceOp.MAX if odd else ReduceOp.SUM),
        "all_reduce of float64, op sum",
        "all_reduce of float64, op max",
    ),
    "reduction of a large one": (
        lambda c, odd: c.reduce_scatter(
            np.ones(300_000 * c.size), np.ones(300_000), ReduceOp.MIN if odd else ReduceOp.AVG
        ),
        "reduce_scatter of float64, op avg",
        "reduce_scatter of float64, op min",
    ),
    "root": (lambda c, odd: c.broadcast(np.ones(4), int(odd)), "broadcast of float64, root 0", "broadcast .*, root 1"),
    "the other is the root": (
        lambda c, odd: c.broadcast(np.ones(300_000), 1 - odd),
        "broadcast of float64, root 1",
        "broadcast of float64, root 0",
    ),
    "root of a sum": (
        lambda c, odd: c.reduce(np.ones(4), np.ones(4), root=int(odd)),
        # Rank 2 of four sends to rank 0; what rank 1 receives from it is of the next operation.
        "(reduce of float64, op sum, root 0|barrier)",
        "reduce of float64, op sum, root 1",
    ),
    "nobody is the root of a sum": (
        lambda c, odd: c.reduce(np.ones(300_000), np.ones(300_000), root=1 - odd),
        "reduce of float64, op sum, root 1",
        "reduce of float64, op sum, root 0",
    ),
    "operation": (
        lambda c, odd: c.barrier() if odd else c.all_reduce(np.ones(1, "u1"), np.ones(1, "u1")),
        "all_reduce of uint8, op sum",
        "barrier",
    ),
    "a split": (lambda c, odd: c.barrier() if odd else c.split(0), "split", "barrier"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_what_ranks_mean_differently_raises_on_each(comm: Communicator, what: str) -> None:
    """Where sizes are the same, the result would be wrong without a word. Who only sends hears of it by the next one."""
    if comm.size == 1:
        return
    part = comm.split(0)
    assert part is not None
    call, even, odd = DISAGREEMENTS[what]
    here, there = (odd, even) if comm.rank % 2 else (even, odd)

    def two_in_a_row() -> None:
        call(part, comm.rank % 2 == 1)
        part.barrier()

    # Another rank may have noticed it first, and this one be told of that.
    message = f"expected ({here}, received {there}|{there}, received {here}); all ranks of a communicator"
    with pytest.raises(comm_core.TransportError, match=message):
        two_in_a_row()
    comm.barrier()
    part.abandon()
    part.close()


def test_a_message_of_another_type_raises(comm: Communicator) -> None:
    part = comm.split(comm.rank)
    assert part is not None
    receive = part.recv_async(np.zeros(4, "i4"), 0, label="other")
    part.send_async(np.ones(4, "f4"), 0)
    with pytest.raises(comm_core.TransportError, match=r"'other'.*the peer's is a send of float32 but a send of int32"):
        receive.wait(10)
    part.close()


@pytest.mark.parametrize("sent", [1500, 7000, 300_000])
def test_nothing_is_written_beyond_what_was_given_where_ranks_disagree(comm: Communicator, sent: int) -> None:
    """Open MPI writes all of a message that is too long for its receive, wherever that ends."""
    part = comm.split(comm.rank)
    assert part is not None
    memory = np.zeros(2 * sent)
    receive = part.recv_async(memory[:1000], 0)
    part.send_async(np.ones(sent), 0)
    with pytest.raises(comm_core.TransportError):
        receive.wait(10)
    part.close()
    assert not memory[1000:].any()


def test_nothing_is_written_beyond_what_a_collective_was_given(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    last = part.size - 1
    counts = [300_000] * last + [300_000 if part.rank == last else 299_000]
    memory = np.zeros(sum(counts) + 10_000)
    work = part.all_gather_async(np.ones(counts[part.rank]), memory[: sum(counts)], counts=counts)
    if part.rank == 0 < last:
        with pytest.raises(comm_core.TransportError, match="the ranks disagree about the order or the sizes"):
            work.wait(10)
    comm.barrier()
    part.abandon()
    part.close()
    assert not memory[sum(counts) :].any()


def test_what_other_ranks_never_issue_can_be_given_up(comm: Communicator) -> None:
    """Messages that nobody waits for are taken, whatever their sizes: else neither a send nor MPI itself would end."""
    part = comm.split(0)
    assert part is not None
    arrays = [np.ones(count) for count in (3, 1000, 300_000)]
    part.barrier()
    works = []
    if part.rank == 0 and part.size > 1:
        works = [part.all_reduce_async(a, a) for a in arrays]
        works += [part.send_async(arrays[-1], part.size - 1, tag=7), part.recv_async(arrays[0], part.size - 1, tag=8)]
    elif part.rank == part.size - 1 > 1:
        works = [part.all_reduce_async(arrays[0], arrays[0])]
    time.sleep(0.05)
    assert not any(work.done() for work in works if work.op != "send")
    part.abandon()
    for work in works:
        if work.op == "send" and work.done() and work.exception() is None:
            continue  # the last rank came to abandon() first, and has taken it
        with pytest.raises(comm_core.TransportError, match="given up: other ranks never issued it"):
            work.wait(10)
    part.close()
    comm.barrier()


def test_giving_up_twice_is_giving_up_once(comm: Communicator) -> None:
    """Whoever asks again, beside the first or afterwards, waits for what the first began: other ranks come once."""
    part = comm.split(0)
    assert part is not None
    threads = [threading.Thread(target=part.abandon) for _ in range(3 if part.rank == 0 else 1)]
    time.sleep(0.1 * (part.rank > 0))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if part.rank == 0:
        part.abandon()
    assert part.pending() == []
    part.close()
