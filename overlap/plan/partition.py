"""Decides which tensors share a bucket, and where each lies in it (pure: numbers in, frozen plans out; no torch)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "ALIGNMENT_BYTES",
    "BucketSpec",
    "TensorSpec",
    "fuse",
    "lane_of",
    "layout",
    "owned",
    "per_tensor",
    "pieces",
    "round_up",
]

# Kernels may take another path, and round differently, on operands that are not aligned as an allocation of their own
# would be. Every tensor in a bucket starts on such a boundary, so that training in buckets stays bit-identical.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The facts about a tensor that planning needs.

    Tensors of different `kind` (dtype, device, …) never share a bucket.
    """

    numel: int
    itemsize: int
    kind: Hashable = None
    owner: int | None = None  # the rank whose shard takes all of it; None: shards may cut it
    wire_itemsize: int | None = None  # of what travels instead, where gradients are compressed

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def wire_nbytes(self) -> int:
        """The bytes that a reduction of its gradient sends."""
        return self.numel * (self.wire_itemsize or self.itemsize)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The place of each tensor in a bucket's flat buffer, in elements."""

    tensors: tuple[int, ...]  # indices into the planned sequence
    offsets: tuple[int, ...]
    numel: int  # elements up to the end of the last tensor
    padded_numel: int  # a multiple of the world size where the shards are equal
    counts: tuple[int, ...] | None = None  # elements of each rank's shard; None: equal ones

    def shares(self, world_size: int) -> tuple[int, ...]:
        """The number of elements that each rank owns, in rank order."""
        return (self.padded_numel // world_size,) * world_size if self.counts is None else self.counts

    def own(self, rank: int, world_size: int) -> slice:
        """The elements that `rank` owns."""
        shares = self.shares(world_size)
        start = sum(shares[:rank])
        return slice(start, start + shares[rank])


def lane_of(shares: Sequence[int], lanes: int) -> int:
    """The communicator, of so many, that carries a bucket of such shards, so that both directions of links are used.

    Operations on one communicator follow one another. Where shards are equal, each keeps all links busy. Where one rank
    owns most of a bucket, the way from it idles in the reduction, and the ways to it in the gathering: buckets of different
    owners take different lanes. The order in each lane is the same on all ranks, since this follows the plan.
    """
    return shares.index(max(shares)) % lanes if lanes > 1 else 0


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def layout(tensors: Sequence[int], specs: Sequence[TensorSpec], world_size: int) -> BucketSpec:
    """Place `tensors` one after the other, each aligned; shards are aligned too, so their borders cost no extra line.

    Tensors that have owners are placed owner by owner, and the shards end where these change.
    """
    if not tensors:
        raise ValueError("a bucket needs at least one tensor")
    step = max(1, ALIGNMENT_BYTES // specs[tensors[0]].itemsize)
    if specs[tensors[0]].owner is not None:
        return _by_owner(tensors, specs, world_size, step)
    offsets, end = [], 0
    for index in tensors:
        offset = round_up(end, step)
        offsets.append(offset)
        end = offset + specs[index].numel
    return BucketSpec(tuple(tensors), tuple(offsets), end, round_up(max(end, 1), step * world_size))


def _by_owner(tensors: Sequence[int], specs: Sequence[TensorSpec], world_size: int, step: int) -> BucketSpec:
    placed: list[int] = []
    offsets: list[int] = []
    counts: list[int] = []
    start = end = 0
    for rank in range(world_size):
        mine = [index for index in tensors if specs[index].owner == rank]
        for index in mine:
            placed.append(index)
            offsets.append(round_up(max(start, end), step))
            end = offsets[-1] + specs[index].numel
        counts.append(round_up(max(end - start, 1), step) if mine else 0)
        start += counts[-1]
    if len(placed) != len(tensors):
        owners = [specs[index].owner for index in tensors]
        raise ValueError(f"the owners of a bucket's tensors should be ranks below {world_size} and are {owners}")
    return BucketSpec(tuple(placed), tuple(offsets), end, start, counts=tuple(counts))


def fuse(
    units: Sequence[Sequence[int]],
    specs: Sequence[TensorSpec],
    world_size: int,
    *,
    threshold_bytes: float | None = None,
    num_nearby_units: int | None = None,
) -> tuple[BucketSpec, ...]:
    """Greedy fusion of neighbouring units (a unit is the tensors of one layer), in the given order.

    A unit joins the open bucket while the bucket stays below `threshold_bytes` and holds fewer than
    `num_nearby_units` units; one larger than the threshold has a bucket of its own (DeAR, section IV). A unit whose
    tensors are of several kinds contributes to one open bucket per kind.
    """
    if threshold_bytes is not None and not threshold_bytes > 0:
        raise ValueError(f"the fusion threshold should be above 0 bytes and is {threshold_bytes}")
    if num_nearby_units is not None and num_nearby_units < 1:
        raise ValueError(f"the number of nearby layers should be at least 1 and is {num_nearby_units}")
    closed: list[tuple[int, ...]] = []
    open_buckets: dict[Hashable, tuple[list[int], int, int]] = {}  # kind -> tensors, bytes, units
    for unit in units:
        by_kind: dict[Hashable, list[int]] = {}
        for index in unit:
            by_kind.setdefault(specs[index].kind, []).append(index)
        for kind, members in by_kind.items():
            nbytes = sum(specs[index].nbytes for index in members)
            tensors, held, num_units = open_buckets.get(kind, ([], 0, 0))
            full = (threshold_bytes is not None and held + nbytes >= threshold_bytes) or (
                num_nearby_units is not None and num_units >= num_nearby_units
            )
            if tensors and full:
                closed.append(tuple(tensors))
                tensors, held, num_units = [], 0, 0
            open_buckets[kind] = (tensors + members, held + nbytes, num_units + 1)
    closed += [tuple(tensors) for tensors, _, _ in open_buckets.values() if tensors]
    first_use = {index: position for position, index in enumerate(i for unit in units for i in unit)}
    closed.sort(key=lambda tensors: first_use[tensors[0]])
    return tuple(layout(tensors, specs, world_size) for tensors in closed)


def per_tensor(order: Sequence[int], specs: Sequence[TensorSpec], world_size: int) -> tuple[BucketSpec, ...]:
    """One bucket for each tensor, in the given order (wait-free back-propagation without fusion)."""
    return tuple(layout((index,), specs, world_size) for index in order)


def owned(buckets: Sequence[BucketSpec], world_size: int) -> tuple[BucketSpec, ...]:
    """The same buckets, each owned by one rank, in turn, in the given order."""
    return tuple(
        replace(bucket, counts=tuple(bucket.padded_numel * (rank == index % world_size) for rank in range(world_size)))
        for index, bucket in enumerate(buckets)
    )


def pieces(spec: BucketSpec, numels: Sequence[int], shard: slice) -> list[tuple[int, tuple[int, int], slice]]:
    """The parts of tensors of so many elements that a shard has.

    Each with its tensor's place in ``spec.tensors``, from where to where it goes in the tensor, and where it is in the
    shard. Tensors that do not meet the shard are left out.
    """
    found = []
    for place, (offset, numel) in enumerate(zip(spec.offsets, numels, strict=True)):
        start, stop = max(offset, shard.start), min(offset + numel, shard.stop)
        if start < stop:
            found.append((place, (start - offset, stop - offset), slice(start - shard.start, stop - shard.start)))
    return found
