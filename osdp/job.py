"""The job that a choice is made for, from buckets, times of layers and the cost of the network (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from osdp.choice import Block, Hosts, Job
from overlap.plan.cost_model import CostModel
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload

__all__ = ["Sized", "TimedLayer", "job_of"]

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
    gathers: CostModel | None = None,
    *,
    ranks: int,
    room: int,
    passes: int,
    saved: Mapping[str, int] | None = None,
    per_host: int = 1,
    on_host: int = 2**62,
) -> Job:
    """The job of `buckets`, the one nearest the input first.

    `gathers`: the cost of an all-reduce on so many `ranks`, where the one on all that reduce has another `cost`. Without
    `layers`, or the `cost` of an all-reduce, nothing takes time but bytes on the wire, each a second. `saved`: the
    bytes that each block that may be computed again saves for backward, by the name of its module. Of more than one rank
    `per_host`, buckets may lie once on each host, so many bytes `on_host` at most: gathered between hosts, if there are
    several, at the pace of other gathers, and after and before a barrier, each of which takes what starting an all-reduce
    does.
    """
    if not layers or cost is None:
        work = Workload(tuple(Layer(str(n), 0.0, 0.0, (each.nbytes,)) for n, each in enumerate(buckets)))
        network, barriers = Fitted(ranks, 0.0, float(ranks > 1), float(ranks > 1)), 0.0
        spans = [Bucket(number, number, each.nbytes, each.tensors) for number, each in enumerate(buckets)]
        named = [each.modules for each in buckets]
    else:
        timed = (Layer(*layer) for layer in layers)
        work = Workload(tuple(timed), Costs(per_bucket=cost.handling))
        inside = cost if gathers is None else gathers
        network = Fitted(ranks, inside.alpha / 2, cost.beta / 2, inside.beta / 2)  # halves of an all-reduce
        barriers = 2 * cost.alpha
        spans = _spans(buckets, [name for name, *_ in layers])
        named = [(name,) for name, *_ in layers]
    found = (_block(name, nbytes, named, buckets) for name, nbytes in (saved or {}).items() if nbytes > 0)
    blocks = sorted((block for block in found if block is not None), key=lambda block: block.first)
    hosts = None
    if per_host > 1:
        several = ranks > per_host
        start, pace = (network.start, network.gather) if several else (0.0, 0.0)
        hosts = Hosts(per_host, Fitted(ranks // per_host, barriers + start, 0.0, pace), on_host)
    return Job([_name(each.modules) for each in buckets], spans, work, network, room, passes, blocks, hosts)


def _block(name: str, nbytes: int, layers: Sequence[Sequence[str]], buckets: Sequence[Sized]) -> Block | None:
    """None for one without parameters that are trained: it has no place in the order of layers."""

    def inside(modules: Sequence[str]) -> bool:
        return any(each == name or each.startswith(f"{name}.") for each in modules)

    mine = [number for number, modules in enumerate(layers) if inside(modules)]
    places = tuple(place for place, bucket in enumerate(buckets) if inside(bucket.modules))
    return Block(name, nbytes, mine[0], mine[-1], places) if mine and places else None


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
