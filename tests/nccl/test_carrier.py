"""The carrier over NCCL, on tensors whose device is the double: results under any order of the device, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

import comm_core
from comm_core import ReduceOp, Unsupported
from overlap.transport.communicator import Communicator
from overlap.transport.cuda.communicator import DeviceCommunicator
from overlap.transport.cuda.nccl import NcclCarrier
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
from overlap.transport.work import arrive
from tests.gpu_double import Double, DoubleMoment, eventually

SIZE = 3


class DoubleStreams:
    """`overlap.transport.cuda.streams.Streams` of one rank."""

    kind = "cpu"

    def __init__(self, gpu: Double, device: int) -> None:
        self._gpu, self.device = gpu, device
        self.side, self.computation = gpu.stream(), gpu.stream()
        self.captured = False

    def current(self) -> int:
        return self.computation

    def bind(self) -> None:
        raise AssertionError("no thread is begun")

    def follow(self, others: Iterable[int]) -> None:
        raise AssertionError("no gradient is written here")

    def capturing(self) -> bool:
        return self.captured

    def beside(self, compute: Callable[[], None], touched: Sequence[torch.Tensor]) -> None:
        self._gpu.call(self.side, compute)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), 99, dtype=dtype)

    def mark(self) -> DoubleMoment:
        return self._gpu.moment(self.side)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        raise AssertionError("NCCL needs no memory of the host's")

    fetch = bring = pinned  # type: ignore[assignment]


class Ranks:
    """A communicator for each rank, all in this process."""

    def __init__(self, gpu: Double, size: int) -> None:
        self._gpu = gpu
        self.streams = [DoubleStreams(gpu, rank) for rank in range(size)]
        cores = gpu.world(size)
        self.comms: list[Communicator] = [
            DeviceCommunicator(NativeCommunicator(core), NcclCarrier(core, streams), streams)
            for core, streams in zip(cores, self.streams, strict=True)
        ]

    def run(
        self, issue: Callable[[int, Communicator], Any], see: Callable[[int], torch.Tensor], seed: int
    ) -> list[Any]:
        """What each rank's computation finds after `issue`, ordered by streams alone."""
        seen: list[Any] = [None] * len(self.comms)
        works = [issue(rank, comm) for rank, comm in enumerate(self.comms)]
        for rank, (work, streams) in enumerate(zip(works, self.streams, strict=True)):
            arrive(work)
            self._gpu.call(streams.computation, lambda rank=rank: seen.__setitem__(rank, see(rank).clone()))
        assert all(found is None for found in seen), "the host waited for nothing"
        assert self._gpu.run(seed) == 0
        for work in works:
            work.wait()
            assert work.done()
        return seen


def _late(gpu: Double, ranks: Ranks, tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """A kernel of the computation's makes `values`, once the device comes to it."""
    for streams, tensor, value in zip(ranks.streams, tensors, values, strict=True):
        gpu.call(streams.computation, lambda tensor=tensor, value=value: tensor.copy_(value))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reductions(gpu: Double, op: ReduceOp, dtype: torch.dtype, seed: int) -> None:
    ranks = Ranks(gpu, SIZE)
    values = [torch.arange(7, dtype=dtype) * (rank + 1) for rank in range(SIZE)]
    stacked = torch.stack(values)
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.AVG: stacked.sum(0) / SIZE,
        ReduceOp.MAX: stacked.amax(0),
    }[op]
    sends = [torch.zeros(7, dtype=dtype) for _ in range(SIZE)]
    shards = [torch.zeros(count, dtype=dtype) for count in (3, 2, 2)]
    _late(gpu, ranks, sends, values)
    seen = ranks.run(lambda r, comm: comm.start(reduce_scatter(sends[r], shards[r], op)), lambda r: shards[r], seed)
    assert torch.equal(torch.cat(seen), expected)
    seen = ranks.run(lambda r, comm: comm.start(all_reduce(sends[r], sends[r], op)), lambda r: sends[r], seed)
    assert all(torch.equal(found, expected) for found in seen)


