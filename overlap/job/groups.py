"""The ranks among which an optimizer reduces, all of the job or a process set, and among which it divides shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypeAlias

from overlap.job.levels import Levels
from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import Session
from overlap.job.two_levels import between_hosts
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object

__all__ = ["Membership", "ShardGroups", "beside", "divided", "interleaved", "leader", "membership"]

#: Among which ranks shards are divided: so many neighbours, those of a host, or these groups of ranks; None: all.
ShardGroups: TypeAlias = int | Literal["host"] | Sequence[Sequence[int]] | None
_NONE = "shard_group should be a number of ranks, 'host' or groups of ranks and is {!r}"


@dataclass(frozen=True)
class Groups:
    """Groups within which shards are divided: the communicator of this rank's, and the ranks that it has in the job.

    `comm` connects all members.
    """

    comm: Communicator
    mine: Communicator
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Membership:
    """The communicators of an optimizer: for reductions, for all-gathers, and for what follows the script's calls.

    `everyone` connects all ranks whose parameters start alike: the members, by `calls`, or several such groups. In
    `groups`, shards are divided within each, whose ranks `gathers` connect. With a `host`, the communicator of this
    host's ranks, `gathers` have an all-gather among ranks of the same place on their hosts; or `lines` do, beside
    `gathers` among all. `post_forward` connects some neighbours of the :attr:`holders`, among which parameters are sharded
    from forward to backward.
    """

    reductions: tuple[Communicator, ...]
    gathers: tuple[Communicator, ...]
    calls: Communicator
    ranks: tuple[int, ...]
    everyone: Communicator
    groups: Groups | None = None
    host: Communicator | None = None
    lines: Communicator | None = None
    post_forward: Communicator | None = None

    @property
    def comm(self) -> Communicator:
        """The communicator for everything else that members tell each other."""
        return self.reductions[0] if self.groups is None else self.groups.comm

    @property
    def shards(self) -> Communicator:
        """The communicator of the ranks among which shards are divided."""
        return self.comm if self.groups is None else self.groups.mine

    @property
    def holders(self) -> tuple[int, ...]:
        """Their ranks in the job: each value of a shard is on one of them."""
        return self.ranks if self.groups is None else self.groups.ranks


def membership(
    session: Session,
    process_set: ProcessSet,
    *,
    sharding: bool,
    lanes: int = 1,
    shard_group: ShardGroups = None,
    two_level: ShardGroups = None,
    on_host: bool = False,
    some_on_host: bool = False,
    post_forward_ranks: int | None = None,
) -> Membership:
    """The communicators for an optimizer over `process_set`. On every rank of the job, with its own set or the same.

    `lanes` of each kind. A rank outside of the set it gives trains alone. With a `shard_group`, shards are divided within
    groups. `two_level`: operations go in two levels, within these groups and between them; None: as
    `overlap.job.two_levels` decides for all ranks of the job. `on_host`: whole parameters lie once on each host; then
    shards are in the order of :func:`interleaved`. `some_on_host`: some of them do. `post_forward_ranks`: the size of that
    group, a divisor of the number of ranks that share shards; on all ranks of the job, or None on all. Raises
    ``ValueError`` for a set that is not registered, and for groups, or hosts, that do not divide its ranks.
    """
    if on_host or some_on_host:
        return _on_hosts(session, process_set, some=some_on_host)
    if shard_group is None or not sharding:
        found = _members(session, process_set, sharding=sharding, lanes=lanes, two_level=two_level)
    else:
        found = _in_groups(session, process_set, shard_group, lanes)
    if post_forward_ranks is None:
        return found
    return replace(found, post_forward=_neighbours(session, found, post_forward_ranks))


def _neighbours(session: Session, members: Membership, number: int) -> Communicator:
    """Connects the block of so many of the holders that this rank is in. On every rank of the job."""
    holders = members.holders
    place = holders.index(session.comm.rank) // number * number
    mine = holders[place : place + number]
    if len(members.ranks) < session.comm.size:
        return session.subset(mine[0] if len(mine) > 1 else None)
    (comm,) = session.channels.lease(1, allgather_object(session.control, mine[0]))
    return comm


def divided(
    ranks: Sequence[int], wish: ShardGroups, hosts: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, ...], ...]:
    """The groups of `ranks` of the job among which shards are divided, all of one size; `hosts` have these ranks (pure).

    Raises ``ValueError`` where the `wish` gives no such groups.
    """
    if wish is None:
        return (tuple(ranks),)
    what = f"shard_group={wish!r}"
    groups: Sequence[Any]
    if isinstance(wish, str):
        if wish != "host":
            raise ValueError(_NONE.format(wish))
        there = ([rank for rank in host if rank in ranks] for host in hosts)
        groups = [host for host in there if host]
    elif isinstance(wish, Integral) and not isinstance(wish, bool):
        size = int(wish)
        if size < 1 or len(ranks) % size:
            raise ValueError(f"{what} does not divide the {len(ranks)} ranks: give a divisor of {len(ranks)}")
        groups = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    elif isinstance(wish, Sequence):
        groups = wish
    else:
        raise ValueError(_NONE.format(wish))
    if len({len(group) for group in groups}) != 1:
        sizes = ", ".join(str(len(group)) for group in groups)
        raise ValueError(
            f"{what} makes groups of {sizes} ranks, and shards need groups of one size: give a number of ranks"
        )
    if sorted(rank for group in groups for rank in group) != sorted(ranks):
        raise ValueError(f"{what} should have each of the ranks {list(ranks)} once")
    return tuple(tuple(sorted(group)) for group in groups)  # shards are in the order of ranks


def _in_groups(session: Session, process_set: ProcessSet, wish: ShardGroups, lanes: int) -> Membership:
    """Members whose shards are divided within groups of them. On every rank of the job."""
    members = _members(session, process_set, sharding=False)
    groups = _agreed(session, members.ranks, wish)
    mine = next(group for group in groups if session.comm.rank in group)
    if len(members.ranks) == session.comm.size:
        numbers = {rank: number for number, group in enumerate(groups) for rank in group}
        reductions = session.channels.lease(lanes, levels=Levels("hybrid", groups))
        *gathers, inside = session.channels.lease(lanes + 1, [numbers[rank] for rank in members.ranks])
    else:
        color = process_set.process_set_id if len(members.ranks) > 1 else None
        levels = Levels("hybrid", _places(members.ranks, groups))
        reductions = [_subset(session, color, levels) for _ in range(lanes)]
        *gathers, inside = (session.subset(mine[0] if len(mine) > 1 else None) for _ in range(lanes + 1))
    comm = members.comm
    return replace(members, reductions=tuple(reductions), gathers=tuple(gathers), groups=Groups(comm, inside, mine))


def interleaved(hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks of `hosts`: the first ones of all hosts, then the second ones, … (pure).

    Raises ``ValueError`` for hosts on which ranks share nothing, or of several sizes.
    """
    sizes = [len(host) for host in hosts]
    if len(set(sizes)) != 1:
        raise ValueError(
            f"residency='host' needs as many ranks on every host, and hosts have {', '.join(map(str, sizes))}: start "
            "the job so, or leave it out"
        )
    if sizes[0] == 1 < len(hosts):
        raise ValueError(
            f"residency='host' is for ranks that share a host, and each of the {len(hosts)} hosts has one: leave it out, "
            "or use strategy='fsdp', which divides parameters among hosts"
        )
    return tuple(rank for line in zip(*hosts, strict=True) for rank in line)


