"""One rank over the real NCCL and driver, as far as one rank calls them: ``python -m bench.gpu.one_rank``.

A group of one sends nothing, but it loads, initialises, splits, orders streams, keeps memory and ends as any other. Tests
run the same over a double, which cannot show that the real libraries agree with it.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Protocol

import torch

import comm_core
from comm_core import Buffer, Communicator, ReduceOp, Work
from overlap.transport.checks import DTYPES

__all__ = ["Card", "CudaCard", "examine", "main"]

_COUNT = 100_003  # elements; blocks of kernels do not divide it
_ROUNDS = 20
_NAP = 0.6  # seconds in which a stream is busy
_PATIENCE = 10.0
_TRIES = 5  # of a part that another process kept from looking while the nap lasted
_CLOCK = 1.7e9  # cycles of a card in a second, about


class Card(Protocol):
    """A device, as far as these checks need one."""

    device: int
    place: torch.device

    def stream(self) -> int:
        """A new stream."""

    def run(self, stream: int, compute: Callable[[], object]) -> None:
        """Enqueue on `stream` what `compute` does."""

    def nap(self, stream: int, seconds: float) -> None:
        """Keep `stream` busy for about so long."""

    def settle(self) -> None:
        """Wait until nothing is left to do."""


class CudaCard:
    """The first GPU, through torch."""

    def __init__(self) -> None:
        self.device = 0
        self.place = torch.device("cuda", 0)
        torch.cuda.set_device(self.place)
        self._streams: dict[int, torch.cuda.Stream] = {}
        # Loading a kernel when it is first used may wait for the device, and issuing would not be what is measured.
        self.nap(self.stream(), 1e-3)
        self.settle()

    def stream(self) -> int:
        made = torch.cuda.Stream(self.place)
        self._streams[int(made.cuda_stream)] = made
        return int(made.cuda_stream)

    def run(self, stream: int, compute: Callable[[], object]) -> None:
        with torch.cuda.stream(self._streams[stream]):
            compute()

    def nap(self, stream: int, seconds: float) -> None:
        self.run(stream, lambda: torch.cuda._sleep(int(seconds * _CLOCK)))  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        torch.cuda.synchronize(self.place)


class _Owner:
    """What has to stay alive while an operation uses its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _buffer(card: Card, tensor: torch.Tensor, stream: int, owner: object = None) -> Buffer:
    return Buffer(
        tensor.data_ptr(),
        tensor.numel(),
        DTYPES[tensor.dtype],
        owner=tensor if owner is None else owner,
        device=card.device,
        stream=stream,
    )


