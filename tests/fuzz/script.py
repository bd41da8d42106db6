"""What a random training script consists of, and how one is made from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

__all__ = ["LAYERS", "Change", "End", "Kind", "Script", "Step", "Use", "Zero", "generate", "sharded", "smaller"]

LAYERS = 4
STEPS = 9


class Use(Enum):
    """What one rank does in one backward pass."""

    WHOLE = auto()
    PART = auto()  # the first layer and the last one
    NOTHING = auto()  # it has no batch


class Zero(Enum):
    """When gradients are zeroed."""

    BEFORE = auto()
    AFTER = auto()
    TWICE = auto()  # before, two times
    NEVER = auto()


class End(Enum):
    """What becomes of the gradients of a step."""

    STEP = auto()
    CLIP = auto()  # optimizer.clip_grad_norm_(), then step()
    SYNCHRONIZE = auto()  # then torch's own clipping, then step() inside skip_synchronize()
    SCALER = auto()
    INFINITE = auto()  # a scaler's step with an infinity on the last rank
    CLOSURE = auto()
    SKIP = auto()  # optimizer.zero_grad()
    SKIP_BY_MODEL = auto()  # model.zero_grad()
    SKIP_CLIPPED = auto()  # optimizer.zero_grad() after clipping


class Kind(Enum):
    """Of what a script changes before a step."""

    FREEZE = auto()
    THAW = auto()
    THAW_HERE = auto()  # on one rank
    RATE = auto()
    METRIC = auto()  # an all-reduce by name
    SAVE = auto()
    LOAD = auto()
    ADD = auto()  # a parameter group
    SWAP = auto()  # p.data with another tensor


@dataclass(frozen=True)
class Change:
    kind: Kind
    number: int = 0  # of a layer …
    rank: int = 0  # … and on which rank


@dataclass(frozen=True)
class Step:
    passes: tuple[tuple[Use, ...], ...]  # backward passes, by rank; all but the last inside no_sync()
    end: End = End.STEP
    by_hand: bool = False  # gradients of torch.autograd.grad()
    changes: tuple[Change, ...] = ()
    looks: bool = False  # the script looks at its parameters afterwards


@dataclass(frozen=True)
class Script:
    seed: int
    ranks: int
    zero: Zero
    set_to_none: bool
    adam: bool
    tied: bool
    steps: tuple[Step, ...]

    @property
    def early(self) -> bool:
        """Whether updates before ``step()`` can honour all of it."""
        changes = {change.kind for step in self.steps for change in step.changes}
        plain = all(step.end is End.STEP and len(step.passes) == 1 and not step.by_hand for step in self.steps)
        return plain and self.zero is not Zero.NEVER and changes <= {Kind.FREEZE, Kind.THAW, Kind.METRIC, Kind.RATE}

    @property
    def may_raise(self) -> bool:
        """Whether a rank cannot tell that others skip a step: they do so by another call than the optimizer's."""
        return any(
            step.end is End.SKIP_BY_MODEL and len({use for uses in step.passes for use in uses}) > 1
            for step in self.steps
        )

    def __str__(self) -> str:
        zero = f"zero_grad() {self.zero.name.lower()}, set_to_none={self.set_to_none}"
        head = f"seed {self.seed}: {self.ranks} ranks, {zero}, {'Adam' if self.adam else 'SGD'}{', tied' * self.tied}"
        lines = []
        for number, step in enumerate(self.steps):
            changes = ", ".join(f"{c.kind.name} {c.number}@{c.rank}" for c in step.changes)
            passes = " + ".join("/".join(use.name for use in uses) for uses in step.passes)
            words = [changes, passes, "by hand" * step.by_hand, step.end.name, "looks" * step.looks]
            lines.append(f"  {number}: " + "; ".join(filter(None, words)))
        return "\n".join([head, *lines])


def generate(seed: int, ranks: int, *, plain: bool = False) -> Script:
    """The script of `seed`; `plain` ones can be updated early."""
    chance = random.Random(seed)
    zero = chance.choices(list(Zero)[: 3 if plain else 4], weights=[5, 3, 1, 1][: 3 if plain else 4])[0]
    ends = [End.STEP] if plain or zero is Zero.NEVER else list(End)
    weights = [1] if len(ends) == 1 else [6, 2, 2, 2, 1, 2, 3, 1, 1]
    steps = []
    saved = added = False
    for number in range(STEPS):
        end = chance.choices(ends, weights)[0]
        uneven = chance.random() < 0.5
        count = 1 if plain or end is End.CLOSURE or chance.random() < 0.8 else 2
        passes = tuple(
            tuple(chance.choices(list(Use), [3, 1, 2])[0] if uneven else Use.WHOLE for _ in range(ranks))
            for _ in range(count)
        )
        changes = []
        if number and chance.random() < 0.5:
            kinds = [Kind.FREEZE, Kind.THAW, Kind.RATE, Kind.METRIC]
            if not plain:
                kinds += [Kind.THAW_HERE, Kind.SAVE, Kind.SWAP, Kind.LOAD if saved else Kind.SAVE]
                kinds += [] if added else [Kind.ADD]
            kind = chance.choice(kinds)
            changes.append(
                Change(kind, chance.randrange(LAYERS - 1), chance.randrange(ranks))
            )  # the last is always trained
            saved = saved or kind is Kind.SAVE
            if kind is Kind.ADD:
                added, saved = True, False  # an older state has one group less
        by_hand = not plain and count == 1 and end is not End.CLOSURE and chance.random() < 0.1
        steps.append(Step(passes, end, by_hand, tuple(changes), chance.random() < 0.3))
    last = replace(steps[-1], end=End.STEP, looks=True)
    return Script(
        seed,
        ranks,
        zero,
        set_to_none=plain or chance.random() < 0.8,
        adam=chance.random() < 0.4,
        tied=chance.random() < 0.3,
        steps=(*steps[:-1], last),
    )


def sharded(script: Script) -> Script:
    """The nearest script in which all ranks make the same passes, and nobody adds by hand to gradients in shards."""

    def even(step: Step) -> Step:
        passes = tuple(tuple(Use.PART if use is Use.NOTHING else use for use in uses) for uses in step.passes)
        return replace(step, passes=passes, by_hand=step.by_hand and script.zero is not Zero.NEVER)

    return replace(script, steps=tuple(map(even, script.steps)))


def smaller(script: Script) -> Iterator[Script]:
    """Scripts that are `script` with one thing less."""
    steps = script.steps
    for number, step in enumerate(steps):
        if len(steps) > 1:
            yield replace(script, steps=steps[:number] + steps[number + 1 :])
        whole = tuple(tuple(Use.WHOLE for _ in uses) for uses in step.passes)
        for less in (
            replace(step, changes=()),
            replace(step, by_hand=False),
            replace(step, end=End.STEP),
            replace(step, passes=step.passes[-1:]),
            replace(step, passes=whole),
            replace(step, looks=False),
        ):
            if less != step:
                yield replace(script, steps=(*steps[:number], less, *steps[number + 1 :]))
    for plainer in (
        replace(script, tied=False),
        replace(script, adam=False),
        replace(script, zero=Zero.BEFORE),
        replace(script, set_to_none=True),
    ):
        if plainer != script:
            yield plainer
