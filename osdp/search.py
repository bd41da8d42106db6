"""Chooses one option for each item so that the sum of seconds is least and the sum of bytes stays within a limit (pure).

The multiple-choice knapsack. Items are added one after the other to states (bytes, seconds) of those before; a state goes
where another one takes no more of both, or where even parts of options (the linear relaxation of the items that are left)
would not make it better than the best choice so far. Equal items lead to equal states, so that many of them cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy

__all__ = ["Choice", "DoesNotFit", "Item", "Option", "best", "greedy"]

_STATES = 8_000  # more of them are thinned out; see `best`
_ROUNDING = 1e-12
_NAMED = 3  # of the largest items


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """What an item takes with this option: `nbytes` of memory and `seconds` of a step.

    For a moment, in which none of the items behind it take anything, it takes `peak` bytes, if these are more: at most as
    many as any other option of the item.
    """

    nbytes: int
    seconds: float
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """Something of which one of the `options` is chosen."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The index of an option for each item, with the sums. No choice takes less than `bound` seconds."""

    options: tuple[int, ...]
    nbytes: int
    seconds: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no other choice is faster."""
        return self.seconds <= self.bound * (1 + 1e-9)


class DoesNotFit(ValueError):
    """Even the smallest options take `short` bytes more than the limit."""

    def __init__(self, message: str, short: int) -> None:
        super().__init__(message)
        self.short = short

    @classmethod
    def by(cls, least: int, limit: int, names: Sequence[str], sizes: Sequence[int]) -> DoesNotFit:
        """`least` bytes are needed; what has these `names` takes so many of them."""
        largest = sorted(zip(sizes, names, strict=True), reverse=True)[:_NAMED]
        named = ", ".join(f"{name} {size / 2**20:,.1f} MB" for size, name in largest)
        return cls(
            f"the limit is {limit / 2**20:,.1f} MB, and {least / 2**20:,.1f} MB are needed at least, "
            f"{(least - limit) / 2**20:,.1f} MB more; the largest: {named}",
            least - limit,
        )


def _least(item: Item) -> int:
    return min(option.nbytes for option in item.options)


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """From one option of an item to the next on the lower hull: so many more bytes for so many seconds less."""

    item: int
    option: int
    nbytes: int
    saved: float


def _frontier(item: Item) -> list[int]:
    """The options that no other one beats in both, the smallest first."""
    options = item.options
    found: list[int] = []
    for index in sorted(range(len(options)), key=lambda index: (options[index].nbytes, options[index].seconds)):
        if not found or options[index].seconds < options[found[-1]].seconds:
            found.append(index)
    return found


def _hull(item: Item, frontier: Sequence[int]) -> list[int]:
    """Those of the frontier between which no mixture of others is better."""
    hull: list[int] = []
    for index in frontier:
        new = item.options[index]
        while len(hull) > 1:
            first, last = item.options[hull[-2]], item.options[hull[-1]]
            if (first.seconds - last.seconds) * (new.nbytes - last.nbytes) > (last.seconds - new.seconds) * (
                last.nbytes - first.nbytes
            ):
                break
            hull.pop()
        hull.append(index)
    return hull


def _upgrades(items: Sequence[Item], frontiers: Sequence[Sequence[int]]) -> list[_Upgrade]:
    """All of them, those that save most seconds per byte first; of one item in the order of its hull."""
    found: list[_Upgrade] = []
    for number, item in enumerate(items):
        hull = _hull(item, frontiers[number])
        for before, after in pairwise(hull):
            small, large = item.options[before], item.options[after]
            found.append(_Upgrade(number, after, large.nbytes - small.nbytes, small.seconds - large.seconds))
    found.sort(key=lambda one: -one.saved / one.nbytes)
    return found


def _filled(
    chosen: list[int],
    upgrades: Sequence[_Upgrade],
    room: int,
    since: int = 0,
    fits: Callable[[list[int]], bool] = lambda _chosen: True,
) -> int:
    """Make the `upgrades` of items from `since` on that fit into `room`, in their order. Returns the room that is left."""
    stuck: set[int] = set()
    for one in upgrades:
        if one.item < since or one.item in stuck:
            continue
        if one.nbytes > room:
            stuck.add(one.item)
            continue
        before, chosen[one.item] = chosen[one.item], one.option
        if not fits(chosen):
            chosen[one.item] = before
            stuck.add(one.item)
            continue
        room -= one.nbytes
    return room


def _needed(items: Sequence[Item], chosen: Sequence[int]) -> int:
    """The most bytes at any moment."""
    taken = most = 0
    for item, index in zip(items, chosen, strict=True):
        option = item.options[index]
        most = max(most, taken + option.peak)
        taken += option.nbytes
    return max(most, taken)


def _sums(items: Sequence[Item], chosen: Sequence[int]) -> tuple[int, float]:
    options = [item.options[index] for item, index in zip(items, chosen, strict=True)]
    return sum(option.nbytes for option in options), sum(option.seconds for option in options)


def greedy(items: Sequence[Item], limit: int) -> Choice:
    """Take the smallest options, then larger ones by the seconds that they save per byte, as long as they fit.

    Raises :class:`DoesNotFit` where the smallest ones do not.
    """
    frontiers = [_frontier(item) for item in items]
    chosen = [frontier[0] for frontier in frontiers]
    least, seconds = _sums(items, chosen)
    needed = _needed(items, chosen)
    if needed > limit:
        sizes = [max(_least(item), *(option.peak for option in item.options)) for item in items]
        raise DoesNotFit.by(needed, limit, [item.name for item in items], sizes)
    upgrades = _upgrades(items, frontiers)
    nbytes, saved = numpy.array([(one.nbytes, one.saved) for one in upgrades]).reshape(-1, 2).T
    bound = seconds - float(_most_saved(nbytes, saved, limit - least))
    if _first_peak(items) < len(items):
        _filled(chosen, upgrades, limit - least, fits=lambda chosen: _needed(items, chosen) <= limit)
    else:
        _filled(chosen, upgrades, limit - least)
    nbytes, seconds = _sums(items, chosen)
    return Choice(tuple(chosen), nbytes, seconds, min(bound, seconds))


def _most_saved(nbytes: Any, saved: Any, room: Any) -> Any:
    """The seconds that are `saved` within `room` bytes, where a part of an upgrade counts; of several rooms at once."""
    return numpy.interp(room, numpy.append(0, numpy.cumsum(nbytes)), numpy.append(0.0, numpy.cumsum(saved)))


def best(items: Sequence[Item], limit: int, *, states: int = _STATES) -> Choice:
    """The choice that takes the fewest seconds within `limit` bytes at any moment.

    Where more than so many `states` are left, as where very many choices take nearly the same time, only the fastest of
    those that take nearly as many bytes go on; ``bound`` says how much faster another choice could be.
    Raises :class:`DoesNotFit`.
    """
    last = tuple(replace(option, nbytes=max(option.nbytes, option.peak), peak=0) for option in items[-1].options)
    ending = [*items[:-1], replace(items[-1], options=last)]  # nothing is behind it
    order = sorted(range(len(items)), key=lambda number: (-_span(ending[number]), ending[number].options))
    least = _needed(items, [_frontier(item)[0] for item in items])
    heeded: set[int] = set()  # items whose peaks count so far: to others, more items can be added in any order
    while True:
        now = [item if number in heeded else _without_peaks(item) for number, item in enumerate(ending)]
        ahead = min(heeded, default=len(items))
        ordered = [*(number for number in order if number < ahead), *range(ahead, len(items))]
        found = _best(now, ordered, limit, states) if least <= limit else greedy(items, limit)  # which raises
        over = _over(items, found.options, limit)
        if over is None:
            return replace(found, nbytes=_sums(items, found.options)[0])
        heeded.add(over)


def _without_peaks(item: Item) -> Item:
    return replace(item, options=tuple(replace(option, peak=0) for option in item.options))


def _over(items: Sequence[Item], chosen: Sequence[int], limit: int) -> int | None:
    """The last item whose peak is above the limit."""
    taken, found = 0, None
    for number, (item, index) in enumerate(zip(items, chosen, strict=True)):
        if taken + item.options[index].peak > limit:
            found = number
        taken += item.options[index].nbytes
    return found


def _best(items: Sequence[Item], order: Sequence[int], limit: int, states: int) -> Choice:
    """The same, adding items in this `order`, in which those that come after a peak are behind it."""
    ordered = [items[number] for number in order]
    frontiers = [_frontier(item) for item in ordered]
    smallest = [frontier[0] for frontier in frontiers]
    first = greedy(ordered, limit)
    found, shortest = list(first.options), first.seconds
    upgrades = _upgrades(ordered, frontiers)
    of_items, more, saved = numpy.array([(one.item, one.nbytes, one.saved) for one in upgrades]).reshape(-1, 3).T
    # What the smallest options of items from each one on take.
    behind = list(accumulate((_least(item) for item in reversed(ordered)), initial=0))[::-1]
    lasting = [item.options[index].seconds for item, index in zip(ordered, smallest, strict=True)]
    after = list(accumulate(reversed(lasting), initial=0.0))[::-1]
    nbytes, seconds = numpy.zeros(1, dtype=numpy.int64), numpy.zeros(1)
    trail: list[tuple[Any, Any]] = []  # for each item the state that it was added to, and its option
    bound = float("inf")  # of what was thinned out
    for number, item in enumerate(ordered):
        frontier = frontiers[number]
        rest_bytes, rest_seconds = behind[number + 1], after[number + 1]
        later = of_items > number
        taken, peaks = (
            numpy.array([getattr(item.options[index], name) for index in frontier], dtype=numpy.int64)
            for name in ("nbytes", "peak")
        )
        lasts = numpy.array([item.options[index].seconds for index in frontier])
        all_bytes, all_seconds = (nbytes[:, None] + taken).ravel(), (seconds[:, None] + lasts).ravel()
        room = limit - rest_bytes - all_bytes
        most = (nbytes[:, None] + peaks).ravel()
        least = all_seconds + rest_seconds - _most_saved(more[later], saved[later], numpy.maximum(room, 0))
        keep = numpy.flatnonzero((room >= 0) & (most <= limit) & (least < shortest * (1 - _ROUNDING)))
        keep = keep[numpy.lexsort((all_seconds[keep], all_bytes[keep]))]
        keep = keep[_undominated(all_seconds[keep])]
        if len(keep) > states:
            kept = _thinned(all_bytes[keep], all_seconds[keep], limit, states)
            bound = min(bound, float(numpy.delete(least[keep], kept).min(initial=numpy.inf)))
            keep = keep[kept]
        if not len(keep):
            break
        trail.append((keep // len(frontier), numpy.array(frontier)[keep % len(frontier)]))
        nbytes, seconds = all_bytes[keep], all_seconds[keep]
        promising = int(least[keep].argmin())
        chosen = [*_followed(trail, promising), *smallest[number + 1 :]]
        _filled(chosen, upgrades, int(room[keep][promising]), number + 1)
        _, total = _sums(ordered, chosen)
        if total < shortest and _needed(ordered, chosen) <= limit:
            found, shortest = chosen, total
    chosen = [0] * len(items)
    for place, option in zip(order, found, strict=True):
        chosen[place] = option
    taken_in_all, total = _sums(items, chosen)
    return Choice(tuple(chosen), taken_in_all, total, min(bound, total))


def _first_peak(items: Sequence[Item]) -> int:
    """The number of the first item that takes more for a moment."""
    peaks = (number for number, item in enumerate(items) if any(option.peak for option in item.options))
    return next(peaks, len(items))


def _span(item: Item) -> int:
    return max(option.nbytes for option in item.options) - _least(item)


def _undominated(seconds: Any) -> Any:
    """Of states in ascending order of bytes, those that are faster than all before them."""
    before = numpy.concatenate(([numpy.inf], numpy.minimum.accumulate(seconds)[:-1]))
    return numpy.flatnonzero(seconds < before)


def _thinned(nbytes: Any, seconds: Any, limit: int, states: int) -> Any:
    """At most so many `states`: the fastest in each of as many cells of bytes. They are undominated, so it is the last."""
    cells = nbytes * states // (limit + 1)
    return numpy.flatnonzero(numpy.append(cells[1:] != cells[:-1], True))


def _followed(trail: Sequence[tuple[Any, Any]], state: int) -> list[int]:
    """The options that lead to `state` after the last item of the `trail`."""
    found: list[int] = []
    for before, options in reversed(trail):
        found.append(int(options[state]))
        state = int(before[state])
    return found[::-1]
