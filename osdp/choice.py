"""Chooses how long each bucket is whole: the shortest simulated step among choices that fit (pure).

All options of a bucket but the first take its bytes when backward begins, where activations are largest:

    option                   gathers in a step of k passes
    FREED                    2 k
    FREED_AFTER_BACKWARD     k
    FREED_IN_STEP            1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osdp.search import Item, Option, best, greedy
from overlap.plan.plan import Residency
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.sharded import sharded
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.sweeps import Act, Do, Sweeps

__all__ = ["OPTIONS", "Job", "Residencies", "chosen", "step_seconds", "whole_bytes"]

OPTIONS = (Residency.FREED, Residency.FREED_AFTER_BACKWARD, Residency.FREED_IN_STEP)
_SAME = 1.001  # times that are nearer to each other than this are the same: the one with fewer bytes is taken
_LOOKS = 4  # searches, each with what the one before has left over

#: How long each bucket is whole, the one nearest the input first.
Residencies = tuple[Residency, ...]


@dataclass(frozen=True)
class Job:
    """The `buckets` of a model, the one nearest the input first, with their `names`, and what they train on.

    Beside what is used, `room` bytes may be whole. A step has so many `passes` forward and backward.
    """

    names: Sequence[str]
    buckets: Sequence[Bucket]
    work: Workload
    network: Medium
    room: int
    passes: int = 1


def _places(residencies: Residencies, residency: Residency) -> list[int]:
    return [place for place, each in enumerate(residencies) if each is residency]


def step_seconds(job: Job, residencies: Residencies) -> float:
    """The simulated seconds of a step."""
    stay, keep = (_places(residencies, each) for each in OPTIONS[1:])
    run = sharded(job.work, job.network, job.buckets, room=job.room, stay=stay, keep=keep, passes=job.passes)
    return run.step


def whole_bytes(job: Job, residencies: Residencies) -> int:
    """The most bytes of parameters that are whole where forward turns into backward, in any pass of a step."""
    nbytes = [bucket.nbytes for bucket in job.buckets]
    stay, keep = (_places(residencies, each) for each in OPTIONS[1:])
    sweeps = Sweeps(nbytes, job.room, stay=stay, keep=keep)
    there: set[int] = set()
    most = 0

    def carry_out(acts: Sequence[Do]) -> None:
        for act, place in acts:
            (there.add if act is Act.GATHER else there.discard)(place)

    for _ in range(min(job.passes, 2)):
        carry_out(sweeps.forward(trains=True))
        for place in range(len(nbytes)):
            carry_out(sweeps.use(place))
            if place == len(nbytes) - 1:
                most = max(most, sum(nbytes[each] for each in there))
            carry_out(sweeps.done(place))
        carry_out(sweeps.backward())
        for place in reversed(range(len(nbytes))):
            carry_out(sweeps.use(place))
            if place == len(nbytes) - 1:
                most = max(most, sum(nbytes[each] for each in there))
            carry_out(sweeps.done(place))
        carry_out(sweeps.backward_over())
    return most


def chosen(job: Job, spare: int, pinned: Mapping[int, Residency] | None = None) -> Residencies:
    """The choice with the shortest step that has at most `spare` bytes more whole than if all buckets were freed.

    Buckets at the places `pinned` are as they are there. Raises :class:`osdp.search.DoesNotFit` where these do not fit.
    """
    pinned = {} if pinned is None else pinned
    least = whole_bytes(job, (Residency.FREED,) * len(job.buckets))
    items = [_item(job, place, pinned.get(place)) for place in range(len(job.buckets))]
    budget, found = spare, None
    seen: dict[Residencies, float] = {}
    for _ in range(_LOOKS):
        for search in (best, greedy):
            taken = [
                options[index]
                for options, index in zip(_kinds(job, pinned), search(items, budget).options, strict=True)
            ]
            for residencies in _arrangements(items, taken):
                if residencies not in seen and whole_bytes(job, residencies) - least <= spare:
                    seen[residencies] = step_seconds(job, residencies)
        if not seen:
            break
        found = _shortest(job, seen)
        left = spare - (whole_bytes(job, found) - least)
        if left < min(
            (bucket.nbytes for place, bucket in enumerate(job.buckets) if place not in pinned), default=left + 1
        ):
            break
        budget += left
    if found is None:  # what is pinned, and nothing else: it fits, or the search had raised
        found = tuple(pinned.get(place, Residency.FREED) for place in range(len(job.buckets)))
    return _topped_up(job, found, spare + least, pinned)


def _topped_up(job: Job, residencies: Residencies, most: int, pinned: Mapping[int, Residency]) -> Residencies:
    """`residencies`, with more buckets kept, the largest first, while at most `most` bytes are whole.

    What is gathered ahead, and what stays after forward by itself, depends on who is kept, so room may be left.
    """
    kept = Residency.FREED_AFTER_BACKWARD if job.passes == 1 else Residency.FREED_IN_STEP
    freed = [place for place in _places(residencies, Residency.FREED) if place not in pinned]
    for place in sorted(freed, key=lambda place: -job.buckets[place].nbytes):
        more = (*residencies[:place], kept, *residencies[place + 1 :])
        if whole_bytes(job, more) <= most:
            residencies = more
    return residencies


def _kinds(job: Job, pinned: Mapping[int, Residency]) -> list[tuple[Residency, ...]]:
    return [(pinned[place],) if place in pinned else OPTIONS for place in range(len(job.buckets))]


def _item(job: Job, place: int, pinned: Residency | None) -> Item:
    nbytes, wire = job.buckets[place].nbytes, job.network.all_gather(job.buckets[place].nbytes).seconds
    options = {
        Residency.FREED: Option(0, 2 * job.passes * wire),
        Residency.FREED_AFTER_BACKWARD: Option(nbytes, job.passes * wire),
        Residency.FREED_IN_STEP: Option(nbytes, wire),
    }
    return Item(job.names[place], tuple(options[each] for each in (OPTIONS if pinned is None else (pinned,))))


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


def _shortest(job: Job, seen: Mapping[Residencies, float]) -> Residencies:
    fastest = min(seen.values())
    same = [residencies for residencies, seconds in seen.items() if seconds <= _SAME * fastest]
    return min(same, key=lambda residencies: (whole_bytes(job, residencies), seen[residencies]))
