"""Parameters that became another type, or moved to another device, after wrapping: ``model.half()``, ``model.to(…)``.

Every rank sees that by itself, at its first gradient or in ``step()``, and buckets can only follow if all ranks saw it.

[Note: who has converted by when]
A rank that finds parameters converted tells the others' query threads, and waits for their receipts. Only then it
issues its part of the round's reductions, in the old buckets and with nothing in them. So whoever has seen a reduction of
that round done knows of every rank whether it has converted: either all have, and all make new buckets for the gradients
that are waiting, or all raise. It costs nothing while nobody converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap.core.attendance import Attendance
from overlap.core.bucket import Slot
from overlap.transport.encoding import travels
from overlap.transport.objects import SignatureMismatch
from overlap.transport.peer_queries import PeerQueries

__all__ = ["Change", "Conversion", "changes", "difference"]

_RECEIPT_SECONDS = 600.0


@travels
@dataclass(frozen=True, slots=True)
class Change:
    """One parameter's dtype and kind of device, as text, in its bucket and now."""

    name: str
    before: str
    now: str


def changes(slots: Iterable[Slot]) -> list[Change]:
    """Of the `slots` that are in buckets: which were converted since."""
    return [
        Change(slot.name, f"{slot.place.dtype} on {slot.place.device.type}", kind_of(slot))
        for slot in slots
        if slot.place is not None and slot.converted
    ]


def kind_of(slot: Slot) -> str:
    """The dtype and the kind of device of its parameter; ranks may use several devices of a kind."""
    return f"{slot.param.dtype} on {slot.param.device.type}"


def difference(told: Mapping[int, Sequence[Change]], ranks: Sequence[int]) -> str | None:
    """What to raise where `ranks`, of which those in `told` have converted parameters, do not hold the same (pure)."""
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


class Conversion:
    """What the members of one optimizer said about their parameters. `rank` is this one's in the job."""

    def __init__(self, rank: int, attendance: Attendance, peer_queries: PeerQueries) -> None:
        self._rank, self._ranks, self._peer_queries = rank, attendance.ranks, peer_queries
        self._attendance, self._topic = attendance, f"{attendance.topic}/conversion"
        self._told: dict[int, tuple[int, Sequence[Change]]] = {}  # by rank: the round, and what changed before it
        peer_queries.on(self._topic, self._hear)

    def _hear(self, sender: int, letter: tuple[int, Sequence[Change]]) -> None:
        self._told[sender] = letter

    def tell(self, number: int, mine: Sequence[Change]) -> None:
        """Every member knows, when this returns, what this rank has converted before round `number`."""
        self._told[self._rank] = number, mine
        others = [rank for rank in self._ranks if rank != self._rank]
        asked = [(rank, self._peer_queries.ask(rank, self._topic, (number, mine))) for rank in others]
        for rank, receipt in asked:
            PeerQueries.wait(receipt, rank, self._topic, _RECEIPT_SECONDS)

    def check(self, number: int) -> None:
        """Once a reduction of round `number` is done. Raises ``SignatureMismatch`` on every member, or on none.

        Where ranks have joined: :class:`overlap.features.join.CannotJoin`.
        """
        told = {rank: mine for rank, (round_, mine) in list(self._told.items()) if round_ == number}
        if not told:
            return
        # Who has told of it was there, though it may have dropped the optimizer, and joined, before this rank looks.
        present = sorted({*told, *(self._ranks[index] for index in self._attendance.present(number))})
        away = sorted(set(self._ranks).difference(present))
        problem = difference(told, present)
        if problem is not None or away:
            self._told.clear()
        if problem is not None:
            raise SignatureMismatch(problem)
        if away:
            raise self._attendance.cannot_join(
                f"parameters were converted on ranks {sorted(told)}, which every rank has to do, and ranks {away} have "
                "joined; convert the model before or after join()"
            )

    def settled(self) -> None:
        """All members have converted the same, and made new buckets."""
        self._told.clear()