class _Halves:
    """Values whose sum in 16 bits depends on the order, and on how often it is rounded."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.values = [torch.randn(10, generator=generator).to(dtype) for _ in range(SIZE)]
        total = self.values[0].float()
        for value in self.values[1:]:
            total = total + value.float()
        self.sum, self.average = total.to(dtype), (total / SIZE).to(dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_by_their_owner_and_rounded_once(gpu: Double, dtype: torch.dtype, seed: int) -> None:
    ranks, halves = Ranks(gpu, SIZE), _Halves(dtype)
    sends = [torch.zeros(10, dtype=dtype) for _ in range(SIZE)]
    shards = [torch.zeros(count, dtype=dtype) for count in (5, 0, 5)]
    _late(gpu, ranks, sends, halves.values)
    seen = ranks.run(
        lambda r, comm: comm.start(reduce_scatter(sends[r], shards[r], counts=[5, 0, 5])), lambda r: shards[r], seed
    )
    assert torch.equal(torch.cat(seen), halves.sum)
    wholes = [torch.zeros(10, dtype=dtype) for _ in range(SIZE)]
    seen = ranks.run(
        lambda r, comm: comm.start(reduce(sends[r], wholes[1] if r == 1 else None, ReduceOp.AVG, 1)),
        lambda r: wholes[r],
        seed,
    )
    assert torch.equal(seen[1], halves.average)
    seen = ranks.run(lambda r, comm: comm.start(all_reduce(sends[r], sends[r], ReduceOp.AVG)), lambda r: sends[r], seed)
    assert all(torch.equal(found, halves.average) for found in seen)
    log = gpu.log()
    assert not [line for line in log if line.startswith(("all_reduce", "reduce"))], "NCCL adds no 16 bits"


@pytest.mark.parametrize("seed", range(2))
def test_moves_and_whole_numbers(gpu: Double, seed: int) -> None:
    ranks = Ranks(gpu, SIZE)
    wholes = [torch.zeros(6, dtype=torch.complex64) for _ in range(SIZE)]
    for rank, whole in enumerate(wholes):
        whole[sum((1, 2, 3)[:rank]) :][: rank + 1] = rank + 1j

    def gather(rank: int, comm: Communicator) -> Any:
        start = sum((1, 2, 3)[:rank])
        return comm.start(all_gather(wholes[rank][start : start + rank + 1], wholes[rank], counts=[1, 2, 3]))

    seen = ranks.run(gather, lambda r: wholes[r], seed)
    assert all(found.tolist() == [1j, 1 + 1j, 1 + 1j, 2 + 1j, 2 + 1j, 2 + 1j] for found in seen)
    counts = [torch.tensor([-7, rank]) for rank in range(SIZE)]
    seen = ranks.run(
        lambda r, comm: comm.start(all_reduce(counts[r], counts[r], ReduceOp.AVG)), lambda r: counts[r], seed
    )
    assert all(found.tolist() == [-7, 1] for found in seen)
    masks = [torch.tensor([rank == 1, False]) for rank in range(SIZE)]
    seen = ranks.run(lambda r, comm: comm.start(all_reduce(masks[r], masks[r])), lambda r: masks[r], seed)
    assert all(found.tolist() == [True, False] for found in seen)
    seen = ranks.run(lambda r, comm: comm.start(broadcast(counts[r], 2)), lambda r: counts[r], seed)
    assert all(found.tolist() == [-7, 1] for found in seen)
    into = [torch.zeros(3) for _ in range(SIZE)]
    seen = ranks.run(
        lambda r, comm: comm.start(all_to_all(torch.arange(3.0) + 10 * r, into[r])), lambda r: into[r], seed
    )
    assert [found.tolist() for found in seen] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_the_side_stream_follows_the_communicator_and_is_followed(gpu: Double) -> None:
    ranks = Ranks(gpu, 1)
    streams, (comm,) = ranks.streams[0], ranks.comms
    tensor = torch.ones(4, dtype=torch.float32)
    work = comm.start(all_reduce(tensor, tensor, ReduceOp.AVG))
    ours, side = gpu.name(streams.computation), gpu.name(streams.side)
    log = gpu.log()
    assert f"record e1 {ours}" in log
    assert not [line for line in log if line.endswith(side)], "alone, a sum is an average"
    arrive(work)
    assert gpu.log() == [f"wait {ours} e1"]
    gpu.run()
    two = Ranks(gpu, 2)
    gpu.log()
    tensors = [torch.ones(4), torch.ones(4)]
    works = [comm.start(all_reduce(tensors[r], tensors[r], ReduceOp.AVG)) for r, comm in enumerate(two.comms)]
    computation, side = gpu.name(two.streams[0].computation), gpu.name(two.streams[0].side)
    first = gpu.log()[:7]
    nccl = first[1].split()[1]
    assert [line.split()[0] for line in first[:4]] == ["record", "wait", "all_reduce", "record"]
    assert first[0].endswith(computation)
    assert first[4:6] == [f"wait {side} e2", f"record e3 {side}"]
    assert first[3] == f"record e2 {nccl}"
    assert not works[0].done()
    gpu.run()
    eventually(lambda: all(work.done() for work in works))


def test_what_is_captured_into_a_graph_is_refused(gpu: Double) -> None:
    ranks = Ranks(gpu, 1)
    ranks.streams[0].captured = True
    gpu.log()
    with pytest.raises(Unsupported, match=r"all_reduce: this stream is being captured into a CUDA graph.*make_graphed"):
        ranks.comms[0].run(all_reduce(torch.ones(1), torch.ones(1)))
    assert gpu.log() == []


def test_an_error_of_nccl_reaches_whoever_waits_or_issues(gpu: Double) -> None:
    ranks = Ranks(gpu, 2)
    tensor = torch.ones(4)
    work = ranks.comms[0].start(all_reduce(tensor, tensor, label="b7"))
    gpu.trouble(0, 2)
    with pytest.raises(comm_core.NcclError, match=r"all_reduce 'b7'.*rank 0 of 2.*system error"):
        work.wait(10)
    assert isinstance(work.exception(), comm_core.NcclError)
    with pytest.raises(comm_core.NcclError, match="all_reduce 'b7'"):
        arrive(work)  # before anything is computed from what is in its memory
    with pytest.raises(comm_core.NcclError, match="aborted after an error"):
        ranks.comms[0].start(all_reduce(tensor, tensor))


def test_each_stream_that_reads_waits_for_the_gather(gpu: Double) -> None:
    """Training's, after another one has come first: a logging thread's, say, or that of a moving average."""
    ranks = Ranks(gpu, 2)
    sends = [torch.full((2,), float(rank + 1)) for rank in range(2)]
    wholes = [torch.zeros(4) for _ in range(2)]
    works = [comm.start(all_gather(sends[rank], wholes[rank])) for rank, comm in enumerate(ranks.comms)]
    seen: list[list[float]] = []
    for work, streams, whole in zip(works, ranks.streams, wholes, strict=True):
        training, streams.computation = streams.computation, gpu.stream()
        assert arrive(work)
        streams.computation = training
        assert arrive(work)
        gpu.call(training, lambda whole=whole: seen.append(whole.tolist()))
    assert gpu.run(3) == 0
    assert seen == [[1.0, 1.0, 2.0, 2.0]] * 2
    for work in works:
        work.wait()
        assert not arrive(work)