def _on_hosts(session: Session, process_set: ProcessSet, *, some: bool) -> Membership:
    """All ranks of the job, for parameters that lie once on each host, or of which `some` do. On every rank of the job.

    What all ranks gather goes in two levels then: in one, ranks in this order would send it between hosts again and again.
    """
    if process_set is not global_process_set and process_set.process_set_id != 0:
        raise ValueError(
            f"residency='host' is for all ranks of the job so far, and {process_set} is given: leave one of them out"
        )
    hosts, members = session.hosts, _members(session, process_set, sharding=False)
    order = interleaved(hosts)
    if len(order) == 1:
        return replace(members, host=members.comm)
    number = {rank: place for place, rank in enumerate(order)}
    two_levels = len(hosts) > 1 and (some or between_hosts(session) is not None)
    groups = tuple(tuple(number[rank] for rank in host) for host in hosts) if two_levels else ()
    reductions, *whole = session.channels.lease(1 + some, levels=Levels("two_level", groups, order))
    (lines,) = session.channels.lease(1, levels=Levels("hybrid", tuple(zip(*hosts, strict=True))))
    host_of = {rank: place for place, host in enumerate(hosts) for rank in host}
    (inside,) = session.channels.lease(1, [host_of[rank] for rank in range(len(order))])
    shards = Groups(members.comm, reductions, order)
    gathers = tuple(whole) if some else (lines,)
    return replace(
        members,
        reductions=(reductions,),
        gathers=gathers,
        groups=shards,
        host=inside,
        lines=lines if some else None,
    )


