"""Which ranks of torch.distributed's default group the ranks of a job, or some of them, are."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.torch.groups import made_by_members

__all__ = ["Place", "default_ranks", "group_of", "place", "why_apart"]

_KEY = "dear/default_group"
# Process groups, by default group, what they are for, and ranks: each is made once.
_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()


class Place(NamedTuple):
    """Where a process is in its default group, whose processes all have the same `group`, and no others have it."""

    group: str
    rank: int
    size: int


def place() -> Place | None:
    """This process's; None without a default group. Waits for no other process: the group's store has the name."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    name = store.compare_set(_KEY, "", uuid.uuid4().hex)  # the first process's counts
    return Place(name.decode(), dist.get_rank(), dist.get_world_size())


def default_ranks(comm: Communicator, what: str) -> list[int]:
    """The ranks of `comm`, in order, by their numbers in the default group. On every rank of `comm`.

    Raises ``RuntimeError`` on all of them where they have no default group that holds them all; `what` needs it.
    """
    places: list[Place | None] = allgather_object(comm, place())
    why = why_apart(places)
    if why is not None:
        raise RuntimeError(
            f"{what} goes over torch.distributed's default group, and {why}: let init() make it, or call "
            "torch.distributed.init_process_group() on every rank of the job"
        )
    return [each.rank for each in places if each is not None]


def group_of(ranks: Sequence[int], use: str = "") -> Any:
    """The process group of these `ranks` of the default group, in ascending order. On every one of them, and on no other.

    The first call makes it, unless they are all. For a `use` there is another one, over gloo, which nothing else uses.
    """
    group, together = dist.GroupMember.WORLD, tuple(sorted(ranks))
    assert group is not None
    if not use and len(together) == dist.get_world_size():
        return group
    made = _groups.setdefault(group, {})
    if (use, together) not in made:
        backend, store = dist.distributed_c10d._world.pg_map[group]
        backend = "gloo" if use else backend
        limit = dist.distributed_c10d._get_default_timeout(dist.Backend(backend))
        name = f"dear/{use}/{'_'.join(map(str, together))}"
        made[use, together] = made_by_members(together, backend, store, name, limit)
    return made[use, together]


def why_apart(places: Sequence[Place | None]) -> str | None:
    """What is wrong with the `places` of ranks, by rank, that are to be in one default group (pure)."""
    first = places[0]
    for rank, each in enumerate(places):
        if each is None:
            return f"rank {rank} of {len(places)} has none"
        if first is not None and each.group != first.group:
            return (
                f"ranks 0 and {rank} of {len(places)} are in different ones (rank {first.rank} of {first.size}, and rank "
                f"{each.rank} of {each.size})"
            )
    return None
