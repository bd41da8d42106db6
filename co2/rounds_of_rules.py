"""Chooses the schedule, the rounds and the parts that an outer rule needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from co2.acco.part import AccoPart
from co2.acco.rounds import AccoRounds
from co2.acco.update import ShardSteps
from co2.eager_part import EagerPart
from co2.equations import Acco, Averaging, Eager, OuterRule, Overlapped, SparseLoCo, StreamingDiLoCo
from co2.fragments.rounds import StreamingRounds
from co2.fragments.sparse_part import SparsePart
from co2.fragments.streaming_part import StreamingPart
from co2.part import Part
from co2.rounds import Rounds
from co2.schedule import Schedule, StreamingSchedule

__all__ = ["rounds_of", "schedule_of"]


def schedule_of(rule: OuterRule, frequency: int, warmup: int) -> Schedule:
    """The schedule of a rule. Raises ``ValueError`` for steps that are none, or that do not fit together."""
    schedule = Schedule(frequency, warmup)
    if not isinstance(rule, Overlapped):
        return schedule
    if rule.mixing == 0 and rule.overlap_steps == frequency and (rule.fragments or 1) == 1:
        raise ValueError(
            f"mixing=0 with overlap_steps={frequency}, as many as outer_frequency: all that ranks learn would be dropped "
            "when a round arrives; take fewer overlap_steps, or a larger mixing"
        )
    return StreamingSchedule(frequency, warmup, fragments=rule.fragments or 1, overlap=rule.overlap_steps)


def rounds_of(
    rule: OuterRule,
    schedule: Schedule,
    weight: float,
    optimizer: torch.optim.Optimizer,
    comm: Any,
    slots: Any,
    *others: Any,
) -> Rounds:
    """The rounds of a rule; `weight` is this rank's in a mean, with those of its group.

    The others are as :class:`Rounds` takes them.
    """
    if isinstance(rule, Acco):
        steps = ShardSteps(optimizer)
        return AccoRounds(steps, comm, slots, schedule, rule, partial(AccoPart, steps), *others)
    kind: Callable[..., Rounds] = StreamingRounds if isinstance(rule, Overlapped) else Rounds
    return kind(comm, slots, schedule, rule, _part_of(rule, weight), *others)


def _part_of(rule: OuterRule, weight: float) -> Callable[..., Part]:
    if isinstance(rule, Eager):
        return partial(EagerPart, rule, weight)
    if isinstance(rule, StreamingDiLoCo):
        return partial(StreamingPart, rule)
    if isinstance(rule, SparseLoCo):
        return partial(SparsePart, rule)
    assert isinstance(rule, Averaging), "there is no other kind"
    return partial(Part, rule)
