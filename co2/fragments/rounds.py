"""Rounds of "streaming-diloco" and "sparseloco": fragments of the model in turn, each on its way under a few of the steps
that follow; with sparseloco as it comes, one fragment, which is waited for.

    step        1   2   3   4   5   6   7   8   9      two fragments, outer_frequency=6, overlap_steps=2
    fragment 0          s   .   a               s
    fragment 1                      s   .   a          s: sent after this step, a: applied after it

**Fragments** are of whole layers, strided (`co2.fragments.layers`): found from the names of parameters, so the same on all
ranks. A parameter that is added or thawed later joins the fragment of its layer.

**The schedule** is a function of the step's number since the last average of all parameters (`co2.schedule`): turn j sends
fragment j mod F after step (j + 1) H / F, rounded down, and applies it overlap_steps later, before turn j + 1 is sent. So
one fragment is on its way at a time, and the mechanism is that of all rounds (`co2.rounds`), with rounds that concern some
of the parts: a turn is a round and an event, and all that holds for events, of who may ask whom and when, holds for turns.
At the end of a turn no parameter changes. Between sending and applying, this rank knows that something is `pending`.

**What travels** with streaming-diloco (`codec`, `streaming_part`): each rank's progress since the last outer step
of the fragment, encoded, in an all-to-all; the owner of each shard sums in fp32, or fp64 where parameters are, and makes
the outer step; that is encoded, too, and gathered. So a turn moves 2 (P-1)/P of the fragment's encoded bytes from each
rank, as a reduce-scatter and an all-gather do. With sparseloco (`sparse_codec`, `sparse_part`) everybody's progress
goes to everybody, in an all-gather: P - 1 times what one rank has encoded, which is little. What the encoding leaves out is
kept, by whoever encoded, and sent with a later turn of the fragment.

**The state** of a rank (`co2.fragments.part`), beside its parameters and inner optimizer: x, which is the same on all
ranks, and what its own progress left out; with streaming-diloco its shard of the momentum and of what the outer steps left
out. A checkpoint has x, this rank's own remainder, and the shards of all ranks; `turns` and `pending` say what comes next.
Where every rank saves its own and loads it, training goes on bit for bit, from anywhere between two steps; also while a
fragment is on its way, as saving waits for it, and what is applied later is x. From rank 0's alone, all ranks take rank
0's remainder over.

**average_parameters()** applies what is pending, and then all parameters become their mean, in full precision; that
is x, and the turns begin anew with fragment 0. Momentum and remainders stay. Frozen parameters are averaged as well, since
mixing leaves ranks with values of their own. **warmup_steps** are such averages. **finish()** waits for a turn on its way,
or sends the one that other ranks have sent; parameters stay as they are, so what is pending is not applied. **join()**:
what a rank had learned before it was out of data is sent with the next turn of each fragment; then it sends nothing that
counts, and keeps what bytes have left out until it trains again (`co2.join`).

**A frozen parameter** takes over what was on its way when it was frozen; at the next turn of its fragment it sends nothing
more, and stays. What a script writes to it stays, too, and counts as progress once it is trained again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from co2.averaged_parameters import Batch
from co2.communication import Told
from co2.equations import Overlapped
from co2.fragments.layers import fitting, fragments_of, layer_of, layers_of
from co2.fragments.part import OverlappedPart
from co2.part import Part
from co2.rounds import Rounds
from co2.schedule import Event, StreamingSchedule
from overlap.core.bucket import Slot
from overlap.transport.communicator import Communicator

__all__ = ["StreamingRounds"]


class StreamingRounds(Rounds):
    """Rounds whose schedule is a :class:`StreamingSchedule`, with as many fragments as fit where the rule names none."""

    schedule: StreamingSchedule
    _COUNTERS = (*Rounds._COUNTERS, "turns", "pending")

    def __init__(
        self, comm: Communicator, slots: list[Slot], schedule: StreamingSchedule, rule: Overlapped, *others: Any
    ) -> None:
        names = [slot.name for slot in slots]
        layers = len(set(layers_of(names)))
        if rule.fragments is None:
            schedule = replace(schedule, fragments=fitting(names, schedule.frequency, schedule.overlap))
        elif rule.fragments > layers:
            raise ValueError(
                f"fragments={rule.fragments} are of whole layers, and the names of parameters tell of {layers}, such as "
                f"{layer_of(names[0])!r}: take at most as many"
            )
        super().__init__(comm, slots, schedule, rule, *others)

    @torch.inference_mode(False)
    def begin(self) -> None:
        if self.pending and self.waits:
            self._apply()  # whoever waited for it was interrupted
        super().begin()

    @property
    def waits(self) -> bool:
        return self.schedule.overlap == 0

    def _forget(self) -> None:
        super()._forget()
        self.turns = 0  # since the last average of all parameters
        self.pending = False  # the last turn's fragment is not applied yet

    # - Fragments

    def _fragments(self) -> list[int]:
        """Of each slot."""
        return fragments_of([slot.name for slot in self._slots], self.schedule.fragments)

    def _together(self, batch: Batch) -> list[Batch]:
        found = self._fragments()
        divided = [tuple(i for i in batch if found[i] == fragment) for fragment in range(self.schedule.fragments)]
        return [together for together in divided if together]

    def _of_turn(self, turn: int) -> list[Part]:
        found, fragment = self._fragments(), self.schedule.fragment(turn)
        return [part for part in self.parts if found[part.slots[0].index] == fragment]

    def _concerned(self) -> list[Part]:
        return self._of_turn(self.turns)

    def _travelling(self, idle: frozenset[int], event: Event) -> list[str]:
        """Ranks that have come to another turn would move one layer by another's progress: they are told apart here."""
        if event is Event.ROUND:  # of other fragments, a rank that has joined may have learned nothing more
            concerned = {slot.index for part in self._concerned() for slot in part.slots}
            idle = idle.union(index for index in self._averaged.known if index not in concerned)
        what = f"fragment {self.schedule.fragment(self.turns)}" if event is Event.ROUND else "an average"
        return [f"{what}, after {self.turns} turns", *super()._travelling(idle, event)]

    @property
    def exchanged_bytes(self) -> int:
        """The number of bytes of the largest fragment."""
        found, sizes = self._fragments(), [0] * self.schedule.fragments
        for part in self.parts:
            sizes[found[part.slots[0].index]] += part.exchanged_bytes
        return max(sizes)

    # - Turns

    def _due(self) -> Event:
        if self.pending and self.in_round >= self.schedule.overlap:
            self._apply()
        return self.schedule.after(self.steps, self.in_round, self.turns)

    def _apply(self) -> None:
        """The last turn's fragment counts for parameters, once it is here."""
        self.arrive(in_step=self.schedule.overlap > 0)
        arriving = self._averaged.arriving
        for part in self._of_turn(self.turns - 1):
            assert isinstance(part, OverlappedPart)
            part.apply(arriving)
        self.pending = False

    def _turn(self, idle: frozenset[int]) -> None:
        super()._turn(idle)
        if self.schedule.overlap == 0:
            self._apply()

    def _average(self, idle: frozenset[int], event: Event) -> None:
        if self.pending:
            self._apply()
        super()._average(idle, event)

    def _close(self, event: Event, idle: frozenset[int]) -> None:
        super()._close(event, idle)
        self.turns, self.pending = (self.turns + 1, True) if event is Event.ROUND else (0, False)

    def _take_over(self, told: Told) -> None:
        super()._take_over(told)
        if self.pending:
            self._apply()  # as those that train have, before they sent the next one

    # - State

    def collect(self) -> dict[str, Any]:
        return {**super().collect(), "fragments": self.schedule.fragments, "fragment": self._fragments()}

    def load(self, section: dict[str, Any] | None, inner: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        saved = None if section is None else section.get("fragments", self.schedule.fragments)
        if saved is not None and saved != self.schedule.fragments:
            raise ValueError(
                f"the outer state was saved with {saved} fragments, and this optimizer has {self.schedule.fragments}: pass "
                f"fragments={saved}, or leave the state out, and turns begin at the parameters as they are"
            )
        for slot, before, now in zip(self._slots, (section or {}).get("fragment", ()), self._fragments(), strict=False):
            if before != now:
                raise ValueError(
                    f"the outer state was saved with parameter {slot.index} in fragment {before}, and {slot.name!r} is in "
                    f"fragment {now}: names of parameters, or their order, were others; give named_parameters as then"
                )
        super().load(section, inner)