def _values(card: Card, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(_COUNT, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 100
    values[::5] = -0.0
    return values.to(dtype).to(card.place)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return bool((one.cpu().contiguous().view(torch.uint8) == other.cpu().contiguous().view(torch.uint8)).all())


class _TooLate(Exception):
    """A nap may have ended before the host looked, so that nothing follows from what it saw."""


def _in_time(began: float) -> None:
    """Call it between looking and judging. Raises ``_TooLate`` unless a nap begun at `began` surely lasts still."""
    late = time.monotonic() - began
    if late > _NAP / 2:
        raise _TooLate(f"the host came {late:.2f} s after a nap of {_NAP:g} s began, in each of {_TRIES} tries")


def _until(what: Callable[[], bool], otherwise: str) -> float:
    """Seconds until it is so. Raises ``AssertionError`` where it does not come to that."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < _PATIENCE, otherwise
        time.sleep(0.001)
    return time.monotonic() - began


# - What is examined


def _results(card: Card, comm: Communicator) -> str:
    """Every operation gives what was sent, in every type; a zero keeps its sign."""
    operations: dict[str, Callable[[Buffer, Buffer], Work]] = {
        "reduce_scatter": lambda a, b: comm.reduce_scatter_async(a, b),
        "all_gather": lambda a, b: comm.all_gather_async(a, b),
        "all_reduce": lambda a, b: comm.all_reduce_async(a, b),
        "greatest": lambda a, b: comm.all_reduce_async(a, b, ReduceOp.MAX),
        "reduce": lambda a, b: comm.reduce_async(a, b, root=0),
        "all_to_all": lambda a, b: comm.all_to_all_async(a, b),
    }
    stream = card.stream()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        for name, issue in operations.items():
            sent = _values(card, dtype)
            received = torch.full_like(sent, 3)
            card.settle()
            issue(_buffer(card, sent, stream), _buffer(card, received, stream)).wait(_PATIENCE)
            assert _same(sent, received), f"{name} of {dtype} gives something else"
        kept = _values(card, dtype)
        card.settle()
        comm.broadcast_async(_buffer(card, kept, stream), 0).wait(_PATIENCE)
        assert _same(kept, _values(card, dtype)), f"broadcast of {dtype} gives something else"
    comm.barrier()
    return f"{len(operations) + 1} operations in 5 types"


def _streams(card: Card, comm: Communicator) -> str:
    """An operation follows the stream of its buffers, `order_before` lets another follow it; the host waits for nothing."""
    producer, consumer = card.stream(), card.stream()
    sources = [torch.randn(_COUNT).to(card.place) for _ in range(_ROUNDS)]
    sent, received, found = ([torch.zeros_like(one) for one in sources] for _ in range(3))
    card.settle()
    began = time.monotonic()
    card.nap(producer, _NAP)
    works = []
    for source, send, receive, copy in zip(sources, sent, received, found, strict=True):
        card.run(producer, lambda to=send, of=source: to.copy_(of))  # type: ignore[misc]
        works.append(comm.all_reduce_async(_buffer(card, send, producer), _buffer(card, receive, producer)))
        works[-1].order_before(consumer)
        card.run(consumer, lambda to=copy, of=receive: to.copy_(of))  # type: ignore[misc]
    issued = time.monotonic() - began
    done = works[0].done()
    _in_time(began)
    assert not done, "it is done before the stream of its buffers has come to it"
    card.settle()
    wrong = [n for n, (source, copy) in enumerate(zip(sources, found, strict=True)) if not _same(source, copy)]
    assert not wrong, f"rounds {wrong} of {_ROUNDS} were out of order"
    return f"{_ROUNDS} rounds issued in {1e3 * issued:.1f} ms"


def _under_way(card: Card, comm: Communicator) -> tuple[float, Work, weakref.ref[_Owner], torch.Tensor]:
    """When a nap began, an all-reduce that the device comes to after it, the owner of what it reads, and its target.

    The operation alone holds the owner.
    """
    stream, owner = card.stream(), _Owner(_values(card))
    target = torch.zeros_like(owner.tensor)
    card.settle()
    began = time.monotonic()
    card.nap(stream, _NAP)
    work = comm.all_reduce_async(_buffer(card, owner.tensor, stream, owner), _buffer(card, target, stream))
    return began, work, weakref.ref(owner), target


def _memory(card: Card, comm: Communicator) -> str:
    """Memory is kept until the device has passed an operation, and let go then."""
    began, work, kept, target = _under_way(card, comm)
    gc.collect()
    held, done = kept() is not None, work.done()
    _in_time(began)
    assert held, "memory was let go while the device was still to read it"
    assert not done, "it is done before the stream of its buffers has come to it"
    with suppress(comm_core.TimeoutError):
        work.wait(_NAP / 10)
        _in_time(began)
        raise AssertionError("wait() came back before its time was over, and the operation was not done")
    work.wait(_PATIENCE)
    seconds = _until(lambda: kept() is None, "memory is kept although the operation is done")
    assert _same(target, _values(card)), "it gives something else"
    return f"let go {1e3 * seconds:.1f} ms later"


def _part_of(comm: Communicator) -> closing[Communicator]:
    part = comm.split(0)
    assert part is not None, "split(0) gives no communicator"
    return closing(part)


def _split(card: Card, comm: Communicator) -> str:
    """A part of the group works beside it; without a color there is none."""
    began = time.monotonic()
    with _part_of(comm) as part:
        took = time.monotonic() - began
        assert (part.rank, part.size) == (0, 1)
        assert comm.split(None) is None
        _results(card, part)
        _streams(card, part)
    _results(card, comm)
    return f"took {1e3 * took:.0f} ms"


def _abandon(card: Card, comm: Communicator) -> str:
    """What is under way on a communicator that is given up fails, later calls too; the others go on."""
    with _part_of(comm) as part:
        began, work, kept, _ = _under_way(card, part)
        part.abandon()
        _in_time(began)
        said = _refused(lambda: work.wait(_PATIENCE), "the operation under way did not fail")
        _refused(part.barrier, "a later call did not fail")
        seconds = _until(lambda: kept() is None, "its memory is kept")
    _results(card, comm)
    return f"let go after {1e3 * seconds:.0f} ms; {said}"


def _refused(call: Callable[[], object], otherwise: str) -> str:
    """What was said. Raises ``AssertionError`` where the call goes through."""
    try:
        call()
    except comm_core.TransportError as error:
        return str(error)
    raise AssertionError(otherwise)


_PARTS: tuple[Callable[[Card, Communicator], str], ...] = (_results, _streams, _memory, _split, _abandon)


def _tried(part: Callable[[Card, Communicator], str], card: Card, comm: Communicator) -> str:
    for _ in range(_TRIES - 1):
        with suppress(_TooLate):
            return part(card, comm)
        card.settle()
    return part(card, comm)


def examine(card: Card, say: Callable[[str], None]) -> int:
    """How many parts failed; each is told, and none ends the others."""
    began = time.monotonic()
    try:
        library = comm_core.find_nccl()
        say(f"NCCL {library.version_text} at {library.path}")
        comm = comm_core.nccl(0, 1, card.device, lambda mine: [mine])
    except comm_core.Error as error:
        say(f"FAIL init: {error}")
        return 1
    say(f"ok   init: {time.monotonic() - began:.2f} s")
    failed = 0
    for part in _PARTS:
        name = part.__name__.lstrip("_")
        try:
            say(f"ok   {name}: {_tried(part, card, comm)}")
        except (AssertionError, RuntimeError, _TooLate) as error:
            failed += 1
            traceback.print_exc()
            say(f"FAIL {name}: {error}")
    began = time.monotonic()
    try:
        comm.close()
        say(f"ok   close: {time.monotonic() - began:.2f} s")
    except comm_core.Error as error:
        failed += 1
        say(f"FAIL close: {error}")
    return failed


def main() -> int:
    """0 where all is well; 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("bench.gpu.one_rank: no GPU: PyTorch sees no CUDA device", file=sys.stderr)
        return 2
    return int(examine(CudaCard(), lambda line: print(line, flush=True)) > 0)


if __name__ == "__main__":
    sys.exit(main())
