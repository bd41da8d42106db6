"""What starts cost each schedule: the methods of the DeAR paper on a network with a price for every operation. Pure.

    python -m bench.startups

An all-reduce of M bytes takes alpha + beta M, a reduce-scatter or an all-gather half of it, one after the other.
Emulated hosts cannot show this: dilation divides the price of a start, about 0.2 ms there, by as much as it slows the
links. Ranks are equal and threads cost nothing. Alpha and beta of 64 GPUs are those in the program that the paper's authors
published, where they are written down without a measurement.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mgwfbp.merge import merge
from overlap.plan.cost_model import CostModel
from overlap.plan.simulation.profile import load
from overlap.plan.simulation.workload import Layer

__all__ = ["bytescheduler", "ddp_buckets", "dear", "fill", "horovod", "layers_of", "overlapped"]

MB = 1024 * 1024
NETWORKS = {  # 10 Gbit/s Ethernet: workers to what an all-reduce costs
    8: CostModel(0.523e-3, 0.857e-9),
    16: CostModel(0.908e-3, 0.740e-9),
    32: CostModel(4.043e-3, 0.864e-9),
    64: CostModel(7.043e-3, 0.964e-9),
}
MODELS = {"resnet50": 64, "densenet201": 32, "inceptionv4": 64, "bert_base": 64, "bert": 32}
_STEPS = 8


def layers_of(model: str, device: str, batch_size: int) -> tuple[Layer, ...]:
    """A model's layers in order of definition, with the times of a profile."""
    return load(model, device, batch_size).layers


def ready(layers: Sequence[Layer]) -> Iterator[tuple[float, int]]:
    """When each gradient is there, in seconds after forward began, and its bytes."""
    now = sum(layer.forward for layer in layers)
    for layer in reversed(layers):
        now += layer.backward
        for nbytes in reversed(layer.tensors):
            yield now, nbytes


