"""The search against all choices there are, at sizes where they can be counted, and its work where they cannot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from osdp import search
from osdp.search import Choice, DoesNotFit, Item, Option, best, greedy

MB = 2**20


def _items(generator: random.Random, count: int, *, alike: bool) -> list[Item]:
    def options() -> tuple[Option, ...]:
        return tuple(
            Option(generator.randrange(60), generator.choice([0.5, 1.0, generator.random() * 3]))
            for _ in range(generator.randint(1, 4))
        )

    kinds = [options() for _ in range(2 if alike else count)]
    return [Item(f"item {number}", kinds[number % len(kinds)]) for number in range(count)]


def _exhaustive(items: list[Item], limit: int) -> float | None:
    sums = (
        (_most(chosen), sum(option.seconds for option in chosen))
        for chosen in itertools.product(*(item.options for item in items))
    )
    return min((seconds for nbytes, seconds in sums if nbytes <= limit), default=None)


def _most(chosen: Sequence[Option]) -> int:
    """Bytes at any moment: of each item's, those before it are there."""
    before = [0, *itertools.accumulate(option.nbytes for option in chosen)]
    return max(before[-1], *(there + option.peak for there, option in zip(before, chosen, strict=False)))


def _check(items: list[Item], limit: int, choice: Choice) -> None:
    chosen = [item.options[index] for item, index in zip(items, choice.options, strict=True)]
    assert choice.nbytes == sum(option.nbytes for option in chosen)
    assert _most(chosen) <= limit
    assert choice.seconds == pytest.approx(sum(option.seconds for option in chosen))
    assert choice.bound <= choice.seconds


def _blocks(generator: random.Random, count: int) -> list[Item]:
    """Their bytes are kept, or come back for a moment, while the block is computed again."""
    sizes = [(generator.randrange(1, 60), generator.random()) for _ in range(count)]
    return [
        Item(f"block {number}", (Option(nbytes, 0.0), Option(0, seconds, nbytes)))
        for number, (nbytes, seconds) in enumerate(sizes)
    ]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("blocks", [0, 4])
@pytest.mark.parametrize("seed", range(150))
def test_no_choice_is_faster(seed: int, blocks: int, alike: bool) -> None:
    generator = random.Random(seed)
    items = _items(generator, generator.randint(1, 7 - blocks // 2), alike=alike)
    items += _blocks(generator, generator.randint(1, blocks) if blocks else 0)
    limit = generator.randrange(300)
    fastest = _exhaustive(items, limit)
    if fastest is None:
        for search in (best, greedy):
            with pytest.raises(DoesNotFit) as caught:
                search(items, limit)
            assert _exhaustive(items, limit + caught.value.short) is not None
            assert _exhaustive(items, limit + caught.value.short - 1) is None
        return
    choice, simple, few = best(items, limit), greedy(items, limit), best(items, limit, states=4)
    for each in (choice, simple, few):
        _check(items, limit, each)
        assert each.bound <= fastest + 1e-12, "a bound is no more than what can be reached"
        assert each.seconds >= fastest - 1e-12
    assert choice.seconds == pytest.approx(fastest, rel=1e-12)
    assert choice.exact


def _layers(kind: str, count: int = 48, *, recompute: bool = False) -> list[Item]:
    generator = random.Random(3)
    found = []
    for number in range(count):
        size = 28 * MB if kind == "alike" else generator.randrange(MB, 100 * MB)
        start = generator.random() * 1e-2 if kind == "of different speed" else 2e-4
        wire = start + 1e-9 * size
        options = [Option(size // 8, 3 * wire), Option(size // 8 + size, 2 * wire)]
        options.append(Option(size // 8 + size // 2, 2.4 * wire))
        found.append(Item(f"layer {number}", tuple(options)))
    if recompute:
        generator = random.Random(5)
        different = {"alike": 0.0}.get(kind, 1.0)
        for number in range(count):
            nbytes = round(50 * MB * (1 + different * generator.random()))
            seconds = 0.08 * (1 + different * generator.random())
            found.append(Item(f"block {number}", (Option(nbytes, 0.0), Option(0, seconds, nbytes))))
    return found


@pytest.mark.parametrize("kind", ["alike", "different", "of different speed"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("recompute", [False, True])
def test_many_layers_take_few_states(kind: str, recompute: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state takes some 0.1 µs."""
    items = _layers(kind, recompute=recompute)
    least, most = (sum(pick(option.nbytes for option in item.options) for item in items) for pick in (min, max))
    limit = round(least + share * (most - least))
    states = []
    undominated = search._undominated
    monkeypatch.setattr(search, "_undominated", lambda seconds: states.append(len(seconds)) or undominated(seconds))
    choice = best(items, limit)
    assert len(states) <= 3 * len(items), "of several peaks, only a few are heeded"
    assert sum(states) < (300_000 if kind == "different" else 30_000)
    _check(items, limit, choice)
    assert choice.seconds <= greedy(items, limit).seconds
    assert choice.seconds <= 1.0005 * choice.bound, "where very many choices are as fast, within 5 parts in 10^4"
    if kind != "different":
        assert choice.exact


def test_the_greedy_misses_what_the_search_finds() -> None:
    """The best ratio leaves room that nothing fits."""
    items = [Item("a", (Option(0, 2.0), Option(6, 0.9))), *(Item(n, (Option(0, 1.0), Option(5, 0.2))) for n in "bc")]
    assert greedy(items, 10).options == (1, 0, 0)
    assert best(items, 10).options == (0, 1, 1)


def test_a_limit_that_nothing_fits_says_by_how_much() -> None:
    items = [Item(f"layer {number}", (Option(number * MB, 1.0), Option(9 * MB, 0.5))) for number in range(1, 6)]
    with pytest.raises(DoesNotFit, match=r"limit is 12.0 MB, and 15.0 MB .* 3.0 MB more; .*: layer 5 5.0 MB, layer 4"):
        best(items, 12 * MB)
