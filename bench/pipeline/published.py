"""``python -m bench.pipeline.published``: torchgpipe's published speed-ups, and our schedule's with the same balance.

torchgpipe 0.0.5 on Tesla P40 (https://github.com/kakaobrain/torchgpipe, ``benchmarks``); GPipe's own on TPUs (Huang et al.,
2019, table 2). What layers take follows from the P40's data sheet and their shapes; nothing is measured or fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from bench.pipeline.layers import Layer, amoebanet, unet
from pipe.checkpointing import stop
from pipe.schedule import bubble, ticks

__all__ = ["PUBLISHED", "Job", "even", "main", "markdown", "simulated", "step_seconds"]

_P40 = 11.76e12, 346e9  # floating-point operations of 32 bits, and bytes, per second


class Job(NamedTuple):
    """A row of a published table."""

    model: str
    balance: tuple[int, ...]
    micro_batches: int
    checkpoint: str
    published: float
    tpus: float | None = None  # of GPipe itself


_UNET, _AMOEBANET = "U-Net (5, 64)", "AmoebaNet-D (18, 256)"
PUBLISHED = (
    Job(_UNET, (241,), 2, "except_last", 0.858),
    Job(_UNET, (104, 137), 32, "except_last", 1.246),
    Job(_UNET, (30, 66, 84, 61), 16, "except_last", 2.352),
    Job(_UNET, (16, 27, 31, 44, 22, 57, 27, 17), 40, "except_last", 3.105),
    Job(_AMOEBANET, (7, 17), 1, "always", 1.0, 1.0),
    Job(_AMOEBANET, (9, 15), 4, "except_last", 1.546, 1.07),
    Job(_AMOEBANET, (9, 15), 32, "except_last", 1.780, 1.21),
    Job(_AMOEBANET, (3, 4, 5, 12), 1, "always", 1.006, 1.13),
    Job(_AMOEBANET, (3, 6, 7, 8), 4, "except_last", 1.680, 1.26),
    Job(_AMOEBANET, (3, 6, 7, 8), 32, "except_last", 2.711, 1.84),
    Job(_AMOEBANET, (2, 2, 2, 2, 2, 3, 4, 7), 1, "always", 0.932, 1.38),
    Job(_AMOEBANET, (2, 2, 2, 3, 3, 4, 4, 4), 4, "except_last", 2.625, 1.72),
    Job(_AMOEBANET, (2, 2, 2, 3, 3, 4, 4, 4), 32, "except_last", 4.966, 3.48),
)
_LAYERS = {_UNET: unet, _AMOEBANET: amoebanet}
#: What speed-ups are over, in forward passes of all layers: U-Net on one GPU, and AmoebaNet-D recomputed, on two in turn.
_BASE = {_UNET: 3.0, _AMOEBANET: 4.0}


def step_seconds(forward: Sequence[float], micro_batches: int, recomputed: int) -> float:
    """Of a step in which stages take `forward` seconds for a micro-batch, and twice as long for its backward pass.

    The first micro-batches that are `recomputed` take their forward pass once more.
    """
    order = list(ticks(micro_batches, len(forward)))
    free, there = [0.0] * len(forward), [0.0] * micro_batches
    for tick in order:
        for number, stage in tick:
            free[stage] = there[number] = max(free[stage], there[number]) + forward[stage]
    there = [max(free)] * micro_batches  # the loss is of the whole batch
    for tick in reversed(order):
        for number, stage in tick:
            seconds = (3 if number < recomputed else 2) * forward[stage]
            free[stage] = there[number] = max(free[stage], there[number]) + seconds
    return max(free)


def _forward(job: Job) -> list[float]:
    """Seconds of each stage for a sample."""
    layers: list[Layer] = _LAYERS[job.model]()
    ends = list(accumulate(job.balance, initial=0))
    return [sum(each.seconds(*_P40) for each in layers[start:end]) for start, end in pairwise(ends)]


def _speed_up(job: Job, forward: Sequence[float]) -> float:
    step = step_seconds(forward, job.micro_batches, stop(job.checkpoint, job.micro_batches))
    return job.micro_batches * _BASE[job.model] * sum(forward) / step


def simulated(job: Job) -> float:
    """The speed-up by our schedule, with the stages of `job`."""
    return _speed_up(job, _forward(job))


def even(job: Job) -> float:
    """The speed-up of stages that take equally long: the bubble of ``explain()``, and recomputation."""
    stages = len(job.balance)
    passes = 3 + stop(job.checkpoint, job.micro_batches) / job.micro_batches
    return _BASE[job.model] * stages * (1 - bubble(job.micro_batches, stages)) / passes


def markdown() -> str:
    lines = [
        "| model | stages | micro-batches | published | simulated | even stages | largest stage | GPipe on TPUs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for job in PUBLISHED:
        forward = _forward(job)
        tpus = "" if job.tpus is None else f"{job.tpus:.2f}"
        lines.append(
            f"| {job.model} | {len(job.balance)} | {job.micro_batches} | {job.published:.2f} | {simulated(job):.2f} | "
            f"{even(job):.2f} | {100 * max(forward) / sum(forward):.0f} % | {tpus} |"
        )
    return "\n".join(lines)


def main() -> None:
    print(markdown())


if __name__ == "__main__":
    main()