def fill(sizes: Sequence[int], most: int) -> list[int]:
    """How many neighbours each bucket takes: as many as fit into `most` bytes, at least one."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if counts and size <= room:
            counts[-1] += 1
            room -= size
        else:
            counts.append(1)
            room = most - size
    return counts


def ddp_buckets(sizes: Sequence[int], first: int = MB, most: int = 25 * MB) -> list[int]:
    """How many gradients each of DDP's buckets takes: one is closed by the gradient with which it has `most` bytes.

    The `first` one is closed sooner. From the second step on, in the order of arrival.
    """
    counts: list[int] = []
    held, enough = 0, first
    for number, size in enumerate(sizes, 1):
        held += size
        if held >= enough or number == len(sizes):
            counts.append(number - sum(counts))
            held, enough = 0, most
    return counts


def overlapped(layers: Sequence[Layer], cost: CostModel, counts: Sequence[int] | None = None) -> float:
    """Seconds of a step whose all-reduces overlap with backward: of each tensor, or of `counts` tensors together."""
    gradients, end, place = list(ready(layers)), 0.0, 0
    for count in counts or [1] * len(gradients):
        group = gradients[place : place + count]
        place += count
        end = max(end, group[-1][0]) + cost.seconds(sum(nbytes for _, nbytes in group))
    return max(end, gradients[-1][0])


def horovod(layers: Sequence[Layer], cost: CostModel, *, fusion: int = 128 * MB, cycle: float = 1e-3) -> float:
    """The same, where every cycle takes all gradients that are ready, up to `fusion` bytes."""
    gradients, end = list(ready(layers)), 0.0
    while gradients:
        begun = max(end, gradients[0][0]) + cycle
        there = [nbytes for moment, nbytes in gradients if moment <= begun]
        first = fill(there, fusion)[0]
        end = begun + cost.seconds(sum(there[:first]))
        gradients = gradients[first:]
    return end


def dear(layers: Sequence[Layer], cost: CostModel, most: int) -> float:
    """DeAR with buckets of whole layers, up to `most` bytes: 0 for a bucket for each layer."""
    counts = fill([layer.nbytes for layer in layers], most)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    buckets = [layers[end - count : end] for count, end in zip(counts, ends, strict=True)]
    half = [cost.seconds(sum(layer.nbytes for layer in bucket)) / 2 for bucket in buckets]
    now = gathered = 0.0
    for bucket, seconds in zip(buckets, half, strict=True):
        gathered += seconds
        now = max(now, gathered) + sum(layer.forward for layer in bucket)
    reduced = now
    for bucket, seconds in zip(reversed(buckets), reversed(half), strict=True):
        now += sum(layer.backward for layer in bucket)
        reduced = max(reduced, now) + seconds
    return reduced


def bytescheduler(layers: Sequence[Layer], cost: CostModel, *, partition: int = 16_000_000) -> float:
    """ByteScheduler: partitions of at most `partition` bytes, those of the layer nearest the input first."""
    waiting: list[tuple[int, int]] = []  # step and layer, most urgent first
    parts = [
        [partition] * (n // partition) + [n % partition] * (n % partition > 0)
        for n in (layer.nbytes for layer in layers)
    ]
    left = {number: list(part) for number, part in enumerate(parts)}
    now, link, begun = 0.0, 0.0, []

    def send_until(moment: float) -> None:
        nonlocal link
        while waiting and link < moment:
            number = waiting[0][1]
            link += cost.seconds(left[number].pop())
            if not left[number]:
                heapq.heappop(waiting)

    for step in range(_STEPS):
        begun.append(now)
        for number, layer in enumerate(layers):
            while any(waited == number for _, waited in waiting):
                send_until(link + 1e-12)
                now = max(now, link)
            now += layer.forward
            send_until(now)
        for number in range(len(layers) - 1, -1, -1):
            now += layers[number].backward
            send_until(now)
            link = max(link, now) if not waiting else link
            left[number] = list(parts[number])
            heapq.heappush(waiting, (step, number))
    return begun[-1] - begun[-2]


def table(workers: int) -> list[str]:
    """Milliseconds of a step with every method; after a stroke, with the size of buckets searched as a tuner would."""
    cost = NETWORKS[workers]
    lines = [
        f"{workers} workers, 10 Gbit/s: an all-reduce takes {1e3 * cost.alpha:.2f} ms + {1e9 * cost.beta:.3f} ns/byte"
    ]
    names = (
        "compute",
        "all-reduce",
        "wfbp",
        "bytescheduler",
        "dear",
        "|",
        "horovod",
        "ddp",
        "mgwfbp",
        "dear 25 MB",
        "best MB",
    )
    lines.append(f"{'':13}" + "".join(f"{name:>14}" for name in names))
    for model, batch_size in MODELS.items():
        layers = layers_of(model, "rtx2080ti", batch_size)
        compute = sum(layer.forward + layer.backward for layer in layers)
        tensors = [nbytes for _, nbytes in ready(layers)]
        seconds = [moment for moment, _ in ready(layers)]
        gaps = [seconds[0], *(after - before for before, after in pairwise(seconds))]
        merged = [len(group.tensors) for group in merge(tensors, gaps, cost)]
        best = min((dear(layers, cost, most * MB), most) for most in (1, 2, 5, 10, 25, 50, 100, 256))
        values = [
            compute,
            cost.seconds(sum(tensors)),
            overlapped(layers, cost),
            bytescheduler(layers, cost),
            dear(layers, cost, 0),
        ]
        fused = [
            horovod(layers, cost),
            overlapped(layers, cost, ddp_buckets(tensors)),
            overlapped(layers, cost, merged),
            dear(layers, cost, 25 * MB),
        ]
        cells = (
            [f"{1e3 * value:14.0f}" for value in values] + [f"{'|':>14}"] + [f"{1e3 * value:14.0f}" for value in fused]
        )
        lines.append(f"{model:13}" + "".join(cells) + f"{1e3 * best[0]:9.0f} ({best[1]})")
    return lines


def main() -> None:
    for workers in NETWORKS:
        print("\n".join(table(workers)) + "\n")


if __name__ == "__main__":
    main()
