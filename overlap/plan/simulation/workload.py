"""What is trained, as a schedule sees it: times and bytes of layers, and the thread's other costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from overlap.plan.simulation.cores import Cores

__all__ = ["Bucket", "Costs", "Layer", "Workload", "fused", "in_one_order", "owned", "per_tensor"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: seconds of forward and backward, and the bytes of each of its gradients."""

    name: str
    forward: float
    backward: float
    tensors: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of the training thread besides the model's own."""

    per_tensor: float = 0.0  # to hand a gradient over
    per_bucket: float = 0.0  # to issue an operation, to await it and to begin an update; half of each of both
    update: float = 0.0  # the optimizer, for each byte of parameters it updates


@dataclass(frozen=True, slots=True)
class Workload:
    """A model as layers in the order of forward. `cores`: see :func:`overlap.plan.simulation.events.run`."""

    layers: tuple[Layer, ...]
    costs: Costs = Costs()
    cores: Cores | None = None

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def alone(self) -> float:
        """The seconds of a step in one process, which updates all parameters."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.costs.update * self.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """The gradients of layers `first` to `last`, which travel together.

    `shares`: bytes of each rank; None: equal ones.
    """

    first: int
    last: int
    nbytes: int
    tensors: int
    shares: tuple[int, ...] | None = None


def fused(layers: Sequence[Layer], threshold: float) -> list[Bucket]:
    """Buckets of neighbouring layers with at most `threshold` bytes; the one nearest the input comes first.

    0: no fusion.
    """
    buckets: list[Bucket] = []
    for index, layer in enumerate(layers):
        if not layer.tensors:
            continue
        last = buckets[-1] if buckets else None
        if last is not None and last.nbytes + layer.nbytes <= threshold:
            buckets[-1] = Bucket(last.first, index, last.nbytes + layer.nbytes, last.tensors + len(layer.tensors))
        else:
            buckets.append(Bucket(index, index, layer.nbytes, len(layer.tensors)))
    return buckets


def owned(layers: Sequence[Layer], buckets: Sequence[Bucket], owners: Sequence[int], ranks: int) -> list[Bucket]:
    """The same buckets, with the shares of so many ranks; `owners` has every tensor's, in the order of forward."""
    by_layer: list[list[int]] = []
    places = iter(owners)
    for layer in layers:
        held = [0] * ranks
        for nbytes in layer.tensors:
            held[next(places)] += nbytes
        by_layer.append(held)
    return [
        replace(one, shares=tuple(map(sum, zip(*by_layer[one.first : one.last + 1], strict=True)))) for one in buckets
    ]


def per_tensor(layers: Sequence[Layer]) -> list[Bucket]:
    """A bucket for each tensor, in the order in which gradients arrive: the last layer's last one first."""
    found = [Bucket(index, index, size, 1) for index, layer in enumerate(layers) for size in layer.tensors]
    return found[::-1]


def in_one_order(layers: Sequence[Layer], cap: float, first: float) -> list[Bucket]:
    """Buckets as DDP makes them: in order of arrival, closed at `cap` bytes, the first one at `first`."""
    return list(_closed(per_tensor(layers), cap, first))


def _closed(tensors: Iterable[Bucket], cap: float, first: float) -> Iterable[Bucket]:
    open: Bucket | None = None
    limit = first
    for tensor in tensors:
        more = Bucket(tensor.first, tensor.last, 0, 0) if open is None else open
        open = Bucket(tensor.first, more.last, more.nbytes + tensor.nbytes, more.tensors + 1)
        if open.nbytes >= limit:
            yield open
            open, limit = None, cap
    if open is not None:
        yield open
