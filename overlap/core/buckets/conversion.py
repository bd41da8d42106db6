"""Notices parameters that got another type or device after wrapping, as by ``model.half()`` or ``model.to(…)``.

Every rank sees that by itself, at its first gradient or in ``step()``. Its gradients then wait for the tally of ``step()``,
which tells whether any rank has converted parameters, and whether any has not (`overlap.core.closing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap.core.bucket import Slot
from overlap.transport.encoding import travels

__all__ = ["Change", "changes", "difference"]


@travels
@dataclass(frozen=True, slots=True)
class Change:
    """A parameter that was converted: its dtype and kind of device, as text, in its bucket and now."""

    name: str
    before: str
    now: str


def changes(slots: Iterable[Slot]) -> list[Change]:
    """The slots among `slots` that are in buckets and whose parameters were converted since."""
    found = []
    for slot in slots:  # in every step: without a call for each
        place, param = slot.place, slot.param
        other = place is not None and (param.dtype is not place.dtype or param.device != place.device)
        if other and place is not None and slot.converted:
            found.append(Change(slot.name, f"{place.dtype} on {place.device.type}", kind_of(slot)))
    return found


def kind_of(slot: Slot) -> str:
    """The dtype and the kind of device of a slot's parameter; ranks may use several devices of a kind."""
    return f"{slot.param.dtype} on {slot.param.device.type}"


def difference(told: Mapping[int, Sequence[Change]], ranks: Sequence[int]) -> str | None:
    """The message to raise where `ranks`, of which those in `told` have converted parameters, differ in them (pure)."""
    before = {change.name: change.before for mine in told.values() for change in mine}
    kinds = {rank: before | {change.name: change.now for change in told.get(rank, ())} for rank in ranks}
    first = ranks[0]
    for rank in ranks:
        for name, kind in kinds[rank].items():
            if kind != kinds[first][name]:
                return (
                    f"ranks {sorted(told)} of {list(ranks)} have converted parameters since the last step(): {name!r} is "
                    f"{kinds[first][name]} on rank {first} and {kind} on rank {rank}; convert the model on every rank, "
                    "between the same steps"
                )
    return None
