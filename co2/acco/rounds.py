"""The rounds of "acco": each half of a batch is averaged while the gradients of the next half are computed.

    step      1       2       3       4       5         outer_frequency=1
    compute | h0(x0)| g0(x0)| h1(e1)| g1(x1)| h2(e2)    which gradients, of which parameters
    comm            | h0→e1 | g0→x1 | h1→e2 | g1→x2     sent, and what comes back: e, an estimate, or x

A call of ``step()`` adds gradients to those of the round, and leaves parameters alone. `outer_frequency` calls are a round,
half a batch, at whose end what the round before led to takes the place of parameters (`co2.equations`, "acco"). So the
mechanism is that of all rounds (`co2.rounds`), with gradients in the place of parameters, and the user's optimizer, on
shards (`co2.acco.update`), in that of an outer step. Ranks hold the same parameters at all times.

**How many gradients** there are, each round counts over all ranks: a step that a GradScaler skips adds none, on its rank.

**average_parameters()** makes the update that is not made yet, of all gradients that are here, and waits for it; a batch
begins anew. **warmup_steps** are such updates: synchronous training.

**The state** of the user's optimizer is with the shards, and nowhere else. A checkpoint has all of it, in its usual place;
and exact parameters, the sum of a first half, what parameters become next, and this rank's gradients of the round.

**A frozen parameter** takes over what was on its way, and stays.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from co2.acco.part import AccoPart
from co2.acco.update import ShardSteps
from co2.averaged_parameters import Versions
from co2.part import Part, Shares
from co2.rounds import Rounds
from co2.schedule import Event
from overlap.core.bucket import Slot
from overlap.state.elementwise import is_elementwise
from overlap.state.pieces import assemble

__all__ = ["AccoRounds", "check"]

log = logging.getLogger("dear")

_WRITTEN = (
    "co2: something was written to parameter %r between steps. With outer='acco' parameters become what the optimizer "
    "makes of exact ones that ranks have shards of, so it is replaced when the next round arrives"
)


def check(optimizer: torch.optim.Optimizer, slots: Sequence[Slot], elementwise: bool | None) -> None:
    """Raise ``ValueError`` where shards of parameters cannot be updated."""
    if not (is_elementwise(optimizer) if elementwise is None else elementwise):
        raise ValueError(
            f"outer='acco' updates shards of parameters, and {type(optimizer).__name__} is not known to update each "
            "element from its own gradient and state alone (elementwise=True promises that it does): take "
            "another optimizer, or another rule"
        )
    strange = next((slot for slot in slots if slot.param.is_complex()), None)
    if strange is not None:
        raise ValueError(f"outer='acco' trains real parameters, and {strange.name!r} is {strange.param.dtype}")


class AccoRounds(Rounds):
    """Rounds whose parts are all :class:`AccoPart`; `steps` updates this rank's shards."""

    _COUNTERS = (*Rounds._COUNTERS, "halves")

    def __init__(self, steps: ShardSteps, *arguments: Any) -> None:
        self._steps, self._warned = steps, False
        super().__init__(*arguments)

    def _forget(self) -> None:
        super()._forget()
        self.halves = 0  # since the last average
        self._placed = Versions()  # of parameters, as they were put where they are

    @torch.no_grad()
    def local_update(self, _optimizer: torch.optim.Optimizer) -> None:
        """Add the gradients to those of the round."""
        for part in self._of_acco():
            part.accumulate()

    def _of_acco(self, parts: Sequence[Part] | None = None) -> list[AccoPart]:
        return [part for part in (self.parts if parts is None else parts) if isinstance(part, AccoPart)]

    # - Rounds

    def stepped(self) -> None:
        written = next((slot for slot in self._slots if self._placed.differs(slot)), None)
        if written is not None and not self._warned:
            self._warned = True
            log.warning(_WRITTEN, written.name)
        super().stepped()

    def _turn(self, idle: frozenset[int]) -> None:
        self._steps.note()
        for part in self._of_acco():
            part.second = self.halves % 2 == 1
        super()._turn(idle)
        self._place(idle)

    def _send_average(self, idle: frozenset[int], event: Event) -> None:
        self._steps.note()
        super()._send_average(idle, event)

    def _average(self, idle: frozenset[int], event: Event) -> None:
        super()._average(idle, event)
        self._place(idle)

    def _place(self, idle: frozenset[int]) -> None:
        self._placed = Versions(self._slots[index] for index in self._averaged.known if index not in idle)

    def _close(self, event: Event, idle: frozenset[int]) -> None:
        super()._close(event, idle)
        self.halves = self.halves + 1 if event is Event.ROUND else 0

    # - State

    def _beside(self, shares: Sequence[Shares]) -> dict[str, Any]:
        """The state of the user's optimizer, by slot."""
        states: dict[int, Mapping[str, Any]] = {}
        for part in self._of_acco():
            states.update(copy.deepcopy(part.whole_states))
        pieces = [{i: (low, high, vectors["state"]) for i, (low, high, vectors) in share.items()} for share in shares]
        held = assemble(self._slots, pieces, whole=False)
        for slot in self._slots:
            states.setdefault(slot.index, held.get(slot.param, {}))
        return {"state": {index: state for index, state in sorted(states.items()) if state}}

    def load(self, section: dict[str, Any] | None, inner: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        for slot in self._slots:
            if inner and slot.index in inner:
                self._steps.give(slot, inner[slot.index])
        super().load(section)
