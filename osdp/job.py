"""The job that a choice is made for, from buckets, times of layers and the cost of the network (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from osdp.choice import Job
from overlap.plan.cost_model import CostModel
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload

__all__ = ["Sized", "TimedLayer", "job_of"]

_LONGEST = 3.0  # times forward: the most that backward of a layer takes; what is measured beyond were waits

#: A layer's name, seconds of forward and backward, and the bytes of its parameters.
TimedLayer = tuple[str, float, float, tuple[int, ...]]


class Sized(NamedTuple):
    """A bucket of so many `tensors`, with the names of the modules that have them."""

    nbytes: int
    tensors: int
    modules: tuple[str, ...]


def job_of(
    buckets: Sequence[Sized],
    layers: Sequence[TimedLayer],
    cost: CostModel | None,
    *,
    ranks: int,
    room: int,
    passes: int,
) -> Job:
    """The job of `buckets`, the one nearest the input first.

    Without `layers`, or the `cost` of an all-reduce, nothing takes time but bytes on the wire, each a second.
    """
    if not layers or cost is None:
        work = Workload(tuple(Layer(str(n), 0.0, 0.0, (each.nbytes,)) for n, each in enumerate(buckets)))
        network = Fitted(ranks, 0.0, float(ranks > 1), float(ranks > 1))
        spans = [Bucket(number, number, each.nbytes, each.tensors) for number, each in enumerate(buckets)]
    else:
        timed = (Layer(name, there, min(back, _LONGEST * there), sizes) for name, there, back, sizes in layers)
        work = Workload(tuple(timed), Costs(per_bucket=cost.handling))
        network = Fitted(ranks, cost.alpha / 2, cost.beta / 2, cost.beta / 2)  # halves of an all-reduce
        spans = _spans(buckets, [name for name, *_ in layers])
    return Job([_name(each.modules) for each in buckets], spans, work, network, room, passes)


def _spans(buckets: Sequence[Sized], layers: Sequence[str]) -> list[Bucket]:
    places = {name: place for place, name in enumerate(layers)}
    spans, first = [], 0
    for each in buckets:
        mine = [places[name] for name in each.modules if name in places]
        first = max(first, min(mine, default=first))
        spans.append(Bucket(first, max([*mine, first]), each.nbytes, each.tensors))
    return spans


def _name(modules: Sequence[str]) -> str:
    """Of a bucket, by its modules."""
    first, last = modules[0] or "the model", modules[-1] or "the model"
    return first if first == last else f"{first} to {last}"
