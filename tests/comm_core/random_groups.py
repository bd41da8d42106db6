"""Random collectives over random groups that share ranks: issued in one order, and waited for some other time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from comm_core import Communicator, DType, ReduceOp, Work
from tests.comm_core.reference import Array, assert_equal, random_array, reduced, zeros

COUNTS = (0, 1, 5, 700, 9_000, 60_000)
DTYPES = (DType.INT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX)  # an average over three ranks is rounded in another way than numpy's
ROUNDS, GROUPS, OPERATIONS = 3, 4, 40


@dataclass(frozen=True)
class Call:
    """What all ranks of a group mean."""

    kind: str
    dtype: DType
    op: ReduceOp
    count: int
    root: int
    seed: int

    def input(self, rank: int, count: int | None = None) -> Array:
        return random_array(self.dtype, self.count if count is None else count, self.seed + rank)

    def counts(self, size: int) -> list[int]:
        """The parts of `size` ranks, unequal and perhaps empty."""
        cuts = np.sort(np.random.default_rng(self.seed).integers(0, self.count, size - 1, endpoint=True))
        return [int(n) for n in np.diff([0, *cuts, self.count])]


Issued = tuple[list[Work], Callable[[], None]]


def _all_reduce(part: Communicator, call: Call) -> Issued:
    inputs = [call.input(rank) for rank in range(part.size)]
    mine, expected = inputs[part.rank], reduced(inputs, call.op)
    result = mine if call.seed % 2 else zeros(call.dtype, call.count)
    work = part.all_reduce_async(mine.buffer(), result.buffer(), call.op)
    return [work], lambda: assert_equal(result, expected, call.op, part.size)


def _reduce_scatter(part: Communicator, call: Call) -> Issued:
    inputs, counts = [call.input(rank) for rank in range(part.size)], call.counts(part.size)
    first, count = sum(counts[: part.rank]), counts[part.rank]
    expected, result = reduced(inputs, call.op)[first : first + count], zeros(call.dtype, count)
    work = part.reduce_scatter_async(inputs[part.rank].buffer(), result.buffer(), call.op, counts=counts)
    return [work], lambda: assert_equal(result, expected, call.op, part.size)


def _reduce(part: Communicator, call: Call) -> Issued:
    inputs, root = [call.input(rank) for rank in range(part.size)], call.root % part.size
    result = zeros(call.dtype, call.count)
    if part.rank != root:
        return [part.reduce_async(inputs[part.rank].buffer(), None, call.op, root)], lambda: None
    expected = reduced(inputs, call.op)
    work = part.reduce_async(inputs[root].buffer(), result.buffer(), call.op, root)
    return [work], lambda: assert_equal(result, expected, call.op, part.size)


def _all_gather(part: Communicator, call: Call) -> Issued:
    counts = call.counts(part.size)
    inputs = [call.input(rank, count) for rank, count in enumerate(counts)]
    expected, result = np.concatenate([array.raw for array in inputs]), zeros(call.dtype, call.count)
    work = part.all_gather_async(inputs[part.rank].buffer(), result.buffer(), counts=counts)
    return [work], lambda: np.testing.assert_array_equal(result.raw, expected)


def _broadcast(part: Communicator, call: Call) -> Issued:
    root = call.root % part.size
    expected, result = call.input(root), call.input(part.rank)
    work = part.broadcast_async(result.buffer(), root)
    return [work], lambda: np.testing.assert_array_equal(result.raw, expected.raw)


def _all_to_all(part: Communicator, call: Call) -> Issued:
    def piece(source: int, target: int) -> np.ndarray:
        return np.full((call.count + 7 * source + 3 * target) // part.size, 100 * source + target, np.int32)

    sent = [piece(part.rank, peer) for peer in range(part.size)]
    wanted = [piece(peer, part.rank) for peer in range(part.size)]
    expected = np.concatenate(wanted)
    result = np.zeros_like(expected)
    counts = {"send_counts": [a.size for a in sent], "recv_counts": [a.size for a in wanted]}
    work = part.all_to_all_async(np.concatenate(sent), result, **counts)
    return [work], lambda: np.testing.assert_array_equal(result, expected)


def _barrier(part: Communicator, call: Call) -> Issued:
    return [part.barrier_async()], lambda: None


def _message(part: Communicator, call: Call) -> Issued:
    """From one rank to the next."""
    source = call.root % part.size
    target = (source + 1) % part.size
    expected, result = call.input(source), zeros(call.dtype, call.count)
    works = []
    if part.rank == source:
        works.append(part.send_async(expected.buffer(), target, tag=3))
    if part.rank != target:
        return works, lambda: None
    works.append(part.recv_async(result.buffer(), source, tag=3))
    return works, lambda: np.testing.assert_array_equal(result.raw, expected.raw)


KINDS: dict[str, Callable[[Communicator, Call], Issued]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "message": _message,
}


def _random_call(rng: np.random.Generator) -> Call:
    kind, dtype, op, count = (options[rng.integers(len(options))] for options in (list(KINDS), DTYPES, OPS, COUNTS))
    return Call(kind, dtype, op, count, root=int(rng.integers(100)), seed=int(rng.integers(2**31)))


def play(comm: Communicator, seed: int) -> None:
    """Every rank draws the same groups and calls, and waits at times of its own; a group goes while others are made."""
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
    last: list[Communicator] = []
    for _ in range(ROUNDS):
        groups: list[Communicator | None] = []
        for _ in range(GROUPS):
            members = rng.permutation(comm.size)[: rng.integers(min(2, comm.size), comm.size, endpoint=True)].tolist()
            place = members.index(comm.rank) if comm.rank in members else None
            part = comm.split(None if place is None else 0, key=place or 0)
            each = int(rng.choice([n for n in range(1, len(members) + 1) if len(members) % n == 0]))
            levels = bool(rng.integers(2))
            if part is not None and levels:  # beside the one without groups, which is closed at once
                flat, part = part, part.two_level([list(range(i, i + each)) for i in range(0, part.size, each)])
                flat.close()
            groups.append(part)
            if last and own.integers(2):
                last.pop().close()
        issued: list[tuple[Call, Issued]] = []
        for _ in range(OPERATIONS):
            part, call = groups[rng.integers(GROUPS)], _random_call(rng)
            if part is None:
                continue
            if part.name.endswith(":two_level") and call.dtype in (DType.FLOAT16, DType.BFLOAT16):
                call = replace(call, dtype=DType.FLOAT32)  # 16 bits are rounded twice, and numpy's once
            issued.append((call, KINDS[call.kind](part, call)))
            if own.integers(8) == 0:
                time.sleep(own.random() * 0.003)
            if own.integers(4) == 0:
                for work in issued[own.integers(len(issued))][1][0]:
                    work.wait(30)
        for call, (works, check) in issued:
            for work in works:
                work.wait(30)
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {call}") from error
        last += [part for part in groups if part is not None]
    for part in last:
        part.close()
