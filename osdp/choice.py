"""Chooses how long each bucket is whole, and which blocks are computed again: the shortest simulated step that fits (pure).

All options of a bucket but the first take its bytes when backward begins, where activations are largest:

    option                   gathers in a step of k passes
    FREED                    2 k
    FREED_AFTER_BACKWARD     k
    FREED_IN_STEP            1
    FREED_IN_STEP_ON_HOST    1, by each rank what those in its place on other hosts own

The last one is there for buckets that may lie once on each host, which takes a rank's part of their bytes, at any time.

What a block has saved for backward is there until backward has gone through it. If the block is computed again instead, it
is there only then, when what the blocks behind it have saved is gone; its buckets are whole together for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from osdp.search import DoesNotFit, Item, Option, best, greedy
from overlap.plan.plan import Residency
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.sharded import sharded
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.sweeps import Act, Do, Sweeps

__all__ = [
    "OPTIONS",
    "Block",
    "Choice",
    "Hosts",
    "Job",
    "Residencies",
    "chosen",
    "on_host_bytes",
    "simulated",
    "smallest",
    "step_seconds",
    "whole_bytes",
]

OPTIONS = (Residency.FREED, Residency.FREED_AFTER_BACKWARD, Residency.FREED_IN_STEP)
_ON_HOST = Residency.FREED_IN_STEP_ON_HOST
_SAME = 1.001  # times that are nearer to each other than this are the same: the one with fewer bytes is taken
_LOOKS = 4  # searches, each with what the one before has left over
_WEIGHTS = (
    1.0,
    1e-3,
)  # of what is on the wire, where blocks may be computed again: it may be hidden, which these are not

#: How long each bucket is whole, the one nearest the input first.
Residencies = tuple[Residency, ...]


@dataclass(frozen=True)
class Block:
    """Layers `first` to `last` of the work, which backward may compute again; they use the buckets at `places`.

    `nbytes`: of what they save for backward in a pass.
    """

    name: str
    nbytes: int
    first: int
    last: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Hosts:
    """Where buckets may lie once on each host of `ranks` ranks, `room` bytes of them at most.

    `network`: what it costs to gather them there.
    """

    ranks: int
    network: Medium
    room: int = 2**62


@dataclass(frozen=True)
class Job:
    """The `buckets` of a model, the one nearest the input first, with their `names`, and what they train on.

    Beside what is used, `room` bytes may be whole. A step has so many `passes` forward and backward. `blocks`, the one
    nearest the input first, may be computed again. On `hosts`, where there are any, buckets may lie once.
    """

    names: Sequence[str]
    buckets: Sequence[Bucket]
    work: Workload
    network: Medium
    room: int
    passes: int = 1
    blocks: Sequence[Block] = ()
    hosts: Hosts | None = None

    @property
    def options(self) -> tuple[Residency, ...]:
        """Those of each bucket."""
        return OPTIONS if self.hosts is None else (*OPTIONS, _ON_HOST)

    def part(self, place: int) -> int:
        """The bytes that a rank takes of a bucket that lies on its host."""
        return self.buckets[place].nbytes // (1 if self.hosts is None else self.hosts.ranks)


class Choice(NamedTuple):
    """How long each bucket is whole, and the numbers of the blocks that are computed again."""

    residencies: Residencies
    recomputed: tuple[int, ...] = ()


def _places(residencies: Residencies, residency: Residency) -> list[int]:
    return [place for place, each in enumerate(residencies) if each is residency]


def step_seconds(job: Job, residencies: Residencies, recomputed: Collection[int] = ()) -> float:
    """The simulated seconds of a step."""
    return simulated(job, residencies, recomputed).step


def simulated(job: Job, residencies: Residencies, recomputed: Collection[int] = ()) -> Run:
    stay, keep, on_host = _kept(residencies)
    apart = {} if job.hosts is None else {n: job.hosts.network.all_gather(job.buckets[n].nbytes) for n in on_host}
    again = [(job.blocks[number].first, job.blocks[number].last) for number in recomputed]
    return sharded(
        job.work,
        job.network,
        job.buckets,
        room=job.room,
        stay=stay,
        keep=keep + on_host,
        passes=job.passes,
        again=again,
        apart=apart,
    )


def _kept(residencies: Residencies) -> tuple[list[int], list[int], list[int]]:
    """The places of buckets that stay until backward, that are kept until the step, and that are so on their host."""
    stay, keep, on_host = (_places(residencies, each) for each in (*OPTIONS[1:], _ON_HOST))
    return stay, keep, on_host


def on_host_bytes(job: Job, residencies: Residencies) -> int:
    """The bytes that a rank takes of buckets that lie on its host."""
    return sum(map(job.part, _places(residencies, _ON_HOST)))


def whole_bytes(job: Job, residencies: Residencies, recomputed: Collection[int] = ()) -> int:
    """The most bytes of whole parameters and of what blocks have saved, in any pass of a step.

    Where forward turns into backward; and where a block is computed again, with gradients that are on their way then.
    """
    return max(_taken(job, residencies, recomputed), default=0)


def _taken(job: Job, residencies: Residencies, recomputed: Collection[int]) -> Iterator[int]:
    nbytes = [bucket.nbytes for bucket in job.buckets]
    stay, keep, on_host = _kept(residencies)
    sweeps = Sweeps(nbytes, job.room, stay=stay, keep=keep + on_host)
    always = on_host_bytes(job, residencies)
    there: set[int] = set()
    saved = [0 if number in recomputed else block.nbytes for number, block in enumerate(job.blocks)]
    again: dict[int, list[int]] = {}  # by the bucket that backward comes to first
    for number in sorted(recomputed, reverse=True):
        again.setdefault(max(job.blocks[number].places), []).append(number)

    def carry_out(acts: Sequence[Do]) -> None:
        for act, place in acts:
            (there.add if act is Act.GATHER else there.discard)(place)

    def whole() -> int:
        return always + sum(nbytes[each] for each in there.difference(on_host))

    for _ in range(min(job.passes, 2)):
        carry_out(sweeps.forward(trains=True))
        for place in range(len(nbytes)):
            carry_out(sweeps.use(place))
            if place == len(nbytes) - 1:
                yield whole() + sum(saved)
            carry_out(sweeps.done(place))
        carry_out(sweeps.backward())
        for place in reversed(range(len(nbytes))):
            carry_out(sweeps.use(place))
            if place == len(nbytes) - 1:
                yield whole() + sum(saved)
            for number in again.get(place, ()):
                for each in job.blocks[number].places[::-1]:
                    carry_out(sweeps.use(each))
                gradients = min(job.room, sum(nbytes[place + 1 :]))
                yield whole() + sum(saved[:number]) + job.blocks[number].nbytes + gradients
            carry_out(sweeps.done(place))
        carry_out(sweeps.backward_over())


def smallest(job: Job, pinned: Mapping[int, Residency] | None = None) -> Choice:
    """The choice that takes the fewest bytes; buckets at the places `pinned` are as they are there."""
    residencies = tuple((pinned or {}).get(place, Residency.FREED) for place in range(len(job.buckets)))
    found = [Choice(residencies, tuple(range(end))) for end in range(len(job.blocks) + 1)]
    return min(found, key=lambda choice: whole_bytes(job, *choice))


def chosen(job: Job, spare: int, pinned: Mapping[int, Residency] | None = None, spare_in_step: int = 2**62) -> Choice:
    """The choice with the shortest step that takes at most `spare` bytes more than if all buckets were freed.

    Then no block is computed again. Buckets at the places `pinned` are as they are there. What lies on hosts takes at most
    `spare_in_step` bytes. Raises :class:`osdp.search.DoesNotFit` where not even the smallest choice fits.
    """
    if not job.buckets:  # of nothing that is freed
        return Choice((), ())
    pinned = {} if pinned is None else pinned
    most = spare + whole_bytes(job, (Residency.FREED,) * len(job.buckets))
    found, budget = smallest(job, pinned), spare + sum(block.nbytes for block in job.blocks)
    room = 0 if job.hosts is None else min(job.hosts.room, spare_in_step * job.hosts.ranks)
    seen = {found: step_seconds(job, *found)}
    short = whole_bytes(job, *found) - most
    if short > 0:
        raise DoesNotFit.by(spare + short, spare, job.names, [bucket.nbytes for bucket in job.buckets])
    for _ in range(_LOOKS):
        over = []
        for residencies, recomputed in _searched(job, pinned, budget):
            choice = Choice(_within(job, residencies, room), recomputed)
            more = whole_bytes(job, *choice) - most
            if more > 0:
                over.append(more)
            elif choice not in seen:
                seen[choice] = step_seconds(job, *choice)
        before, found = found, _shortest(job, seen)
        if found == before and over:
            budget -= min(over)
            continue
        left = most - whole_bytes(job, *found)
        if left < min((each.nbytes for place, each in enumerate(job.buckets) if place not in pinned), default=left + 1):
            break
        budget += left
    return _topped_up(job, found, most, pinned, room)


def _within(job: Job, residencies: Residencies, room: int) -> Residencies:
    """`residencies`, of which so many buckets lie on hosts as `room` bytes hold; the others are freed."""
    found = list(residencies)
    for place in _places(residencies, _ON_HOST):
        room -= job.buckets[place].nbytes
        if room < 0:
            room += job.buckets[place].nbytes
            found[place] = Residency.FREED
    return tuple(found)


def _searched(job: Job, pinned: Mapping[int, Residency], budget: int) -> Iterator[Choice]:
    """What may be best within `budget` bytes, by the sum of seconds."""
    buckets = len(job.buckets)
    kinds = [(pinned[place],) if place in pinned else job.options for place in range(buckets)]
    for weight in _WEIGHTS if job.blocks else _WEIGHTS[:1]:
        items = [_item(job, place, pinned.get(place), weight) for place in range(buckets)]
        blocks = [_block_item(job, block) for block in job.blocks]
        for search in (best, greedy):
            try:
                options = search([*items, *blocks], budget).options
            except DoesNotFit:
                continue
            taken = [kind[index] for kind, index in zip(kinds, options[:buckets], strict=True)]
            again = [number for number, index in enumerate(options[buckets:]) if index]
            for recomputed in dict.fromkeys((tuple(again), _nearest_the_input(blocks, again))):
                for residencies in _arrangements(items, taken):
                    yield Choice(residencies, recomputed)


def _topped_up(job: Job, choice: Choice, most: int, pinned: Mapping[int, Residency], room: int) -> Choice:
    """`choice`, with fewer blocks computed again and more buckets kept, while at most `most` bytes are taken.

    The longest block, and the largest bucket, come first. What is gathered ahead, and what stays after forward by itself,
    depends on who is kept, so room may be left. On hosts lie at most `room` bytes, and where they make no step longer.
    """
    seconds = [_seconds(job, block) for block in job.blocks]
    for number in sorted(choice.recomputed, key=lambda number: -seconds[number]):
        fewer = Choice(choice.residencies, tuple(each for each in choice.recomputed if each != number))
        if whole_bytes(job, *fewer) <= most:
            choice = fewer
    kept = Residency.FREED_AFTER_BACKWARD if job.passes == 1 else Residency.FREED_IN_STEP
    freed = [place for place in _places(choice.residencies, Residency.FREED) if place not in pinned]
    for place in sorted(freed, key=lambda place: -job.buckets[place].nbytes):
        for residency in (*job.options[len(OPTIONS) :], kept):
            before, after = choice.residencies[:place], choice.residencies[place + 1 :]
            more = Choice((*before, residency, *after), choice.recomputed)
            fits = whole_bytes(job, *more) <= most and more.residencies == _within(job, more.residencies, room)
            if fits and (residency is kept or step_seconds(job, *more) <= _SAME * step_seconds(job, *choice)):
                choice = more
                break
    return choice


def _item(job: Job, place: int, pinned: Residency | None, weight: float) -> Item:
    nbytes, wire = job.buckets[place].nbytes, weight * job.network.all_gather(job.buckets[place].nbytes).seconds
    options = {
        Residency.FREED: Option(0, 2 * job.passes * wire),
        Residency.FREED_AFTER_BACKWARD: Option(nbytes, job.passes * wire),
        Residency.FREED_IN_STEP: Option(nbytes, wire),
    }
    if job.hosts is not None:
        options[_ON_HOST] = Option(job.part(place), weight * job.hosts.network.all_gather(nbytes).seconds)
    return Item(job.names[place], tuple(options[each] for each in (job.options if pinned is None else (pinned,))))


def _block_item(job: Job, block: Block) -> Item:
    again = job.passes * _seconds(job, block)
    if not again:  # times are not known: only where nothing else fits
        again = 1.0 + sum(2 * job.passes * job.network.all_gather(bucket.nbytes).seconds for bucket in job.buckets)
    return Item(block.name, (Option(block.nbytes, 0.0), Option(0, again, block.nbytes)))


def _seconds(job: Job, block: Block) -> float:
    return sum(layer.forward for layer in job.work.layers[block.first : block.last + 1])


def _nearest_the_input(items: Sequence[Item], again: Sequence[int]) -> tuple[int, ...]:
    """As many of equal blocks as are computed `again`, those that backward comes to last."""
    alike: dict[tuple[Option, ...], list[int]] = {}
    for number, item in enumerate(items):
        alike.setdefault(item.options, []).append(number)
    found = (numbers[: sum(number in again for number in numbers)] for numbers in alike.values())
    return tuple(sorted(number for numbers in found for number in numbers))


def _arrangements(items: Sequence[Item], taken: Sequence[Residency]) -> list[Residencies]:
    """`taken`, and the same with what equal items have exchanged: those kept nearest the input, nearest the output, spread.

    They have as many bytes on the wire; how much of these is hidden differs.
    """
    alike: dict[tuple[Option, ...], list[int]] = {}
    for place, item in enumerate(items):
        alike.setdefault(item.options, []).append(place)
    found = [tuple(taken)]
    for way in ("input", "output", "spread"):
        arranged = list(taken)
        for places in alike.values():
            kept = [taken[place] for place in places if taken[place] is not Residency.FREED]
            order = places if way == "input" else places[::-1]
            if way == "spread" and kept:
                order = [places[number * len(places) // len(kept)] for number in range(len(kept))]
            for place in places:
                arranged[place] = Residency.FREED if kept or len(items[place].options) > 1 else taken[place]
            for place, residency in zip(order, kept, strict=False):
                arranged[place] = residency
        found.append(tuple(arranged))
    return found


def _shortest(job: Job, seen: Mapping[Choice, float]) -> Choice:
    fastest = min(seen.values())
    same = [choice for choice, seconds in seen.items() if seconds <= _SAME * fastest]
    return min(same, key=lambda choice: (len(choice.recomputed), whole_bytes(job, *choice), seen[choice]))
