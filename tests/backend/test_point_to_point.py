"""Sends and receives: tags, orders, sizes, receivers that ask for anybody, and batches in both directions."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.backend.world import (
    ALL,
    FOUR,
    MOVED,
    NO_GAPS,
    OVER_GLOO,
    SEVERAL,
    blank,
    contents,
    equal,
    fails_before,
    group_of,
    mine,
)
from tests.spmd_plugin import RANK, SIZE

pytestmark = SEVERAL
LAST = SIZE - 1
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
SMALL, LARGE = 3, 2**20 + 1  # elements; the second does not fit the buffers of a socket
PATTERNS = 300


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize(
    "layout",
    ["contiguous", pytest.param("transposed", marks=pytest.mark.skipif(OVER_GLOO, reason="gloo refuses it"))],
)
def test_a_tensor_from_rank_to_rank(dtype: torch.dtype, layout: str) -> None:
    if RANK == 0:
        dist.send(mine("contiguous", (3, 5), dtype), LAST)
    elif RANK == LAST:
        found = blank("contiguous", (3, 5), dtype)
        assert dist.recv(found, 0) == 0
        equal(found, contents(0, (3, 5), dtype))
    if RANK == LAST:  # and back, in the same layout on both sides
        dist.send(mine(layout, (3, 5), dtype), 0)
    elif RANK == 0:
        found = blank(layout, (3, 5), dtype)
        dist.recv(found, LAST)
        equal(found, contents(LAST, (3, 5), dtype))


@pytest.mark.parametrize("numel", [0, 1, SMALL, 4097, LARGE])
def test_sizes(numel: int) -> None:
    if RANK == 0:
        dist.send(torch.full((numel,), 5.0), LAST)
    elif RANK == LAST:
        found = torch.empty(numel)
        dist.recv(found, 0)
        equal(found, torch.full((numel,), 5.0))


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_tags_out_of_order(numel: int) -> None:
    """What was sent first is received last."""
    tags = [5, 0, 3, 7]
    if RANK == 0:
        works = [dist.isend(torch.full((numel,), float(tag)), LAST, tag=tag) for tag in tags]
    elif RANK == LAST:
        found = {tag: torch.empty(numel) for tag in tags}
        works = [dist.irecv(found[tag], 0, tag=tag) for tag in reversed(tags)]
    else:
        works = []
    for work in works:
        work.wait()
    if RANK == LAST:
        for tag in tags:
            equal(found[tag], torch.full((numel,), float(tag)), tag)


def test_tags_are_received_one_by_one_in_another_order() -> None:
    """Blocking: the first receive is of what was sent last."""
    if RANK == 0:
        works = [dist.isend(torch.tensor([float(tag)]), LAST, tag=tag) for tag in range(5)]
        for work in works:
            work.wait()
    elif RANK == LAST:
        for tag in (4, 2, 0, 1, 3):
            found = torch.empty(1)
            dist.recv(found, 0, tag=tag)
            equal(found, torch.tensor([float(tag)]), tag)


def test_the_same_tag_keeps_its_order() -> None:
    if RANK == 0:
        works = [dist.isend(torch.full((n + 1,), float(n)), LAST, tag=9) for n in range(30)]
    elif RANK == LAST:
        found = [torch.empty(n + 1) for n in range(30)]
        works = [dist.irecv(one, 0, tag=9) for one in found]
    else:
        works = []
    for work in works:
        work.wait()
    if RANK == LAST:
        for number, one in enumerate(found):
            equal(one, torch.full((number + 1,), float(number)), number)


def test_a_send_that_nobody_receives_yet_does_not_keep_collectives_back() -> None:
    if RANK == 0:
        work = dist.isend(torch.ones(LARGE), LAST, tag=1)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((4,), float(SIZE)))
    if RANK == 0:
        work.wait()
    elif RANK == LAST:
        found = torch.empty(LARGE)
        dist.recv(found, 0, tag=1)
        equal(found, torch.ones(LARGE))


def test_a_receive_that_nobody_serves_yet_does_not_keep_collectives_back() -> None:
    found = torch.empty(8)
    if RANK == LAST:
        work = dist.irecv(found, 0)
    for _ in range(3):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        equal(tensor, torch.full((4,), float(SIZE)))
    if RANK == 0:
        dist.send(torch.ones(8), LAST)
    elif RANK == LAST:
        work.wait()
        equal(found, torch.ones(8))


def test_receiving_from_anybody() -> None:
    if RANK != 0:
        dist.send(torch.tensor([float(RANK)]), 0, tag=RANK % 2)
        return
    senders = []
    for tag in (0, 1):
        for _ in [rank for rank in ALL[1:] if rank % 2 == tag]:
            found = torch.empty(1)
            sender = dist.recv(found, None, tag=tag)
            assert found.item() == sender
            senders.append(sender)
    assert sorted(senders) == ALL[1:]


@FOUR
@pytest.mark.four_ranks
def test_receiving_from_anybody_within_a_group() -> None:
    with group_of(ALL[1:]) as group:
        if RANK > 1:
            dist.send(torch.tensor([float(RANK)]), 1, group=group)
        elif RANK == 1:
            found = torch.empty(1)
            senders = []
            for _ in ALL[2:]:
                senders.append(dist.recv(found, None, group=group))
                assert found.item() == senders[-1]
            assert sorted(senders) == ALL[2:]


def test_receiving_from_anybody_who_is_about_to_leave() -> None:
    """A group that is destroyed waits for its messages to be received, and answers nobody."""
    group = dist.new_group(ALL)
    if RANK == 0:
        time.sleep(0.5)
        found = torch.empty(1)
        senders = [dist.recv(found, None, group=group) for _ in ALL[1:]]
        assert sorted(senders) == ALL[1:]
    else:
        dist.send(torch.tensor([float(RANK)]), 0, group=group)
    dist.destroy_process_group(group)


@fails_before("2.6")  # which has no group_dst yet
def test_within_a_group_ranks_are_those_of_the_default_group() -> None:
    ranks = ALL[1:] if SIZE > 2 else ALL
    with group_of(ranks) as group:
        if ranks[0] == RANK:
            dist.send(torch.tensor([5.0]), ranks[-1], group=group)
            dist.send(torch.tensor([6.0]), group=group, group_dst=len(ranks) - 1)
        elif ranks[-1] == RANK:
            found = torch.empty(1)
            assert dist.recv(found, ranks[0], group=group) == ranks[0]
            equal(found, torch.tensor([5.0]))
            dist.recv(found, group=group, group_src=0)
            equal(found, torch.tensor([6.0]))


def test_messages_of_two_groups_do_not_mix() -> None:
    with group_of() as first, group_of() as second:
        if RANK == 0:
            works = [dist.isend(torch.tensor([float(n)]), LAST, group=g) for n, g in ((1, first), (2, second))]
        elif RANK == LAST:
            found = [torch.empty(1), torch.empty(1)]
            works = [dist.irecv(one, 0, group=g) for one, g in zip(found, (second, first), strict=True)]
        else:
            works = []
        for work in works:
            work.wait()
        if RANK == LAST:
            assert [one.item() for one in found] == [2.0, 1.0]
        dist.barrier()


# - Batches


def _batch(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("sends_first", [True, False])
def test_both_directions_at_once(numel: int, sends_first: bool) -> None:
    if RANK not in (0, LAST):
        return
    other = LAST if RANK == 0 else 0
    found = torch.empty(numel)
    operations = [dist.P2POp(dist.isend, torch.full((numel,), float(RANK)), other)]
    operations.insert(len(operations) * sends_first, dist.P2POp(dist.irecv, found, other))
    _batch(operations)
    equal(found, torch.full((numel,), float(other)))


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_a_ring(numel: int) -> None:
    for turn in range(4):
        found = torch.empty(numel)
        sends = dist.P2POp(dist.isend, torch.full((numel,), float(RANK + turn)), NEXT)
        receives = dist.P2POp(dist.irecv, found, PREVIOUS)
        _batch([sends, receives] if (RANK + turn) % 2 else [receives, sends])
        equal(found, torch.full((numel,), float(PREVIOUS + turn)), turn)


def test_everybody_to_everybody() -> None:
    found = {other: torch.empty(500 + 10 * other) for other in ALL if other != RANK}
    sends = [dist.P2POp(dist.isend, torch.full((500 + 10 * RANK,), float(10 * RANK + to)), to) for to in found]
    _batch([*(dist.P2POp(dist.irecv, one, other) for other, one in found.items()), *sends])
    for other, one in found.items():
        equal(one, torch.full((500 + 10 * other,), float(10 * other + RANK)), other)


@FOUR
@pytest.mark.four_ranks
def test_halves_of_a_pipeline() -> None:
    """Two stages on each side, forward in one direction and backward in the other, as 1F1B has them."""
    for _ in range(20):
        forward, backward = torch.empty(1000), torch.empty(1000)
        operations = []
        if RANK > 0:
            operations += [
                dist.P2POp(dist.irecv, forward, RANK - 1),
                dist.P2POp(dist.isend, torch.ones(1000), RANK - 1),
            ]
        if RANK < LAST:
            operations += [
                dist.P2POp(dist.isend, torch.zeros(1000), RANK + 1),
                dist.P2POp(dist.irecv, backward, RANK + 1),
            ]
        _batch(operations)
        if RANK > 0:
            equal(forward, torch.zeros(1000))
        if RANK < LAST:
            equal(backward, torch.ones(1000))


def _pattern(seed: int) -> list[tuple[int, int, int, int]]:
    """(sender, receiver, elements, tag) of a random batch, the same on all ranks: large ones, pairs twice."""
    chosen = random.Random(seed)
    letters = []
    for _ in range(chosen.randrange(1, 9)):
        sender, receiver = chosen.sample(ALL, 2)
        numel = chosen.choice([0, 1, 7, 100, 5000, 70000])
        letters.append((sender, receiver, numel, chosen.randrange(3)))
    return letters


@pytest.mark.timeout(120)
def test_random_batches() -> None:
    """Order matters within a pair, a direction and a tag alone; each rank mixes the rest."""
    for seed in range(PATTERNS):
        order, queues = random.Random(1000 * seed + RANK), {}
        found = []
        for number, (sender, receiver, numel, tag) in enumerate(_pattern(seed)):
            if sender == RANK:
                tensor = torch.full((numel,), float(seed + number))
                queues.setdefault(("to", receiver, tag), []).append(dist.P2POp(dist.isend, tensor, receiver, tag=tag))
            if receiver == RANK:
                found.append((number, torch.empty(numel)))
                operation = dist.P2POp(dist.irecv, found[-1][1], sender, tag=tag)
                queues.setdefault(("from", sender, tag), []).append(operation)
        operations = []
        while queues:
            key = order.choice(list(queues))
            operations.append(queues[key].pop(0))
            if not queues[key]:
                del queues[key]
        _batch(operations)
        for number, tensor in found:
            equal(tensor, torch.full(tensor.shape, float(seed + number)), (seed, number))


@NO_GAPS
def test_every_second_element() -> None:
    found = blank("gaps", (3, 5), torch.float32)
    if RANK == 0:
        dist.send(mine("gaps", (3, 5), torch.float32), LAST)
    elif RANK == LAST:
        dist.recv(found, 0)
        equal(found, contents(0, (3, 5), torch.float32))
