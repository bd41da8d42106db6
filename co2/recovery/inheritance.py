"""Passes on what is left of the outer state when ranks are lost to the optimizers of those that go on.

Of the outer momentum, and of what streaming bytes left out, each rank has a shard: the shards of lost ranks begin at zero.
Under ``"eager"``, where each rank has its own, those that go on take the mean. What the bytes of a rank's own progress left
out stays with that rank. Rounds begin at the parameters as they are, and nothing is on its way. ``"acco"`` begins anew.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from co2.equations import Acco
from co2.part import LASTING, as_real, outer_dtype
from co2.rounds import Rounds
from overlap.job.session import Session
from overlap.transport.memory import from_flat
from overlap.transport.objects import allgather_object

__all__ = ["bequeath", "inherit", "left_by", "outer_vectors"]

log = logging.getLogger("dear")

Left = dict[str, Any]  # see left_by()

# What the optimizers of a session take over on this rank, in the order in which they are made.
_bequeathed: weakref.WeakKeyDictionary[Session, list[Left]] = weakref.WeakKeyDictionary()


def left_by(several: Sequence[Rounds], before: Sequence[Left]) -> list[Left]:
    """What this rank has of the outer state of `several` optimizers, once rounds in flight have failed or arrived.

    What it had `before` where none of them has begun; nothing of one whose parameters went to another.
    """
    training = [rounds for rounds in several if not rounds.retired]
    return [_left_of(rounds) for rounds in training] if any(rounds.parts for rounds in training) else list(before)


def _left_of(rounds: Rounds) -> Left:
    left = rounds.left()
    parts = [] if isinstance(rounds.rule, Acco) else rounds.parts
    own = {index: vectors for part in parts for index, vectors in part.own_vectors().items()}
    return {
        **left,
        "shares": {index: share for part in parts for index, share in part.lasting().items()},
        "residuals": {index: vectors["residual"] for index, vectors in own.items() if "residual" in vectors},
    }


def bequeath(session: Session, left: Sequence[Left]) -> None:
    """Keep what this rank has `left` of the last session's optimizers for those made in `session`, in their order."""
    _bequeathed[session] = list(left)


def inherit(session: Session, rounds: Rounds) -> None:
    """Take over what ranks have left, where `session` follows another one. On every rank, as the optimizer is made."""
    if session.roster is None or session.roster.number == 1:
        return
    queue = _bequeathed.get(session, [])
    mine = queue.pop(0) if queue else None
    everybodys = [left for left in allgather_object(session.control, mine) if left is not None]
    if not everybodys or isinstance(rounds.rule, Acco):
        return
    first = everybodys[0]
    if (first["outer"], first["names"]) != (rounds.rule.name, [slot.name for slot in rounds.slots]):
        log.warning("co2: the outer state begins anew: this is another outer rule or model than before ranks changed")
        return
    known = sorted(index for batch in first["batches"] for index in batch)
    rounds.begin_at(
        {
            "parameters": {index: _vectors(rounds, index, everybodys, mine) for index in known},
            "batches": first["batches"],
            "steps": first["steps"],
            "longest": first["longest"],
        }
    )


def _vectors(rounds: Rounds, index: int, everybodys: Sequence[Left], mine: Left | None) -> dict[str, torch.Tensor]:
    values = as_real(rounds.slots[index].param).to("cpu", outer_dtype(rounds.slots[index].param.dtype))
    residual = None if mine is None else mine["residuals"].get(index)
    shares = [left["shares"][index] for left in everybodys if index in left["shares"]]
    return outer_vectors(values, shares, residual)


def outer_vectors(
    values: torch.Tensor, shares: Sequence[tuple[int, int, Mapping[str, torch.Tensor]]], residual: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The outer state of a parameter with these `values`, as all kinds of parts know it, from the `shares` that are left:
    from which element to which, and the vectors there. Of those that overlap, the mean; zero where there is none (pure)."""
    vectors = {"start": values, "next": values, "pending": torch.zeros_like(values)}
    vectors["residual"] = torch.zeros_like(values) if residual is None else residual
    for name in LASTING:
        total, number = values.new_zeros(values.numel()), values.new_zeros(values.numel())
        for low, high, found in shares:
            if name in found:
                total[low:high] += found[name]
                number[low:high] += 1
        vectors[name] = from_flat(total / number.clamp(min=1), values)
    return vectors