def _agreed(session: Session, ranks: Sequence[int], wish: ShardGroups) -> tuple[tuple[int, ...], ...]:
    """The groups of `ranks` of the job; raises on every rank of the job what one finds wrong with its own."""
    groups: tuple[tuple[int, ...], ...] = ((session.comm.rank,),)
    why = ""
    try:
        if len(ranks) > 1:
            groups = divided(ranks, wish, session.hosts)
    except ValueError as error:
        why = str(error)
    found = [each for each in allgather_object(session.control, why) if each]
    if found:
        raise ValueError(found[0])
    return groups


def _members(
    session: Session, process_set: ProcessSet, *, sharding: bool, lanes: int = 1, two_level: ShardGroups = None
) -> Membership:
    number = process_set.process_set_id
    if process_set is global_process_set or number == 0:
        ranks = tuple(range(session.comm.size))
        levels = between_hosts(session) if two_level is None else _two_levels(_agreed(session, ranks, two_level))
        # All-gathers have a channel of their own: whoever waits for a reduction is not behind them.
        count = 2 * lanes if sharding else 1
        if levels is None:
            *data, calls = session.channels.lease(count + 1)
        else:
            (calls,), data = session.channels.lease(1), session.channels.lease(count, levels=levels)
        reductions, gathers = (data[:lanes], data[lanes:]) if sharding else (data, data)
        return Membership(tuple(reductions), tuple(gathers), calls, ranks, calls)
    if number is None:
        raise ValueError(f"{process_set} is not registered: pass it to init(process_sets=…) or to add_process_set()")
    mine = process_set.ranks if process_set.included() and process_set.ranks is not None else [session.comm.rank]
    color = number if process_set.included() else None
    calls = session.subset(color)
    levels = None if two_level is None else _two_levels(_places(mine, _agreed(session, mine, two_level)))
    if not sharding:
        one = (_subset(session, color, levels),)
        return Membership(one, one, calls, tuple(mine), calls)
    halves = [tuple(_subset(session, color, levels) for _ in range(lanes)) for _ in range(2)]
    return Membership(halves[0], halves[1], calls, tuple(mine), calls)


def _two_levels(groups: tuple[tuple[int, ...], ...]) -> Levels | None:
    return Levels("two_level", groups) if len(groups) > 1 and len(groups[0]) > 1 else None


def _places(ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The `groups` of `ranks` of the job, by their places among these."""
    place = {rank: place for place, rank in enumerate(ranks)}
    return tuple(tuple(place[rank] for rank in group) for group in groups)


def _subset(session: Session, color: int | None, levels: Levels | None) -> Communicator:
    comm = session.subset(color)
    if levels is None:
        return comm
    comm = levels.over(comm)
    session.watchdog.watch(comm)
    session.adopt(comm)
    return comm


def beside(session: Session, process_set: ProcessSet) -> Communicator:
    """A communicator for what the members tell each other beside training, in an order of its own.

    On every rank of the job, as above.
    """
    if process_set is global_process_set or process_set.process_set_id == 0:
        return session.comm
    return session.subset(process_set.process_set_id if process_set.included() else None)


def leader(process_set: ProcessSet, rank: int) -> int:
    """The first of the members that `rank` of the job belongs to, which decides for them."""
    return process_set.ranks[0] if process_set.included() and process_set.ranks else rank
